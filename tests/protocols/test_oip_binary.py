"""Bodies cut into tensors: byte counts to the last one, BYTES elements, and raw requests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.datatypes import ModelSpec, TensorSpec, serialize_bytes
from shoal.errors import BadRequest, ShoalError, TooLarge
from shoal.protocols.oip_binary import parse_bytes_elements
from shoal.protocols.oip_json import Limits, decode_head, decode_raw, split_binary


def body_of(*tensors: tuple[str, str, list[int], bytes]) -> tuple[bytes, int]:
    """A request body of binary tensors, and the length of its JSON."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in tensors
    ]
    text = json.dumps({"inputs": inputs}).encode()
    return text + b"".join(data for _, _, _, data in tensors), len(text)


def split(body: bytes, length: int) -> tuple[Any, ...]:
    """Decode and cut a body."""
    return split_binary(decode_head(body[:length]), memoryview(body), length)


def spec_of(datatype: str, shape: tuple[int, ...], batchable: bool = True) -> ModelSpec:
    """A model with one input."""
    return ModelSpec("test", (TensorSpec("x", datatype, shape),), (), batchable=batchable)


def test_tensors_come_in_order_and_are_views() -> None:
    """Tensors lie back to back in listed order; numeric ones are views into the body, nothing is copied."""
    body, length = body_of(("a", "INT16", [2], b"\1\0\2\0"), ("b", "BYTES", [2], b"\1\0\0\0x\0\0\0\0"), ("c", "UINT8", [3], b"abc"))
    first, second, third = split(body, length)
    assert (bytes(first), second.tolist(), bytes(third)) == (b"\1\0\2\0", [b"x", b""], b"abc")
    assert first.obj is body and third.obj is body


def test_inline_and_binary_inputs_mix() -> None:
    """Inline tensors take no bytes of the body; the binary ones keep their order among themselves."""
    inputs = [
        {"name": "a", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        {"name": "b", "datatype": "INT32", "shape": [2], "data": [7, 8]},
        {"name": "c", "datatype": "UINT8", "shape": [1], "parameters": {"binary_data_size": 1}},
    ]
    text = json.dumps({"inputs": inputs}).encode()
    head = decode_head(text)
    first, second, third = split_binary(head, memoryview(text + b"xyz"), len(text))
    assert (bytes(first), second.tolist(), bytes(third)) == (b"xy", [7, 8], b"z")
    assert not head.cacheable and head.total_bytes == 11 and head.total_binary_bytes == 3


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (0, 'input "a": 4 bytes are announced, but only 0 follow'),
        (3, 'input "a": 4 bytes are announced, but only 3 follow'),
        (5, 'input "b": 2 bytes are announced, but only 1 follow'),
        (9, 'input "b": 3 bytes too many follow the last tensor'),
    ],
)
def test_wrong_totals_name_the_tensor(present: int, message: str) -> None:
    """With several tensors, the one where the bytes run out (or after which some are left) is named with both counts."""
    body, length = body_of(("a", "UINT8", [4], bytes(4)), ("b", "UINT8", [2], bytes(2)))
    with pytest.raises(BadRequest, match=message + rf".*6 announced, {present} sent"):
        split((body + bytes(9))[: length + present], length)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1\0\0\0x\1\0\0", "left over|ends before element 1"),
        (b"\1\0\0\0x\2\0\0\0y", "element 1 claims 2 bytes, but only 1 of its data are left"),
        (b"\xff\xff\xff\xffxxxx", "element 0 claims 4294967295 bytes, but only 4 of its data are left"),
        (b"\1\0\0\0x\1\0\0\0yz", "1 bytes are left over behind the 2 BYTES elements"),
        (b"\4\0\0\0xxxx", "ends before element 1"),
    ],
)
def test_bad_bytes_elements(data: bytes, message: str) -> None:
    """Element counts and lengths of BYTES are exact: nothing missing, nothing beyond the end, nothing left over."""
    with pytest.raises(BadRequest, match=r'inputs\[0\] "s": .*(' + message + ")"):
        split(*body_of(("s", "BYTES", [2], data)))


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
@settings(deadline=None, max_examples=100)
def test_bytes_round_trip(elements: list[bytes]) -> None:
    """Parsing what was serialized gives the same elements, trailing zero bytes and all."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    assert parse_bytes_elements(serialize_bytes(array), len(elements), "t").tolist() == elements


@given(st.binary(max_size=60), st.integers(1, 8))
@settings(deadline=None, max_examples=200)
def test_bytes_parsing_is_total(data: bytes, count: int) -> None:
    """Any bytes are either exactly `count` elements (and serialize back to the same bytes) or a BadRequest."""
    try:
        parsed = parse_bytes_elements(data, count, "t")
    except BadRequest:
        return
    assert serialize_bytes(parsed) == data


@pytest.mark.parametrize(
    ("spec", "size", "shape"),
    [
        (spec_of("FP32", (-1, 1, 8, 8)), 256, (1, 1, 8, 8)),
        (spec_of("FP32", (-1, -1)), 20, (1, 5)),
        (spec_of("INT64", (-1, 2, -1)), 48, (1, 2, 3)),
        (spec_of("FP16", (-1,)), 2, (1,)),
        (spec_of("BYTES", (-1, 1)), 7, (1, 1)),
        (spec_of("BYTES", (-1, -1)), 0, (1, 1)),
        (spec_of("UINT8", (3, -1), batchable=False), 12, (3, 4)),
    ],
)
def test_raw_request(spec: ModelSpec, size: int, shape: tuple[int, ...]) -> None:
    """The whole body is the only input with batch 1; one variable dimension follows from the size; outputs are binary."""
    head = decode_raw(spec, size)
    assert (head.inputs[0].shape, head.inputs[0].binary_size, head.binary_default) == (shape, size, True)
    (data,) = split_binary(head, memoryview(bytes(size)), 0)
    if spec.inputs[0].datatype == "BYTES":
        assert data.shape == shape and data.reshape(-1).tolist() == [bytes(size)]
    else:
        assert bytes(data) == bytes(size)


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        (spec_of("FP32", (-1, 5)), 28, r'input "x": shape \[1,5\] FP32 needs 20 bytes, got 28'),
        (spec_of("FP32", (-1, 5)), 16, r'input "x": shape \[1,5\] FP32 needs 20 bytes, got 16'),
        (spec_of("FP32", (-1, -1, 3)), 16, "do not divide into the 12 bytes"),
        (spec_of("FP32", (-1, -1)), 0, "do not divide"),
        (spec_of("FP32", (-1, -1, -1)), 16, "2 variable dimensions"),
        (spec_of("BYTES", (-1, 2)), 16, "one BYTES element only"),
        (spec_of("FP32", (-1, 0)), 0, "empty tensor"),
        (ModelSpec("test", (TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "FP32", (-1,))), ()), 8, "one input, this one has 2"),
        (ModelSpec("test", (), ()), 8, "one input, this one has 0"),
    ],
)
def test_refused_raw_requests(spec: ModelSpec, size: int, message: str) -> None:
    """Raw requests whose size does not fit, or whose model cannot take them, are refused with the reason."""
    with pytest.raises(BadRequest, match=message):
        decode_raw(spec, size)


def test_raw_request_over_the_limit() -> None:
    """The byte limit holds for raw requests too."""
    with pytest.raises(TooLarge):
        decode_raw(spec_of("UINT8", (-1, -1)), 101, Limits(max_request_bytes=100))


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_splitting_is_total(data: st.DataObject) -> None:
    """Whatever follows a valid head is cut exactly as announced or refused; the parts together are the whole."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    body, length = body_of(*[(f"t{index}", "UINT8", [size], bytes(size)) for index, size in enumerate(sizes)])
    tail = data.draw(st.binary(max_size=40))
    try:
        parts = split(body[:length] + tail, length)
    except ShoalError:
        assert len(tail) != sum(sizes)
    else:
        assert b"".join(map(bytes, parts)) == tail


@pytest.mark.parametrize("raw", [False, True])
def test_booleans_are_zero_or_one(raw: bool) -> None:
    """Bytes that no boolean array holds are refused by tensor and element, in every form of a request; 0 and 1 pass."""
    spec = ModelSpec("test", (TensorSpec("flags", "BOOL", (-1, 4)),), ())
    tensor = {"name": "flags", "shape": [1, 4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}}
    text = b"" if raw else json.dumps({"inputs": [tensor]}).encode()
    head = decode_raw(spec, 4) if raw else decode_head(text)
    assert not head.single_slice  # whoever takes the short way skips what is checked here
    assert bytes(split_binary(head, text + b"\0\1\1\0", len(text))[0]) == b"\0\1\1\0"  # type: ignore[arg-type]
    for bad in (2, 255):
        with pytest.raises(BadRequest, match=rf'inputs\[0\] "flags": BOOL element 2 is the byte {bad}, it must be 0 or 1'):
            split_binary(head, text + bytes([0, 1, bad, 3]), len(text))
