"""What is checked of a JSON text before or beside its typed decoding: nesting depth, UTF-8, duplicate keys, readable errors.

Knows nothing of inference; returns values or raises `BadRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from shoal.errors import BadRequest

__all__ = ["check_depth", "check_duplicate_keys", "check_keys", "check_utf8", "count_byte", "readable"]

_STEP: Final = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_CHUNK_BYTES: Final = 1 << 20
_LONG_BYTES: Final = 2048  # from here numpy's vectorised comparison counts faster than the interpreter's loop


def count_byte(text: bytes, byte: bytes) -> int:
    """How often the one `byte` stands in `text`."""
    if len(text) < _LONG_BYTES:
        return text.count(byte)
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(byte)))


def _count_openings(text: bytes) -> int:
    if len(text) < _LONG_BYTES:
        return text.count(b"[") + text.count(b"{")
    folded = np.frombuffer(text, np.uint8) | np.uint8(0x20)  # makes a "{" of a "[", and of nothing else
    return int(np.count_nonzero(folded == ord("{")))


def _outside_strings(text: bytes, wanted: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The `wanted` bytes (no quotes) of the text that stand in no string, in order, piece by piece. Linear in time and memory.

    Exact up to the first byte that no JSON text could have there, which is how far a decoder comes. Zeros stand among them.
    """
    if b"\\" in text:
        # Pairs first, from the left, as a decoder reads them; a quote that still has a backslash in front ends no string.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    inside = 0
    for start in range(0, len(text), _CHUNK_BYTES):
        piece = np.frombuffer(text, np.uint8, min(_CHUNK_BYTES, len(text) - start), start)
        mask = piece == ord('"')
        for byte in wanted:
            mask |= piece == byte
        found = piece[mask]
        marks = found == ord('"')
        if inside or marks.any():
            quotes = np.cumsum(marks, dtype=np.uint8)  # wraps around, which leaves odd odd
            quotes += np.uint8(inside)
            quotes &= np.uint8(1)
            if quotes.size:
                inside = int(quotes[-1])
            found *= quotes ^ np.uint8(1)
            found[marks] = 0
        yield found


def check_depth(text: bytes, max_depth: int) -> None:
    """Refuse a text whose brackets nest deeper than `max_depth`, in linear time and without recursion.

    A text with at most `max_depth` opening brackets needs no closer look; that is every request without inline data.
    """
    if _count_openings(text) <= max_depth:
        return
    depth = 0
    for brackets in _outside_strings(text, b"[]{}"):
        if not brackets.size:
            continue
        depths = np.cumsum(_STEP[brackets], dtype=np.int64)
        if int(depths.max()) + depth > max_depth:
            raise BadRequest(f"the request JSON nests deeper than the limit of {max_depth} levels")
        depth += int(depths[-1])


def check_keys(text: bytes, max_keys: int) -> int:
    """Refuse a text with more than `max_keys` keys, in linear time. Returns the number of colons, those in strings too."""
    colons = count_byte(text, b":")
    if colons > max_keys and sum([int(np.count_nonzero(keys)) for keys in _outside_strings(text, b":")]) > max_keys:
        raise BadRequest(f"the request JSON has more keys than the limit of {max_keys}")
    return colons


def check_utf8(text: bytes) -> None:
    """Refuse a text that is not UTF-8, also in the parts that the decoder would skip."""
    if not text.isascii():
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the request JSON is not UTF-8 at byte {error.start}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRequest(f"the request JSON has the key {key[:100]!r} twice in one object")
        seen.add(key)


def check_duplicate_keys(text: bytes) -> None:
    """Refuse a (well-formed, shallow) text in which one object has a key twice: which one counts would be a guess."""
    try:
        json.loads(text, object_pairs_hook=_refuse_duplicates, parse_int=len, parse_float=len)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request JSON is malformed: {error}") from None


def readable(error: Exception) -> str:
    """A decoder's complaint in our words: the path of the field first, no back-quotes, no `$.`."""
    message, _, path = str(error).partition(" - at `")
    message = message.replace("`", "")
    path = path.rstrip("`").removeprefix("$").removeprefix(".").removeprefix("key` in `$.")
    return f"{path}: {message[:1].lower()}{message[1:]}" if path else f"the request JSON: {message}"
