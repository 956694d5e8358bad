"""From a path to a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.backends.onnx import OnnxBackend
from shoal.backends.python import PythonBackend
from shoal.backends.registry import open_backend
from shoal.errors import ConfigError


def test_kinds_are_told_by_their_path(onnx_files: Any, model_file: Callable[..., str]) -> None:
    """ONNX by its ending in any case, Python by its colon, the embedded model by its name."""
    onnx = onnx_files.one()
    upper = onnx_files.save(__import__("onnx").load(onnx), "UPPER.ONNX")
    python = model_file("class Model:\n    inputs = outputs = {'x': ('FP32', ())}\n    def __call__(self, x):\n        return x\n")
    assert isinstance(open_backend(onnx, threads=2), OnnxBackend)
    assert isinstance(open_backend(upper), OnnxBackend)
    assert isinstance(open_backend("digits"), OnnxBackend)
    assert isinstance(open_backend(python), PythonBackend)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("model.pt", "model.onnx"),
        ("model", "`digits`"),
        ("", "the empty path"),
        ("model.py", "as in model.py:Model"),
        ("none.onnx", "no such file"),
        ("none.py:Model", "no such file"),
    ],
)
def test_other_paths_are_refused_with_what_is_supported(path: str, says: str) -> None:
    """An unknown kind lists the known ones; a Python file without a name shows how to write it."""
    with pytest.raises(ConfigError, match=r".") as caught:
        open_backend(path)
    assert says in caught.value.message
