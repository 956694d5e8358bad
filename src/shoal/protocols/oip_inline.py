"""Tensor data that stands in the JSON, flat or nested: from its text to an array of the exact dtype; nothing is wrapped or cut.

Stated policy, per kind of datatype
- BOOL takes `true` and `false` only; numbers are refused, because a 2 would have no meaning.
- Integers take integers in the range of the type; `1.0` and `1e3` are floats and refused.
- FP16, FP32, FP64 take numbers that stay finite in that type, and the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.
- BYTES takes strings; each element becomes its UTF-8 bytes.
- BF16 has no JSON form and is refused: it must be sent as binary data.
- `null` is refused everywhere. Lists may be flat or nested in row-major order; nested ones must fit the shape (dimensions of 1 may
  be left out, and the innermost lists may hold several dimensions flat).
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from shoal.datatypes import DataType
from shoal.errors import BadRequest
from shoal.protocols.inline_fast import parse_plain
from shoal.protocols.oip_head import Array, show_shape

__all__ = ["parse_inline"]

_decode_any = msgspec.json.Decoder().decode
_NON_FINITE: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_JSON_NAMES: Final = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
    list: "a list",
    dict: "an object",
}


def _flatten(value: Any, shape: tuple[int, ...], elements: int, datatype: DataType, where: str) -> list[Any]:
    if type(value) is not list:
        if shape:
            raise BadRequest(f"{where}: data must be a list, got {_JSON_NAMES[type(value)]}")
        return [value]
    items: list[Any] = value
    length = len(items)
    outer: list[int] = []
    while items and type(items[0]) is list:
        outer.append(length)
        if set(map(type, items)) != {list}:
            raise BadRequest(f"{where}: data mixes lists and values at nesting level {len(outer)}")
        lengths = set(map(len, items))
        if len(lengths) != 1:
            raise BadRequest(f"{where}: data is ragged: lists at nesting level {len(outer) + 1} differ in length")
        length = lengths.pop()
        items = list(chain.from_iterable(items))
    if len(items) != elements:
        raise BadRequest(f"{where}: shape {show_shape(shape)} {datatype.name} needs {elements} values, got {len(items)}")
    squeezed = [dimension for dimension in outer if dimension != 1]
    if squeezed != [dimension for dimension in shape if dimension != 1][: len(squeezed)]:
        nested = show_shape([*outer, length])
        raise BadRequest(f"{where}: data is nested as {nested}, which does not fit shape {show_shape(shape)}")
    return items


def _refuse_types(items: list[Any], allowed: tuple[type, ...], wanted: str, datatype: DataType, where: str) -> None:
    for index, item in enumerate(items):
        if type(item) not in allowed:
            raise BadRequest(f"{where}: data[{index}] is {_JSON_NAMES[type(item)]}, {datatype.name} takes {wanted}")


def _integers(items: list[Any], datatype: DataType, where: str) -> Array:
    if set(map(type, items)) != {int}:
        _refuse_types(items, (int,), "integers", datatype, where)
    try:
        return np.array(items, dtype=datatype.numpy)
    except OverflowError:
        bounds = np.iinfo(datatype.numpy)
        low, high = int(bounds.min), int(bounds.max)
        index = next(index for index, item in enumerate(items) if not low <= item <= high)
        raise BadRequest(f"{where}: data[{index}] is outside of {datatype.name}'s range {low}…{high}") from None


def _floats(items: list[Any], datatype: DataType, where: str) -> Array:
    types = set(map(type, items))
    if not types <= {int, float}:
        _refuse_types(items, (int, float, str), 'numbers, "NaN", "Infinity" and "-Infinity"', datatype, where)
        for index, item in enumerate(items):
            if type(item) is str:
                if item not in _NON_FINITE:
                    raise BadRequest(f'{where}: data[{index}] is a string other than "NaN", "Infinity" and "-Infinity"')
                items[index] = _NON_FINITE[item]
    try:
        wide = np.array(items, dtype=np.float64)
    except OverflowError:
        raise BadRequest(f"{where}: data holds an integer too large for {datatype.name}") from None
    if datatype.itemsize == 8:
        return wide.astype(datatype.numpy, copy=False)
    with np.errstate(over="ignore"):
        narrow = wide.astype(datatype.numpy)
    if not np.isfinite(narrow).all():
        overflown = np.isinf(narrow) & np.isfinite(wide)
        if overflown.any():
            raise BadRequest(f"{where}: data[{int(overflown.argmax())}] is outside of {datatype.name}'s range")
    return narrow


def _byte_strings(items: list[Any], datatype: DataType, where: str) -> Array:
    if set(map(type, items)) != {str}:
        _refuse_types(items, (str,), "strings", datatype, where)
    array = np.empty(len(items), dtype=object)
    array[:] = [item.encode() for item in items]
    return array


def parse_inline(text: bytes, datatype: DataType, shape: tuple[int, ...], elements: int, where: str) -> Array:
    """Array of `shape` from the JSON `text` of a tensor's `data`. Raises `BadRequest`, naming `where`.

    The commas are counted before much is decoded, so memory follows the announced shape, never the text alone.
    """
    if datatype.name == "BF16":
        raise BadRequest(f"{where}: BF16 has no JSON form; send it as binary data (binary_data_size)")
    plain = parse_plain(text, datatype, shape, elements)
    if plain is not None:
        return plain
    values = text.count(b",") + 1
    if values < elements or (values > elements and datatype.itemsize):
        got = 0 if values == 1 and text.strip(b"[] \t\r\n") == b"" else values
        raise BadRequest(f"{where}: shape {show_shape(shape)} {datatype.name} needs {elements} values, got {got}")
    try:
        value = _decode_any(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: data is malformed: {error}") from None
    items = _flatten(value, shape, elements, datatype, where)
    kind = datatype.numpy.kind
    if kind == "f":
        array = _floats(items, datatype, where)
    elif kind in "iu":
        array = _integers(items, datatype, where)
    elif kind == "b":
        if set(map(type, items)) != {bool}:
            _refuse_types(items, (bool,), "true and false", datatype, where)
        array = np.array(items, dtype=bool)
    else:
        array = _byte_strings(items, datatype, where)
    return array.reshape(shape)
