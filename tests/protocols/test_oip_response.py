"""Answers as bytes: JSON values that survive, binary buffers in order, classification, and the cheap all-binary head."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shoal.errors import BadRequest
from shoal.protocols.classification import classify
from shoal.protocols.json_numbers import json_values
from shoal.protocols.oip_json import OutputTensor, encode_response


def objects(*items: Any) -> np.ndarray[Any, Any]:
    """A flat object array."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def test_json_response_has_exactly_the_protocol_s_keys() -> None:
    """Id and parameters are there only when given; outputs carry name, shape, datatype and flat data."""
    output = OutputTensor("y", "INT32", (2, 2), np.array([[1, 2], [3, 4]], np.int32), binary=False)
    text, buffers = encode_response("m", "1", None, None, [output])
    expected: dict[str, Any] = {"name": "y", "shape": [2, 2], "datatype": "INT32", "data": [1, 2, 3, 4]}
    assert json.loads(text) == {"model_name": "m", "model_version": "1", "outputs": [expected]}
    assert buffers == []
    text, _ = encode_response("m", "1", "r1", {"id": "123", "w": 1.0}, [])
    assert json.loads(text) == {
        "model_name": "m", "model_version": "1", "id": "r1", "parameters": {"id": "123", "w": 1.0}, "outputs": [],
    }  # fmt: skip


def test_binary_outputs_follow_in_order() -> None:
    """Binary outputs announce their sizes and come as buffers in listed order, also among JSON ones."""
    outputs = [
        OutputTensor("a", "FP32", (1, 2), np.array([[1, 2]], np.float32)),
        OutputTensor("b", "UINT8", (1,), np.array([7], np.uint8), binary=False),
        OutputTensor("c", "BYTES", (2,), objects(b"xy", "é")),
        OutputTensor("d", "INT16", (2,), memoryview(b"\1\0\2\0")),
        OutputTensor("e", "BF16", (1,), np.array([0x3F80], "<u2")),
    ]
    text, buffers = encode_response("m", "1", None, None, outputs)
    body = json.loads(text)
    assert [bytes(buffer) for buffer in buffers] == [
        np.array([1, 2], "<f4").tobytes(), b"\2\0\0\0xy\2\0\0\0\xc3\xa9", b"\1\0\2\0", b"\x80\x3f",
    ]  # fmt: skip
    sizes = [output.get("parameters", {}).get("binary_data_size") for output in body["outputs"]]
    assert sizes == [8, None, 12, 4, 2]
    assert ["data" in output for output in body["outputs"]] == [False, True, False, False, False]


def test_non_contiguous_arrays() -> None:
    """A column of a matrix is answered as that column, in both forms."""
    column = np.arange(6, dtype=np.int32).reshape(3, 2)[:, 1]
    text, _ = encode_response("m", "1", None, None, [OutputTensor("y", "INT32", (3,), column, binary=False)])
    assert json.loads(text)["outputs"][0]["data"] == [1, 3, 5]
    _, (buffer,) = encode_response("m", "1", None, None, [OutputTensor("y", "INT32", (3,), column)])
    assert bytes(buffer) == np.array([1, 3, 5], "<i4").tobytes()


def test_empty_outputs() -> None:
    """A model that found nothing answers an empty tensor, in both forms."""
    nothing = np.empty((0, 4), np.float32)
    text, buffers = encode_response("m", "1", None, None, [OutputTensor("y", "FP32", (0, 4), nothing, binary=False)])
    assert json.loads(text)["outputs"][0] == {"name": "y", "shape": [0, 4], "datatype": "FP32", "data": []}
    text, buffers = encode_response("m", "1", None, None, [OutputTensor("y", "FP32", (0, 4), nothing)])
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert [bytes(buffer) for buffer in buffers] == [b""]


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
@pytest.mark.parametrize("padding", [0, 100])
def test_case_34_non_finite_values_out(datatype: str, padding: int) -> None:
    """Case 34: the three strings stand where the values were, the length stays, -0.0 and the smallest denormal survive."""
    dtype = np.dtype({"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}[datatype])
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array([np.nan, np.inf, -np.inf, -0.0, tiny, -tiny, 1.5, np.finfo(dtype).max], dtype)
    array = np.concatenate([special, np.zeros(padding, dtype)])
    text, _ = encode_response("m", "1", None, None, [OutputTensor("y", datatype, array.shape, array, binary=False)])
    data = json.loads(text)["outputs"][0]["data"]
    assert data[:3] == ["NaN", "Infinity", "-Infinity"]
    assert len(data) == array.size
    assert np.array(data, dtype).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_floats_are_short_and_exact(dtype: Any) -> None:
    """Every finite FP16, and FP32 of all magnitudes, comes back bit for bit; ordinary values print in few digits."""
    if dtype is np.float16:
        array = np.arange(2**16, dtype=np.uint16).view(np.float16)
    else:
        array = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    array = array[np.isfinite(array)]
    assert np.array(json_values(array), np.float64).astype(dtype).tobytes() == array.tobytes()
    for start in range(0, 6000, 60):  # few at a time go another way
        piece = array[start : start + 60]
        assert np.array(json_values(piece), np.float64).astype(dtype).tobytes() == piece.tobytes()
    few = np.array([0.1, -0.3, 123.456, 1e-3, 2.5], dtype)
    longest = max(len(repr(value)) for value in json_values(np.tile(few, 50)))
    assert longest <= 7
    assert json_values(few) == json_values(np.tile(few, 50))[:5]


def test_booleans_and_large_integers() -> None:
    """BOOL answers true and false; 64-bit integers keep every digit."""
    assert json_values(np.array([True, False])) == [True, False]
    text, _ = encode_response("m", "1", None, None, [OutputTensor("y", "UINT64", (1,), np.array([2**64 - 1], "<u8"), binary=False)])
    assert b"[18446744073709551615]" in text


def test_bytes_as_json() -> None:
    """BYTES answer UTF-8 strings; bytes that are no UTF-8 are an error that says to ask for binary data."""
    text, _ = encode_response("m", "1", None, None, [OutputTensor("y", "BYTES", (3,), objects(b"a", "é", b""), binary=False)])
    assert json.loads(text)["outputs"][0]["data"] == ["a", "é", ""]
    with pytest.raises(BadRequest, match=r'outputs "y": .*ask for it with binary_data true'):
        encode_response("m", "1", None, None, [OutputTensor("y", "BYTES", (1,), objects(b"\xff"), binary=False)])


def test_bf16_as_json_is_refused() -> None:
    """BF16 has no JSON form; the error says to ask for binary data."""
    with pytest.raises(BadRequest, match='outputs "y": BF16 has no JSON form; ask for it with binary_data true'):
        encode_response("m", "1", None, None, [OutputTensor("y", "BF16", (1,), np.zeros(1, "<u2"), binary=False)])


def test_classification() -> None:
    """Top-k per row, best first, value:index:label; the shape is [rows, k]; k beyond the classes means all of them."""
    scores = np.array([[0.1, 0.7, 0.2], [3, -1, 5]], np.float32)
    output = OutputTensor("y", "FP32", (2, 3), scores, binary=False, classification=2, labels=("zero", "one"))
    text, _ = encode_response("m", "1", None, None, [output])
    assert json.loads(text)["outputs"][0] == {
        "name": "y", "shape": [2, 2], "datatype": "BYTES", "data": ["0.7:1:one", "0.2:2", "5.0:2", "3.0:0:zero"],
    }  # fmt: skip
    _, (buffer,) = encode_response("m", "1", None, None, [OutputTensor("y", "FP32", (1, 2), scores[:1, :2], classification=9)])
    assert bytes(buffer) == b"\5\0\0\x000.7:1\5\0\0\x000.1:0"


def test_classification_order() -> None:
    """Equal scores keep their order, NaN comes last, extreme integers do not overflow, no batch gives one list."""
    assert classify(np.array([[1.0, np.nan, 2.0, 1.0]]), 4, None, True, "y").tolist() == [[b"2.0:2", b"1.0:0", b"1.0:3", b"nan:1"]]
    for dtype in (np.int8, np.uint8, np.int64, np.uint64):
        bounds = np.iinfo(dtype)
        array = np.array([bounds.min, bounds.max, 5], dtype)
        expected = [f"{bounds.max}:1".encode(), b"5:2", f"{bounds.min}:0".encode()]
        assert classify(array, 3, None, False, "y").tolist() == expected
    assert classify(np.array([[False, True]]), 1, None, True, "y").tolist() == [[b"True:1"]]


def test_classification_needs_numbers() -> None:
    """Classification of BYTES and BF16 is refused, naming the output."""
    for datatype, data in (("BYTES", objects(b"a")), ("BF16", np.zeros(1, "<u2"))):
        with pytest.raises(BadRequest, match='outputs "y"'):
            encode_response("m", "1", None, None, [OutputTensor("y", datatype, (1,), data, classification=1)])


def test_id_stands_before_the_outputs_and_changes_nothing_else() -> None:
    """Answers to requests that differ in their id alone differ in it alone, so one rendered without an id serves all of them."""
    output = OutputTensor("y", "FP32", (3, 10), np.zeros((3, 10), np.float32))
    plain, _ = encode_response("m", "1", None, None, [output])
    full, _ = encode_response("m", "1", "r1", None, [output])
    assert full == plain.replace(b',"outputs":', b',"id":"r1","outputs":')
    assert plain.count(b',"outputs":') == 1
