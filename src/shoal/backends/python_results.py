"""From whatever a Python model returned to arrays in the order of its outputs. What does not fit is the model's failure, named.

Accepted
- for one output: an array or nested lists; for several: a tuple or list with one entry per output; for either: a dict by name.
- another dtype of the same kind: wider or narrower floats (too large becomes infinite, as everywhere in numpy); integers of
  another size or sign if every value fits; bool and integers for a float output; bool for an integer one. Never floats for
  integers: rounding is for the model to decide. BYTES take `bytes` and `str` (as UTF-8). BF16 takes uint16 bit patterns, or
  floats, which are rounded to the nearest.

How many rows came back is left alone: that is checked where they are cut apart. The other dimensions must be those declared.

Ownership: results are handed to code that reads them after the model has begun the next batch. An array that anyone else still
holds, because it is an input, a view of one, a cached answer or a buffer that the model will write again, is copied.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shoal.backends.base import Array
from shoal.datatypes import DATATYPES, TensorSpec
from shoal.errors import ModelFailed

__all__ = ["arrange", "float_to_bfloat16"]

# References to an array that only a one-element list knows of, counted as `_is_private` counts them: the list, and the argument.
_PRIVATE_REFERENCES: Final = 2


def arrange(result: Any, outputs: Sequence[TensorSpec], inputs: Sequence[Array]) -> list[Array]:
    """One contiguous array per output, in order, of its dtype, sharing memory with nobody. Raises `ModelFailed`."""
    values = _by_output(result, outputs)
    del result  # what is asked below is whether anybody but `values` holds an array
    arrays: list[Array] = []
    for index, tensor in enumerate(outputs):
        held = not _is_private(values, index)
        value = values[index]
        array = _as_array(value, tensor)
        _check_shape(array, tensor)
        if array.flags.owndata:
            # What numpy made of another array, or of plain lists and numbers, is new; other objects may hand out what they hold.
            copy = held and (array is value or type(value) not in (np.ndarray, list, tuple, int, float, bool))
        else:
            copy = held or any(np.may_share_memory(array, other) for other in inputs)
        arrays.append(array.copy() if copy else array)
    return arrays


def _by_output(result: Any, outputs: Sequence[TensorSpec]) -> list[Any]:
    if isinstance(result, np.ndarray) and len(outputs) == 1:
        return [result]
    if isinstance(result, Mapping):
        names = [tensor.name for tensor in outputs]
        if result.keys() != set(names):
            missing, extra = [name for name in names if name not in result], [str(key) for key in result if key not in names]
            parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with unknown {', '.join(extra)}"] * bool(extra)
            raise ModelFailed(f"the model returned a dict {' and '.join(parts)}; its outputs are {', '.join(names)}")
        return [result[name] for name in names]
    if isinstance(result, tuple) or (isinstance(result, list) and len(outputs) > 1):
        if len(result) != len(outputs):
            raise ModelFailed(f"the model returned {len(result)} values for {len(outputs)} outputs")
        return list(result)
    if result is None:
        raise ModelFailed("the model returned None; is a `return` missing?")
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
        raise ModelFailed(f"the model returned a {type(result).__name__}; return arrays")
    if len(outputs) > 1:
        raise ModelFailed(f"the model returned one {type(result).__name__} for {len(outputs)} outputs; return a tuple or a dict")
    return [result]


def _is_private(values: list[Any], index: int) -> bool:
    """Whether it is an array that nobody but `values` holds, neither itself nor the array that it is a view of."""
    if not isinstance(values[index], np.ndarray) or sys.getrefcount(values[index]) > _PRIVATE_REFERENCES:
        return False
    base = [values[index].base]  # held by the view, by this list, and by the argument
    if not isinstance(base[0], np.ndarray):
        return base[0] is None
    return base[0].base is None and sys.getrefcount(base[0]) <= _PRIVATE_REFERENCES + 1


def _as_array(value: Any, tensor: TensorSpec) -> Array:
    # `asarray` and not `ascontiguousarray`, which would pass a scalar off as one row.
    wanted = DATATYPES[tensor.datatype].numpy
    if tensor.datatype == "BYTES":
        return _as_bytes(value, tensor)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ModelFailed(f"output '{tensor.name}': the model returned an array with masked values; fill them with filled()")
    if type(value) is np.ndarray and value.dtype == wanted:
        return value if value.flags.c_contiguous else np.asarray(value, order="C")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ModelFailed(f"output '{tensor.name}': the model returned something that is no array: {error}") from None
    if array.dtype == wanted:
        return np.asarray(array, order="C")
    kind = array.dtype.kind
    if tensor.datatype == "BF16":
        if array.dtype.name == "bfloat16":
            return np.asarray(array, order="C").view(np.uint16)
        if kind in "fiub":
            return float_to_bfloat16(array)
    elif (wanted.kind == "f" and kind in "fiub") or (wanted.kind in "iu" and kind == "b"):
        with np.errstate(over="ignore"):
            return np.asarray(array, dtype=wanted, order="C")
    elif wanted.kind in "iu" and kind in "iu":
        limits = np.iinfo(wanted)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise ModelFailed(f"output '{tensor.name}': a value of {array.dtype} does not fit into {tensor.datatype}")
        return np.asarray(array, dtype=wanted, order="C")
    elif array.size == 0 and not isinstance(value, np.ndarray):
        return np.asarray(array, dtype=wanted, order="C")  # an empty list has no dtype of its own
    raise ModelFailed(
        f"output '{tensor.name}': the model returned {array.dtype}, declared is {tensor.datatype}; convert it with astype"
    )


def float_to_bfloat16(array: Array) -> Array:
    """Bit patterns (uint16) of the nearest BF16 values, ties to even; NaN stays NaN. Same shape."""
    with np.errstate(over="ignore"):
        single = np.asarray(array, dtype=np.float32, order="C")
    bits = single.view(np.uint32)
    # Add half of the last kept place, one less where the kept part is even, and cut; a NaN must not be rounded up to infinity.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(single), bits | np.uint32(0x400000), rounded)
    return (kept >> np.uint32(16)).astype(np.uint16)


def _as_bytes(value: Any, tensor: TensorSpec) -> Array:
    array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
    items = array.reshape(-1).tolist()
    data: Array = np.empty(array.size, dtype=object)
    for position, item in enumerate(items):
        if isinstance(item, str):
            data[position] = item.encode()
        elif isinstance(item, bytes):
            data[position] = item
        else:
            raise ModelFailed(f"output '{tensor.name}': BYTES must hold bytes or str, but the model returned {type(item).__name__}")
    return data.reshape(array.shape)


def _check_shape(array: Array, tensor: TensorSpec) -> None:
    declared = tensor.shape
    if array.ndim and array.shape[1:] == declared[1:]:
        return
    fits = array.ndim == len(declared) and all(want in (-1, have) for want, have in zip(declared, array.shape, strict=True))
    if not fits:
        shown = ", ".join("rows" if index == 0 else str(dim) for index, dim in enumerate(declared))
        raise ModelFailed(f"output '{tensor.name}': the model returned the shape {list(array.shape)}, declared is [{shown}]")
