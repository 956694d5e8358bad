"""Finding the object that `file.py:Object` or `module:Object` names. What it is and whether it fits is for `python.py`.

A file is imported under a name of its own each time it is opened: two files called `model.py` never meet in `sys.modules`, an
edited file is read afresh, and its folder need not be on `sys.path`. (It cannot import files beside it for the same reason: put
several files into a package, and serve `package.module:Class`.) A module is imported the usual way, with the current folder
searched too, as `python -m` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from shoal.config.loading import python_target
from shoal.errors import ConfigError

__all__ = ["Source", "import_target"]

_numbers: Final = itertools.count(1)  # only ever makes module names differ


class Source:
    """The object that was found, and how many instances still need the module that it came from."""

    def __init__(self, target: Any, module_name: str | None) -> None:
        self.target = target
        self._module_name = module_name
        self._users = 1

    def acquire(self) -> None:
        """One more instance."""
        self._users += 1

    def release(self) -> None:
        """One fewer; a module that came from a file is forgotten with the last."""
        self._users -= 1
        if self._users == 0 and self._module_name is not None:
            sys.modules.pop(self._module_name, None)


def import_target(target: str) -> Source:
    """The object behind `target`. Raises `ConfigError` for a missing file, a failing import or a missing name."""
    parts = python_target(target)
    if parts is None:
        raise ConfigError(f"{target}: not a Python model; write path/to/file.py:Class or module:Class")
    place, name = parts
    if place.endswith(".py") and (Path(place).is_file() or "/" in place or not _importable(place)):
        module = _from_file(target, Path(place))
        source = Source(None, module.__name__)
    else:
        module = _from_module(target, place)
        source = Source(None, None)
    try:
        source.target = _attribute(target, module, name)
    except BaseException:
        source.release()
        raise
    return source


def _importable(place: str) -> bool:
    """Whether `name.py` could be meant as a module `py` inside a package `name`."""
    try:
        return importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        return False


def _from_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(f"{target}: {path}: {kind}; check the path (relative paths start at {Path.cwd()})")
    name = f"shoal_model_{next(_numbers)}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _guarded(target, str(path), lambda: loader.exec_module(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _from_module(target: str, name: str) -> ModuleType:
    folder = str(Path.cwd())
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.append(folder)
    try:
        module: ModuleType = _guarded(target, name, lambda: importlib.import_module(name))
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
    return module


def _guarded(target: str, place: str, run: Callable[[], Any]) -> Any:
    """Run an import; whatever it raises, also `sys.exit`, becomes a `ConfigError` with the line at fault."""
    try:
        return run()
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        if missing == place or place.startswith(f"{missing}."):
            raise ConfigError(f"{target}: there is no module {missing!r}; check the name, or give the path of its file") from None
        raise ConfigError(f"{target}: {place} imports {missing!r}, which is not installed; install it first") from error
    except SyntaxError as error:
        raise ConfigError(f"{target}: {error.filename or place}, line {error.lineno}: syntax error: {error.msg}") from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"{target}: importing {place} failed{line}: {type(error).__name__}: {error}") from error


def _attribute(target: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            own = module.__name__
            names = sorted(
                key for key, value in vars(module).items() if getattr(value, "__module__", "") == own and callable(value)
            )
            hint = f"; it defines {', '.join(names)}" if names else "; it defines no class or function"
            raise ConfigError(f"{target}: there is no {name!r} in the file or module{hint}") from None
    return found
