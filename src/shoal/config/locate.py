"""Finding the line of a setting in the text of a TOML file, for error messages. Best effort: `None` where it is not certain.

TOML parsers hand back values without positions. Rather than a second parser, each line is given to the standard library's parser
alone: a header line tells the section, the part before `=` tells the key. Lines inside multi-line strings or arrays may mislead
this, so a path that seems to occur twice has no line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence

__all__ = ["dotted", "line_of"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ASSIGNMENT = re.compile(r"""\s*((?:[A-Za-z0-9_.\s-]|"[^"\\]*"|'[^']*')+?)\s*=""")


def dotted(path: Sequence[str]) -> str:
    """The path as TOML writes it: bare keys joined by dots, anything else in quotes."""
    return ".".join(
        part if _BARE_KEY.fullmatch(part) else '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"' for part in path
    )


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line (from 1) that sets `path`, or that opens the table of that name; `None` when there is none or more than one."""
    wanted = tuple(path)
    lines = [number for number, found in _entries(text) if found == wanted]
    if not lines:
        # A table may never be opened by a header of its own: `[models.a.queue]` alone also makes `models` and `models.a`.
        lines = [number for number, found in _entries(text) if found[: len(wanted)] == wanted][:1]
    return lines[0] if len(lines) == 1 else None


def _entries(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("["):
            header = _only_path(line)
            if header:
                section = header
                yield number, section
        elif match := _ASSIGNMENT.match(line):
            key = _only_path(match[1] + " = 0")
            if key:
                yield number, section + key


def _only_path(toml: str) -> tuple[str, ...]:
    """The keys down to the single leaf of a one-line document; empty when it is not one."""
    try:
        node: object = tomllib.loads(toml)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        key, node = next(iter(node.items()))
        path.append(key)
    return tuple(path)
