"""The binary part of Open Inference Protocol over HTTP: cutting a body into tensors, BYTES elements, and raw requests without JSON.

Tensors are views into the body wherever that is possible; nothing is copied but BYTES elements.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Final

import numpy as np

from shoal.datatypes import DATATYPES, ModelSpec
from shoal.errors import BadRequest, TooLarge
from shoal.protocols.limits import DEFAULT_LIMITS, Limits
from shoal.protocols.oip_head import CHECKED_DATATYPES, Array, Bytes, InferHead, InputHead, TensorData, count_elements, show_shape

__all__ = ["decode_raw", "parse_bytes_elements", "split_binary"]

_LENGTH_BYTES: Final = 4
_unpack_length = struct.Struct("<I").unpack_from


def parse_bytes_elements(data: Bytes, elements: int, where: str) -> Array:
    """Flat object array of `bytes` from a serialized BYTES tensor: before each element its length as uint32, little-endian.

    Raises `BadRequest` unless there are exactly `elements` of them and nothing is left over.
    """
    raw = bytes(data)  # slices of it are the elements, with no view made for each
    size = len(raw)
    found: list[bytes] = []
    position = 0
    try:
        for _ in range(elements):
            (length,) = _unpack_length(raw, position)
            start = position + _LENGTH_BYTES
            position = start + length
            found.append(raw[start:position])
    except struct.error:
        # A length that points beyond the end is found here or, for the last element, below.
        if position <= size:
            short = f"BYTES data ends before element {len(found)}; the shape needs {elements} elements"
            raise BadRequest(f"{where}: {short}") from None
    if position > size:
        left = size - (position - length)
        raise BadRequest(f"{where}: BYTES element {len(found) - 1} claims {length} bytes, but only {left} of its data are left")
    if position != size:
        raise BadRequest(f"{where}: {size - position} bytes are left over behind the {elements} BYTES elements of the shape")
    array = np.empty(elements, dtype=object)
    array[:] = found
    return array


def _wrong_total(head: InferHead, present: int) -> BadRequest:
    """Which tensor the bytes run out in, or after which one too many follow."""
    position = 0
    name = head.inputs[-1].name
    for tensor in head.inputs:
        if tensor.binary_size is not None:
            name = tensor.name
            if position + tensor.binary_size > present:
                return BadRequest(
                    f'input "{name[:100]}": {tensor.binary_size} bytes are announced, but only {max(present - position, 0)} follow '
                    f"(all inputs together: {head.total_binary_bytes} announced, {present} sent)"
                )
            position += tensor.binary_size
    return BadRequest(
        f'input "{name[:100]}": {present - position} bytes too many follow the last tensor '
        f"(all inputs together: {head.total_binary_bytes} announced, {present} sent)"
    )


def _check_booleans(data: Bytes, where: str) -> None:
    """Refuse bytes other than 0 and 1: no boolean array has them, and what a model would make of them is anybody's guess."""
    values = np.frombuffer(data, np.uint8)
    if int(values.max()) > 1:
        index = int((values > 1).argmax())
        raise BadRequest(f"{where}: BOOL element {index} is the byte {int(values[index])}, it must be 0 or 1")


def split_binary(head: InferHead, body: Bytes, start: int) -> tuple[TensorData, ...]:
    """The data of every input in request order; `body[start:]` holds the binary tensors back to back.

    An input with binary data comes as a slice of `body` (a view if `body` is a memoryview), or, for BYTES, as an object array of
    its shape; an inline one as the array in the head. Raises `BadRequest` when the announced and the sent bytes differ, for
    BYTES elements that do not fill their tensor exactly, and for BOOL bytes other than 0 and 1.
    """
    if len(body) - start != head.total_binary_bytes:
        raise _wrong_total(head, len(body) - start)
    if head.single_slice:
        return (body[start:],)
    parts: list[TensorData] = []
    for index, tensor in enumerate(head.inputs):
        if tensor.binary_size is None:
            parts.append(tensor.data)  # type: ignore[arg-type]  # inline data is always there when there is no binary size
            continue
        end = start + tensor.binary_size
        piece = body[start:end]
        start = end
        if tensor.datatype == "BOOL":
            _check_booleans(piece, f'inputs[{index}] "{tensor.name[:100]}"')
            parts.append(piece)
        elif tensor.datatype != "BYTES":
            parts.append(piece)
        elif head.raw:
            element = np.empty(tensor.shape, dtype=object)
            element.reshape(-1)[0] = bytes(piece)
            parts.append(element)
        else:
            where = f'inputs[{index}] "{tensor.name[:100]}"'
            parts.append(parse_bytes_elements(piece, tensor.elements, where).reshape(tensor.shape))
    return tuple(parts)


def decode_raw(spec: ModelSpec, body_bytes: int, limits: Limits = DEFAULT_LIMITS) -> InferHead:
    """The head of a raw request (header length 0): the whole body is the model's only input, with batch 1.

    One variable dimension behind the batch is derived from the size. A BYTES input must have one element, which is the body as
    it is, without a length in front. Raises `BadRequest` naming the input, the expected and the sent size.
    """
    if len(spec.inputs) != 1:
        raise BadRequest(f"a raw request needs a model with one input, this one has {len(spec.inputs)}")
    (model_input,) = spec.inputs
    where = f'input "{model_input.name}"'
    shape = (1, *model_input.row_shape) if spec.batchable else model_input.shape
    variable = [axis for axis, dimension in enumerate(shape) if dimension < 0]
    if len(variable) > 1:
        raise BadRequest(f"{where}: a raw request cannot tell the {len(variable)} variable dimensions of {show_shape(shape)}")
    itemsize = DATATYPES[model_input.datatype].itemsize
    if body_bytes > limits.max_request_bytes:
        raise TooLarge(f"{where}: {body_bytes} bytes exceed the limit of {limits.max_request_bytes} bytes")
    fixed = prod(dimension for dimension in shape if dimension >= 0)
    if variable:
        unit = fixed * itemsize
        size = 1 if not itemsize else body_bytes // unit if unit and body_bytes % unit == 0 else 0
        if size < 1:
            raise BadRequest(f"{where}: {body_bytes} bytes do not divide into the {unit} bytes of shape {show_shape(shape)}")
        axis = variable[0]
        shape = shape[:axis] + (size,) + shape[axis + 1 :]
    elements = count_elements(shape, limits, where)
    if itemsize and elements * itemsize != body_bytes:
        needed = elements * itemsize
        raise BadRequest(f"{where}: shape {show_shape(shape)} {model_input.datatype} needs {needed} bytes, got {body_bytes}")
    if not itemsize and elements != 1:
        raise BadRequest(f"{where}: a raw request can carry one BYTES element only, shape {show_shape(shape)} has {elements}")
    tensor = InputHead(model_input.name, model_input.datatype, shape, elements, body_bytes, body_bytes, None, {})
    return InferHead(
        None, {}, 0, None, (tensor,), None, True, body_bytes, body_bytes, True, model_input.datatype not in CHECKED_DATATYPES, True
    )
