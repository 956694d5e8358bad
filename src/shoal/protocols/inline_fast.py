"""The short way for inline data that is as it should be: values of the one wanted kind, flat or nested as the shape says.

Typed decoding settles the kind of every value in C, packing settles its range. Whatever is not exactly so ends in None, and
`oip_inline.py` looks again, to accept the rarer forms and to say what is wrong with the others. No error is raised here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from types import GenericAlias
from typing import Any, Final

import msgspec
import numpy as np

from shoal.datatypes import DataType
from shoal.protocols.json_guard import count_byte
from shoal.protocols.oip_head import Array

__all__ = ["parse_plain"]

_VALUES: Final[dict[str, Any]] = {"f": float, "i": int, "u": int, "b": bool, "O": str}
_CODES: Final = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_CHUNK_BYTES: Final = (
    256 << 10
)  # a float object takes 32 bytes, so long texts are decoded piece by piece, in memory that is used again
_COMMA: Final = re.compile(rb"[ \t\r\n]*+,")


@cache
def _decoder(kind: str, depth: int) -> Callable[[bytes], list[Any]]:
    wanted = _VALUES[kind]
    for _ in range(depth):
        wanted = GenericAlias(list, (wanted,))
    return msgspec.json.Decoder(wanted).decode


def _pieces(text: bytes, depth: int) -> Iterator[bytes]:
    """Lists that together are the list `text`, each cut behind an element, so that all of them are valid if and only if it is.

    Not for strings. A cut through the inside of an element, where brackets are spaced in an odd way, leaves two invalid pieces.
    """
    end = text.rfind(b"]")
    position = 1
    closing = b"]" * (depth - 1)
    while end - position > _CHUNK_BYTES:
        if closing:
            cut = text.find(closing, position + _CHUNK_BYTES, end) + depth - 1
            comma = _COMMA.match(text, cut, end) if cut >= depth - 1 else None
            if comma is None:
                break
            behind = comma.end()
        else:
            cut = text.find(b",", position + _CHUNK_BYTES, end)
            if cut < 0:
                break
            behind = cut + 1
        yield b"[" + text[position:cut] + b"]"
        position = behind
    yield b"[" + text[position:]


def _flatten(items: list[Any], row_shape: tuple[int, ...]) -> list[Any] | None:
    for dimension in row_shape:
        if set(map(len, items)) != {dimension}:
            return None
        items = list(chain.from_iterable(items))
    return items


def parse_plain(text: bytes, datatype: DataType, shape: tuple[int, ...], elements: int) -> Array | None:
    """Array of `shape` from the JSON `text` of `data`, or None when that takes a closer look. The array may be read-only."""
    if text[:1] != b"[":
        return None
    depth = 1 if text[1:2] != b"[" else len(text) - len(text.lstrip(b"["))
    if depth > 1 and depth != len(shape):
        return None
    row_shape = shape[1:] if depth > 1 else ()
    kind = datatype.numpy.kind
    if len(text) > _CHUNK_BYTES:
        values = count_byte(text, b",") + 1
        if values != elements and (datatype.itemsize or values < elements):
            return None  # before the text makes us take memory that the shape does not account for
    decode = _decoder(kind, depth)
    try:
        if kind == "O" or len(text) <= _CHUNK_BYTES:
            items = _flatten(decode(text), row_shape)
            if items is None or len(items) != elements:
                return None
            if kind == "O":
                strings = np.empty(elements, dtype=object)
                strings[:] = [item.encode() for item in items]
                return strings.reshape(shape)
            packed: bytes | bytearray = struct.pack(f"<{elements}{_CODES[datatype.name]}", *items)
        else:
            packed = bytearray()
            for piece in _pieces(text, depth):
                items = _flatten(decode(piece), row_shape)
                if not items:
                    return None
                packed += struct.pack(f"<{len(items)}{_CODES[datatype.name]}", *items)
            if len(packed) != elements * datatype.itemsize:
                return None
    except (ValueError, RecursionError, OverflowError, struct.error):
        return None
    return np.frombuffer(packed, datatype.numpy).reshape(shape)
