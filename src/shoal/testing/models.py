"""Small Python models for tests, written to files so that they are loaded the way a user's are."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from shoal.testing.gates import Gate, gate

__all__ = ["doubling", "gated", "gated_model", "python_model"]

_numbers = itertools.count(1)


def python_model(directory: Path, source: str, name: str = "Model") -> str:
    """Write `source` to a new file in `directory`; returns the path to serve it by, `file.py:name`."""
    path = directory / f"model_{next(_numbers)}.py"
    path.write_text("import numpy as np\n" + textwrap.dedent(source))
    return f"{path}:{name}"


def doubling(directory: Path, columns: int = 4) -> str:
    """A model `y = 2 x`, FP32 rows of `columns` (-1: any number)."""
    return python_model(
        directory,
        f"""
        class Model:
            inputs = {{"x": ("FP32", ({columns},))}}
            outputs = {{"y": ("FP32", ({columns},))}}
            def __call__(self, x):
                return 2 * x
        """,
    )


def gated_model(directory: Path, source: str) -> tuple[str, Gate]:
    """Like `python_model`, with a gate of its own, which `source` knows as `GATE`. Serve it with `probe = false`."""
    name = f"gated-{next(_numbers)}"
    path = python_model(directory, f"from shoal.testing.gates import gate\nGATE = gate({name!r})\n" + textwrap.dedent(source))
    return path, gate(name)


def gated(directory: Path, columns: int = 4) -> tuple[str, Gate]:
    """The model `y = 2 x` behind a gate, which notes the first number of each row of each call."""
    return gated_model(
        directory,
        f"""
        class Model:
            inputs = {{"x": ("FP32", ({columns},))}}
            outputs = {{"y": ("FP32", ({columns},))}}
            def __call__(self, x):
                GATE.enter(x[:, 0].tolist())
                return 2 * x
        """,
    )
