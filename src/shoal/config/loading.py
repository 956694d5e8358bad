"""From a TOML file to typed settings. Names and types are checked here; what several settings must agree on is in `checks.py`.

Everything that is wrong with names and types is collected, so that one run of `shoal check` shows all of it. This room reads the
settings file and nothing else: no environment variables, no model files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.config.locate import dotted, line_of
from shoal.config.schema import Fault, check_struct, describe, nearest
from shoal.config.settings import ModelSettings, ServerSettings, Settings
from shoal.errors import ConfigError

__all__ = ["EMBEDDED_MODELS", "load_settings", "parse_settings", "python_target", "resolve_model_path"]

EMBEDDED_MODELS = frozenset({"digits"})
"""Names that stand for a model inside the package wherever a model's path is expected; write `./digits` for a file of that name."""

MAX_SETTINGS_BYTES = 8 << 20
"""A settings file larger than this is a mistake (a model given by accident), and is not read into memory."""

_Section = TypeVar("_Section", bound=msgspec.Struct)
_IDENTIFIER = r"[^\W\d]\w*"
_MODULE_TARGET = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")
_FILE_TARGET = re.compile(rf"(?P<file>.+\.py):(?P<object>{_IDENTIFIER}(\.{_IDENTIFIER})*)")


def load_settings(path: str | Path) -> Settings:
    """Read a `shoal.toml`. Model paths in it are relative to the folder that the file is in.

    Raises `ConfigError` when the file cannot be read, is empty, is not UTF-8 or not TOML, has a key that does not exist (the
    nearest one is named) or a value of the wrong type. The message has one line per problem, each beginning with the file and,
    where it is known, the line. Rules between settings are not checked here: see `check_settings`.
    """
    path = Path(path)
    return parse_settings(_read(path), source=str(path), folder=path.parent)


def parse_settings(text: str, *, source: str = "settings", folder: Path | None = None) -> Settings:
    """As `load_settings`, from text; `source` names it in messages, and relative model paths are relative to `folder`."""
    if not text.strip():
        raise ConfigError(f'{source}: the file is empty; it needs at least one table [models.NAME] with path = "..."')
    try:
        raw = tomllib.loads(text)
    except ValueError as error:
        # TOMLDecodeError, or plain ValueError for a number with thousands of digits or a date that is none.
        raise ConfigError(_toml_message(source, str(error))) from None
    except RecursionError:
        raise ConfigError(f"{source}: the values are nested too deeply") from None
    faults: list[Fault] = []
    server = ServerSettings()
    models: dict[str, ModelSettings] = {}
    for key, value in raw.items():
        if key not in ("server", "models"):
            faults.append(((key,), f"there is no `{dotted((key,))}` at the top of the file{nearest(key, ('models', 'server'))}"))
        elif not isinstance(value, dict):
            faults.append(((key,), f"`{key}` must be a table, but is {describe(value)}"))
        elif key == "server":
            server = _section(ServerSettings, value, ("server",), faults) or server
        else:
            for name, section in value.items():
                model = _model(name, section, faults, folder)
                if model is not None:
                    models[name] = model
    if faults:
        raise ConfigError("\n".join(_with_line(source, text, path, message) for path, message in faults))
    return Settings(server=_resolve_tls(server, folder), models=models)


def python_target(path: str) -> tuple[str, str] | None:
    """`("file.py" or "module", "object")` when the path names a Python model, else `None`."""
    if match := _FILE_TARGET.fullmatch(path):
        return match["file"], match["object"]
    if _MODULE_TARGET.fullmatch(path):
        module, _, target = path.partition(":")
        return module, target
    return None


def resolve_model_path(path: str, folder: Path | None) -> str:
    """Make a model's file path relative to `folder` absolute; embedded models and `module:object` stay as they are."""
    if folder is None or not path or path in EMBEDDED_MODELS:
        return path
    target = python_target(path)
    if target is None:
        return str(_join(folder, path))
    if target[0].endswith(".py") and _FILE_TARGET.fullmatch(path):
        return f"{_join(folder, target[0])}:{target[1]}"
    return path


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; a settings file is expected")
        size = path.stat().st_size
        if size > MAX_SETTINGS_BYTES:
            raise ConfigError(
                f"{path}: {size} bytes is too large for a settings file; is it a model? Then give it without --config"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; settings files are UTF-8 text"
        ) from None


def _toml_message(source: str, message: str) -> str:
    found = re.search(r"\s*\(at line (\d+), column (\d+)\)", message)
    if found is None:
        return f"{source}: not valid TOML: {message}"
    reason = message[: found.start()] + message[found.end() :]
    return f"{source}, line {found[1]}, column {found[2]}: not valid TOML: {reason}"


def _with_line(source: str, text: str, path: tuple[str, ...], message: str) -> str:
    line = line_of(text, path)
    return f"{source}: {message}" if line is None else f"{source}, line {line}: {message}"


def _model(name: str, raw: object, faults: list[Fault], folder: Path | None) -> ModelSettings | None:
    path = ("models", name)
    if not isinstance(raw, dict):
        hint = "; settings of a model stand in a table [models.NAME]" if name in ModelSettings.__struct_fields__ else ""
        faults.append((path, f"`{dotted(path)}` must be a table, but is {describe(raw)}{hint}"))
        return None
    model = _section(ModelSettings, raw, path, faults)
    return None if model is None else msgspec.structs.replace(model, path=resolve_model_path(model.path, folder))


def _section(kind: type[_Section], raw: Mapping[str, Any], path: tuple[str, ...], faults: list[Fault]) -> _Section | None:
    found = check_struct(kind, raw, path)
    faults += found
    if found:
        return None
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        # Nothing is known that `check_struct` lets through; if there is such a thing, it must still not end in a traceback.
        faults.append((path, f"[{dotted(path)}] {error}"))
        return None


def _resolve_tls(server: ServerSettings, folder: Path | None) -> ServerSettings:
    if folder is None:
        return server
    return msgspec.structs.replace(
        server,
        tls_certificate=server.tls_certificate and str(_join(folder, server.tls_certificate)),
        tls_key=server.tls_key and str(_join(folder, server.tls_key)),
    )


def _join(folder: Path, path: str) -> Path:
    """`path` made absolute, seen from `folder`."""
    return (folder / path).resolve()
