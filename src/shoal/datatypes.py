"""The vocabulary of tensors that every room shares: datatypes of the Open Inference Protocol, tensor and model descriptions.

Descriptions, and the byte layout of BYTES, which several rooms need. No validation of requests (that is `tensors/`), no JSON
(that is `protocols/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["DATATYPES", "DataType", "ModelSpec", "TensorSpec", "serialize_bytes"]


@dataclass(frozen=True, slots=True)
class DataType:
    """One datatype of the protocol.

    `numpy` is the little-endian dtype of an element on the wire (`object` for BYTES; BF16 travels and is stored as uint16, the high
    half of a float32); `itemsize` is its size in bytes, 0 for BYTES, whose elements vary.
    """

    name: str
    numpy: np.dtype[Any]
    itemsize: int


def _datatype(name: str, numpy_name: str) -> DataType:
    dtype = np.dtype(numpy_name)
    return DataType(name, dtype, 0 if dtype.hasobject else dtype.itemsize)


DATATYPES: Final[dict[str, DataType]] = {
    name: _datatype(name, numpy_name)
    for name, numpy_name in {
        "BOOL": "bool",
        "UINT8": "<u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "<i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "BF16": "<u2",
        "FP32": "<f4",
        "FP64": "<f8",
        "BYTES": "object",
    }.items()
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's input or output: name, datatype name, and shape with -1 for each variable dimension.

    For a model that batches, the first dimension of `shape` is the batch dimension and is -1; `row_shape` is the rest. `symbols`
    are the names that the model gives its variable dimensions, "" for those that have none (it is empty where nothing has a name):
    dimensions of one name are equally long. `optional`: what a client leaves out is made by the server.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    symbols: tuple[str, ...] = field(default=(), compare=False)
    optional: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row: everything behind the batch dimension."""
        return self.shape[1:]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a backend says about its model.

    `batchable` is False where no batch dimension exists or a probe refuted it; `unbatchable_reason` then says why, and every
    request runs alone with its whole shape. `platform` is the word shown in metadata, for example `onnxruntime_onnx`.
    `uses_parameters`: the model is handed each row's request parameters. `echo_parameters`: custom request parameters are
    returned in the response. `labels` maps an output name to its class labels, for the classification extension. `steady`: how
    long a run takes depends on the number of rows alone, so that what was measured while loading holds. `reads_only`: a run never
    writes to its inputs, so they may be the client's own bytes.
    """

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batchable: bool = True
    unbatchable_reason: str | None = None
    uses_parameters: bool = False
    echo_parameters: bool = False
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steady: bool = False
    reads_only: bool = False


def serialize_bytes(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Elements (bytes, or str taken as UTF-8) in row-major order, each with its length in front as uint32, little-endian."""
    parts: list[bytes] = []
    for item in array.reshape(-1).tolist():
        element = item.encode() if isinstance(item, str) else item
        if not isinstance(element, bytes):
            raise TypeError(f"a BYTES element must be bytes or str, got {type(element).__name__}")
        parts.append(len(element).to_bytes(4, "little"))
        parts.append(element)
    return b"".join(parts)
