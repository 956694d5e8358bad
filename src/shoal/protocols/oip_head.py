"""The decoded head of an Open Inference Protocol request, and how shapes and sizes are checked. Shared by JSON and raw requests.

No parsing here: `oip_request.py` builds these from JSON, `oip_binary.py` from raw requests and cuts the tensors out of the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from shoal.errors import BadRequest
from shoal.protocols.limits import Limits

__all__ = [
    "CHECKED_DATATYPES",
    "Array",
    "Bytes",
    "InferHead",
    "InputHead",
    "OutputHead",
    "Parameter",
    "TensorData",
    "count_elements",
    "show_shape",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bytes: TypeAlias = bytes | bytearray | memoryview
TensorData: TypeAlias = Bytes | Array
Parameter: TypeAlias = str | int | float | bool


CHECKED_DATATYPES: Final = ("BYTES", "BOOL")
"""Datatypes whose binary data may be wrong even if its size is right."""


class InputHead(msgspec.Struct, frozen=True, eq=False):
    """One input tensor as announced.

    `shape` has the batch dimension in front and every dimension at least 1. `byte_size` is elements times itemsize; for BYTES,
    whose elements vary, the serialized size (4 bytes of length before each element). `binary_size` is how many bytes of the body
    behind the JSON are this tensor's, or None if its data stood in the JSON: then `data` holds it, as an array of exactly
    `shape` and the datatype's dtype. `parameters` are the tensor's custom parameters.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: int
    byte_size: int
    binary_size: int | None
    data: Array | None
    parameters: dict[str, Parameter]


class OutputHead(msgspec.Struct, frozen=True, eq=False):
    """One requested output: whether it is wanted as binary data, and the k of top-k classification (0: the tensor itself)."""

    name: str
    binary: bool
    classification: int
    parameters: dict[str, Parameter]


class InferHead(msgspec.Struct, frozen=True, eq=False):
    """The head of one inference request, independent of any model. Never changed after decoding, so it may be shared and cached.

    `priority` is 0 for "the default", else 1 (highest) and up. `timeout_us` is None without a timeout. `parameters` holds custom
    request parameters only, typed as sent. `outputs` is None when the client named none: then all outputs are wanted, as binary
    data if `binary_default`. `cacheable` says that the same JSON bytes always mean this head (no inline data in it).
    `single_slice`: all that follows the JSON is the one input, with nothing left to check but its size.
    `raw` marks a request without JSON, whose whole body is the one input.
    """

    id: str | None
    parameters: dict[str, Parameter]
    priority: int
    timeout_us: int | None
    inputs: tuple[InputHead, ...]
    outputs: tuple[OutputHead, ...] | None
    binary_default: bool
    total_binary_bytes: int
    total_bytes: int
    cacheable: bool
    single_slice: bool
    raw: bool = False


def show_shape(shape: Sequence[int]) -> str:
    """A shape as people write it: `[1,8,8]`, cut short if it is absurdly long."""
    text = ",".join(map(str, shape[:17])) if len(shape) <= 17 else ",".join(map(str, shape[:17])) + ",…"
    return f"[{text}]"[:400]


def count_elements(shape: Sequence[int], limits: Limits, where: str) -> int:
    """Product of the dimensions, checked: at least 1 each, at most `max_rank` of them, at most `max_elements` together.

    A zero dimension is refused too, whichever it is: an empty tensor has no row that could be answered. Raises `BadRequest`.
    """
    if len(shape) > limits.max_rank:
        raise BadRequest(f"{where}: the shape has {len(shape)} dimensions, at most {limits.max_rank} are allowed")
    elements = 1
    for dimension in shape:
        if dimension < 1:
            kind = "an empty tensor" if dimension == 0 else "a negative dimension"
            raise BadRequest(f"{where}: shape {show_shape(shape)} means {kind}; every dimension must be at least 1")
        elements *= dimension
        if elements > limits.max_elements:
            raise BadRequest(f"{where}: shape {show_shape(shape)} has more than {limits.max_elements} elements")
    return elements
