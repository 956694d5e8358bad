"""From the JSON of an inference request to an `InferHead`: typed decoding, then every check that needs no model.

Sans-IO and total: any bytes give a head or one of our errors. Which tensors the model wants is checked by `tensors/`, not here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from shoal.datatypes import DATATYPES
from shoal.errors import BadRequest, Forbidden, NotSupported, TooLarge
from shoal.protocols.json_guard import check_depth, check_duplicate_keys, check_keys, check_utf8, readable
from shoal.protocols.limits import DEFAULT_LIMITS, Limits
from shoal.protocols.oip_head import (
    CHECKED_DATATYPES,
    Array,
    InferHead,
    InputHead,
    OutputHead,
    Parameter,
    count_elements,
    show_shape,
)
from shoal.protocols.oip_inline import parse_inline

__all__ = ["decode_head"]


class _Tensor(msgspec.Struct, gc=False):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Any] | UnsetType | None = UNSET
    data: msgspec.Raw | UnsetType = UNSET


class _Requested(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Any] | UnsetType | None = UNSET


class _Request(msgspec.Struct, gc=False):
    inputs: list[_Tensor]
    id: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    outputs: list[_Requested] | UnsetType | None = UNSET


_decode = msgspec.json.Decoder(_Request).decode
_NONE: Final[dict[str, Parameter]] = {}
_INTEGER_MIN: Final = -(2**63)
_INTEGER_MAX: Final = 2**64 - 1


def _check_name(name: str, what: str, limits: Limits) -> None:
    if not name:
        raise BadRequest(f"{what} is empty")
    if len(name) > limits.max_name_bytes or (not name.isascii() and len(name.encode()) > limits.max_name_bytes):
        raise BadRequest(f"{what} is longer than the limit of {limits.max_name_bytes} bytes")


def _integer(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _INTEGER_MAX:
        raise BadRequest(f"{what} must be an integer from 0 to {_INTEGER_MAX}")
    return value


def _boolean(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise BadRequest(f"{what} must be true or false")
    return value


def _custom(key: str, value: Any, where: str, limits: Limits) -> Parameter:
    """A parameter that means nothing to us: kept as it is, if it is a plain value. Returned values must be encodable again."""
    _check_name(key, f"{where}: a parameter name", limits)
    kind = type(value)
    if kind is int:
        if not _INTEGER_MIN <= value <= _INTEGER_MAX:
            raise BadRequest(f"{where}.{key} is an integer of more than 64 bits")
    elif kind is not str and kind is not float and kind is not bool:
        raise BadRequest(f"{where}.{key} must be a string, a number or a boolean")
    result: Parameter = value
    return result


def _refuse_shared_memory(key: str, where: str) -> None:
    if key.startswith("shared_memory_"):
        raise Forbidden(f"{where}: {key} is set, but shared memory is switched off on this server")


def _input(index: int, tensor: _Tensor, limits: Limits) -> InputHead:
    name, shape, parameters = tensor.name, tensor.shape, tensor.parameters
    where = f'inputs[{index}] "{name[:100]}"'
    _check_name(name, f"inputs[{index}].name", limits)
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise BadRequest(f"{where}: unknown datatype {tensor.datatype[:40]!r}, expected one of {', '.join(DATATYPES)}")
    elements = count_elements(shape, limits, where)
    binary_size: int | None = None
    custom = _NONE
    if parameters:
        for key, value in parameters.items():
            if key == "binary_data_size":
                binary_size = value if type(value) is int and 0 <= value <= _INTEGER_MAX else _integer(value, f"{where}: {key}")
            else:
                _refuse_shared_memory(key, where)
                if custom is _NONE:
                    custom = {}
                custom[key] = _custom(key, value, f"{where}: parameters", limits)
    byte_size = elements * datatype.itemsize
    if byte_size > limits.max_request_bytes:
        raise TooLarge(f"{where}: shape {show_shape(shape)} {datatype.name} exceeds the limit of {limits.max_request_bytes} bytes")
    raw = tensor.data
    if raw is UNSET:
        if binary_size is None:
            raise BadRequest(f"{where}: neither data nor binary_data_size is given")
        if datatype.itemsize:
            if binary_size != byte_size:
                raise BadRequest(f"{where}: shape {show_shape(shape)} {datatype.name} needs {byte_size} bytes, got {binary_size}")
        elif binary_size < 4 * elements:
            raise BadRequest(f"{where}: shape {show_shape(shape)} BYTES needs at least {4 * elements} bytes, got {binary_size}")
        else:
            byte_size = binary_size
        return InputHead(name, tensor.datatype, shape, elements, byte_size, binary_size, None, custom)
    if binary_size is not None:
        raise BadRequest(f"{where}: both data and binary_data_size are given")
    array: Array = parse_inline(bytes(raw), datatype, shape, elements, where)
    if not datatype.itemsize:
        byte_size = 4 * elements + sum(map(len, array.reshape(-1)))
    return InputHead(name, tensor.datatype, shape, elements, byte_size, None, array, custom)


def _output(index: int, requested: _Requested, binary_default: bool, limits: Limits) -> OutputHead:
    where = f'outputs[{index}] "{requested.name[:100]}"'
    _check_name(requested.name, f"outputs[{index}].name", limits)
    binary, classification, custom = binary_default, 0, _NONE
    if requested.parameters:
        for key, value in requested.parameters.items():
            if key == "binary_data":
                binary = _boolean(value, f"{where}: binary_data")
            elif key == "classification":
                classification = _integer(value, f"{where}: classification")
            else:
                _refuse_shared_memory(key, where)
                if custom is _NONE:
                    custom = {}
                custom[key] = _custom(key, value, f"{where}: parameters", limits)
    return OutputHead(requested.name, binary, classification, custom)


def _unique(names: list[str], what: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise BadRequest(f'{what} "{twice[:100]}" is given twice')


def _count_keys(request: _Request) -> int:
    """How many colons the text has if every key is known and stands there once, and no string has a colon, nor any data."""
    colons = 1
    for part in (request.id, request.parameters, request.outputs):
        if part is not UNSET:
            colons += 1
    if request.parameters:
        colons += len(request.parameters)
    for tensor in request.inputs:
        colons += 3
        if tensor.parameters is not UNSET:
            colons += 1 + (len(tensor.parameters) if tensor.parameters else 0)
        if tensor.data is not UNSET:
            colons += 1
    for requested in request.outputs or ():
        colons += 1
        if requested.parameters is not UNSET:
            colons += 1 + (len(requested.parameters) if requested.parameters else 0)
    return colons


def decode_head(json: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> InferHead:
    """Decode and check the JSON part of an inference request.

    Raises `BadRequest` naming the field; `TooLarge` when the announced tensors exceed `limits.max_request_bytes`; `Forbidden` for
    shared memory, which is switched off; `NotSupported` for stateful sequences. Unknown keys are ignored.
    """
    text = json if type(json) is bytes else bytes(json)
    check_utf8(text)
    check_depth(text, limits.max_json_depth)
    colons = check_keys(text, limits.max_json_keys)
    try:
        request = _decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(readable(error)) from None
    colons -= _count_keys(request)
    if colons and colons != sum([bytes(tensor.data).count(b":") for tensor in request.inputs if tensor.data is not UNSET]):
        check_duplicate_keys(text)

    priority, timeout_us, binary_default, custom = 0, 0, False, _NONE
    if request.parameters:
        for key, value in request.parameters.items():
            if key == "binary_data_output":
                binary_default = _boolean(value, "parameters.binary_data_output")
            elif key == "priority":
                priority = _integer(value, "parameters.priority")
            elif key == "timeout":
                timeout_us = _integer(value, "parameters.timeout (microseconds)")
            elif key == "sequence_id":
                if value not in (0, "") or type(value) is float:
                    raise NotSupported("parameters.sequence_id: stateful sequences are not supported by this server")
            elif key == "sequence_start" or key == "sequence_end":
                _boolean(value, f"parameters.{key}")
            else:
                if custom is _NONE:
                    custom = {}
                custom[key] = _custom(key, value, "parameters", limits)

    identifier = request.id or None
    if identifier is not None:
        _check_name(identifier, "id", limits)
    count = len(request.inputs)
    if not 0 < count <= limits.max_inputs:
        raise BadRequest(f"inputs: {count} tensors are given, from 1 to {limits.max_inputs} are allowed")
    inputs = tuple([_input(index, tensor, limits) for index, tensor in enumerate(request.inputs)])
    if count > 1:
        _unique([tensor.name for tensor in inputs], "input")
    total_bytes = total_binary_bytes = 0
    inline = False
    for tensor in inputs:
        total_bytes += tensor.byte_size
        if tensor.binary_size is None:
            inline = True
        else:
            total_binary_bytes += tensor.binary_size
    if total_bytes > limits.max_request_bytes:
        raise TooLarge(f"inputs: {total_bytes} bytes of tensors exceed the limit of {limits.max_request_bytes} bytes")

    outputs: tuple[OutputHead, ...] | None = None
    if request.outputs:
        if len(request.outputs) > limits.max_outputs:
            raise BadRequest(f"outputs: {len(request.outputs)} are requested, at most {limits.max_outputs} are allowed")
        outputs = tuple([_output(index, item, binary_default, limits) for index, item in enumerate(request.outputs)])
        if len(outputs) > 1:
            _unique([output.name for output in outputs], "output")
    return InferHead(
        identifier,
        custom,
        priority,
        timeout_us or None,
        inputs,
        outputs,
        binary_default,
        total_binary_bytes,
        total_bytes,
        not inline,
        count == 1 and not inline and inputs[0].datatype not in CHECKED_DATATYPES,
    )
