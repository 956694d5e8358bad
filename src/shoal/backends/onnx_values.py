"""Values that do not pass between numpy and ONNX Runtime by themselves: strings and BF16.

- BYTES: ONNX strings are UTF-8 text; ONNX Runtime takes and gives arrays of `str`. (An array of `bytes` would be accepted and
  turned into the text of its repr, so it must never get there.)
- FP16 is numpy's float16 and passes unchanged.
- BF16 has no numpy type. It is kept as uint16, the upper half of a float32, and goes in as an OrtValue over the same memory;
  out of a binding it is copied byte by byte. Both are public parts of ONNX Runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from shoal.backends.base import Array
from shoal.datatypes import ModelSpec
from shoal.errors import BadRequest

__all__ = ["bytes_to_text", "run_bound", "text_to_bytes"]

_ONNX_BFLOAT16: Final = 16  # TensorProto.DataType.BFLOAT16 in the ONNX specification


def bytes_to_text(name: str, array: Array) -> Array:
    """An object array of bytes as one of `str`, same shape. Raises `BadRequest` for bytes that are not UTF-8."""
    text: Array = np.empty(array.size, dtype=object)
    try:
        text[:] = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1)]
    except UnicodeDecodeError:
        raise BadRequest(f"input '{name}': an element is not valid UTF-8, and this model takes text only") from None
    return text.reshape(array.shape)


def text_to_bytes(array: Array) -> Array:
    """An object array of `str` as one of bytes, same shape."""
    data: Array = np.empty(array.size, dtype=object)
    data[:] = [str(item).encode() for item in array.reshape(-1)]
    return data.reshape(array.shape)


def run_bound(session: ort.InferenceSession, spec: ModelSpec, inputs: Sequence[Array]) -> list[Array]:
    """Run through a binding, for models with BF16 inputs or outputs. Arrays as in `Backend.run`, strings already as `str`."""
    binding = session.io_binding()
    for tensor, array in zip(spec.inputs, inputs, strict=True):
        if tensor.datatype == "BF16":
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BFLOAT16)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(tensor.name, value)
    for tensor in spec.outputs:
        binding.bind_output(tensor.name, "cpu")
    session.run_with_iobinding(binding)
    outputs: list[Array] = []
    for tensor, value in zip(spec.outputs, binding.get_outputs(), strict=True):
        outputs.append(_bfloat16_bits(value) if tensor.datatype == "BF16" else value.numpy())
    # A binding may hand an input through as an output without copying it.
    return [array.copy() if any(np.may_share_memory(array, other) for other in inputs) else array for array in outputs]


def _bfloat16_bits(value: Any) -> Array:
    bits = np.empty(tuple(value.shape()), dtype=np.uint16)
    if bits.nbytes:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits
