"""From output tensors to the JSON and the binary buffers of an inference response. No sockets, no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.datatypes import DATATYPES, serialize_bytes
from shoal.errors import BadRequest
from shoal.protocols.classification import classify
from shoal.protocols.json_numbers import json_values
from shoal.protocols.oip_head import Array, Bytes, Parameter, TensorData

__all__ = ["OutputTensor", "encode_response"]

_encode = msgspec.json.Encoder().encode


class OutputTensor(msgspec.Struct, frozen=True, eq=False):
    """One tensor of an answer.

    `data` is an array of `shape` (BYTES: object elements, bytes or str) or the little-endian contiguous bytes of it. `binary`: goes
    behind the JSON rather than into it. `classification` is the k of top-k, 0 for the tensor itself; `labels` names the classes;
    `batched` says that the first dimension counts rows.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: TensorData
    binary: bool = True
    classification: int = 0
    labels: Sequence[str] | None = None
    batched: bool = True


def _as_array(output: OutputTensor) -> Array:
    if isinstance(output.data, np.ndarray):
        return output.data
    return np.frombuffer(output.data, dtype=DATATYPES[output.datatype].numpy).reshape(tuple(output.shape))


def _strings(array: Array, name: str) -> list[str]:
    items = array.reshape(-1).tolist()
    try:
        if set(map(type, items)) == {bytes}:
            return list(map(bytes.decode, items))
        return [item if type(item) is str else bytes(item).decode("utf-8") for item in items]
    except UnicodeDecodeError:
        raise BadRequest(
            f'outputs "{name}": holds bytes that are not UTF-8, which JSON cannot carry; ask for it with binary_data true'
        ) from None


def _as_buffer(data: TensorData) -> Bytes:
    if not isinstance(data, np.ndarray):
        return data
    if data.dtype.hasobject:
        return serialize_bytes(data)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def _encode_output(output: OutputTensor, buffers: list[Bytes]) -> dict[str, Any]:
    datatype, shape, data = output.datatype, output.shape, output.data
    if output.classification:
        if datatype in ("BYTES", "BF16"):
            raise BadRequest(f'outputs "{output.name}": classification of {datatype} is not possible')
        data = classify(_as_array(output), output.classification, output.labels, output.batched, output.name)
        datatype, shape = "BYTES", data.shape
    entry: dict[str, Any] = {"name": output.name, "shape": shape, "datatype": datatype}
    if output.binary:
        buffer = _as_buffer(data)
        buffers.append(buffer)
        entry["parameters"] = {"binary_data_size": len(buffer)}
    elif datatype == "BYTES":
        if not isinstance(data, np.ndarray):
            raise TypeError("BYTES data comes as an array of its elements")
        entry["data"] = _strings(data, output.name)
    elif datatype == "BF16":
        raise BadRequest(f'outputs "{output.name}": BF16 has no JSON form; ask for it with binary_data true')
    else:
        entry["data"] = json_values(_as_array(output))
    return entry


def encode_response(
    model_name: str,
    model_version: str,
    request_id: str | None,
    parameters: Mapping[str, Parameter] | None,
    outputs: Sequence[OutputTensor],
) -> tuple[bytes, list[Bytes]]:
    """JSON bytes and, in the order of their outputs, the binary buffers that follow it.

    The header `Inference-Header-Content-Length` (length of the JSON) belongs to the response if and only if the list is not empty.
    Raises `BadRequest` for an output that JSON cannot carry but was asked for as JSON.
    """
    buffers: list[Bytes] = []
    head: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if request_id:
        head["id"] = request_id
    if parameters:
        head["parameters"] = parameters
    head["outputs"] = [_encode_output(output, buffers) for output in outputs]
    return _encode(head), buffers
