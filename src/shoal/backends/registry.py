"""From a path in the settings to a loaded backend. The only file that knows which kinds of model there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from shoal.backends.base import Backend
from shoal.config.loading import python_target
from shoal.errors import ConfigError

__all__ = ["SUPPORTED", "open_backend"]

SUPPORTED: Final = (
    "`digits` (the embedded model), an ONNX file `model.onnx` (or .ort), "
    "or a Python model `path/to/file.py:Class` or `module:Class` (a function will do as well)"
)


def open_backend(path: str, *, threads: int = 1, providers: Sequence[str] = ("CPUExecutionProvider",)) -> Backend:
    """Load the model that `path` names, for `threads` CPUs. Raises `ConfigError`, which says what to change.

    `providers` are ONNX Runtime's execution providers; other backends have none. A Python model that computes with numpy uses the
    threads of numpy's own library, which `threads` does not govern.
    """
    if path == "digits":
        from shoal.models import digits_path

        path = str(digits_path())
    if PurePath(path).suffix.lower() in (".onnx", ".ort"):
        from shoal.backends.onnx_load import open_onnx

        return open_onnx(path, threads=threads, providers=providers)
    if python_target(path) is not None:
        from shoal.backends.python import open_python

        return open_python(path)
    if PurePath(path).suffix.lower() == ".py":
        raise ConfigError(f"{path}: name the class or function behind the file, as in {path}:Model")
    raise ConfigError(f"{path or 'the empty path'}: not a kind of model that can be served; give {SUPPORTED}")
