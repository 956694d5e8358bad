"""Checking a decoded TOML document against the settings structs: every wrong name and every wrong type, each in plain words.

msgspec stops at the first fault and calls the tables of models `[...]`; people who edit a file want all faults, by the names they
wrote. The struct definitions in `settings.py` are the only schema; nothing is repeated here.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from shoal.config.locate import dotted

__all__ = ["Fault", "check_struct", "describe", "nearest"]

Fault = tuple[tuple[str, ...], str]
"""Where (the keys down from the top of the file), and what is wrong there."""


def check_struct(kind: type[msgspec.Struct], value: Mapping[str, Any], path: tuple[str, ...]) -> list[Fault]:
    """Every unknown key, missing key and wrong type in the table `value`, which stands at `path` and is to become a `kind`."""
    faults: list[Fault] = []
    hints = typing.get_type_hints(kind)
    for key, item in value.items():
        if key in hints:
            faults += _check(hints[key], item, (*path, key))
        else:
            faults.append(((*path, key), f"[{dotted(path)}] has no setting `{key}`{nearest(key, hints)}"))
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            faults.append((path, f"[{dotted(path)}] needs `{field.name} = ...`, which is missing"))
    return faults


def nearest(word: str, known: Iterable[str]) -> str:
    """A remark to append to a message: the known word that looks most like `word`, or else all of them."""
    names = list(known)
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{close[0]}`?"
    return "; it may have " + ", ".join(f"`{name}`" for name in sorted(names))


def describe(value: object) -> str:
    """A value of a TOML document in TOML's words, short enough for a message."""
    if isinstance(value, bool):
        return f"the boolean {'true' if value else 'false'}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return f'the string "{value}"' if len(value) <= 40 else f'the string "{value[:37]}..."'
    if isinstance(value, int):
        return f"the integer {value}" if abs(value) < 10**20 else f"an integer of {len(str(abs(value)))} digits"
    if isinstance(value, float):
        return f"the number {value}"
    return f"a {type(value).__name__}"


def _check(hint: Any, value: object, path: tuple[str, ...]) -> list[Fault]:
    """Faults of one value against one type hint of the settings structs."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if isinstance(value, dict):
            return check_struct(hint, value, path)
        return [(path, f"`{dotted(path)}` must be a table, but is {describe(value)}")]
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list):
        item_hint = typing.get_args(hint)[0]
        return [
            (path, f"`{dotted(path)}[{index}]` must be {_expected(item_hint)}, but is {describe(item)}")
            for index, item in enumerate(value)
            if not _fits(item_hint, item) or (isinstance(item, int) and abs(item) >= 1 << 63)
        ]
    if origin is dict:
        return _check_table(hint, value, path)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return [(path, f"`{dotted(path)}` is {describe(value)}, which no setting can hold")]
    if _fits(hint, value):
        return []
    if origin is Literal and isinstance(value, str):
        words = [str(word) for word in typing.get_args(hint)]
        return [(path, f'`{dotted(path)}` must be {_expected(hint)}, but is "{value}"{_nearest_word(value, words)}')]
    return [(path, f"`{dotted(path)}` must be {_expected(hint)}, but is {describe(value)}")]


def _check_table(hint: Any, value: object, path: tuple[str, ...]) -> list[Fault]:
    """Faults of a table whose keys the user chooses: names, or the numbers of levels."""
    if not isinstance(value, dict):
        return [(path, f"`{dotted(path)}` must be a table, but is {describe(value)}")]
    key_hint, item_hint = typing.get_args(hint)
    faults: list[Fault] = []
    for key, item in value.items():
        if key_hint is int and not re.fullmatch(r"[0-9]{1,9}", key):
            faults.append(((*path, key), f"`{dotted(path)}` has a key `{key}`, but its keys are whole numbers"))
        else:
            faults += _check(item_hint, item, (*path, key))
    return faults


def _fits(hint: Any, value: object) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return any(_fits(part, value) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _expected(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(f'"{word}"' for word in typing.get_args(hint))
    if origin is types.UnionType or origin is typing.Union:
        # TOML has no null: a setting that may be None is left out instead.
        return " or ".join(_expected(part) for part in typing.get_args(hint) if part is not types.NoneType)
    if origin is tuple:
        return f"an array, each item {_expected(typing.get_args(hint)[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, str(hint))


def _nearest_word(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
