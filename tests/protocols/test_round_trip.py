"""Every datatype, both forms, both ways: what an unmodified client sends is what the model gets, and back.

`tritonclient` builds the requests and reads the answers, so that our own codec is not its own judge.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferInput, InferRequestedOutput, InferResult
from tritonclient.http._utils import _get_inference_request

from shoal.datatypes import DATATYPES
from shoal.protocols.oip_json import OutputTensor, decode_head, encode_response, split_binary

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)
NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]


def client_array(datatype: str, data: st.DataObject, *, text: bool) -> np.ndarray[Any, Any]:
    """An array as a client has it. `text`: only what JSON can carry (no NaN, which the client would write as a bare word)."""
    shape = data.draw(SHAPES)
    if datatype == "BYTES":
        elements = st.text(max_size=5).map(str.encode) if text else st.binary(max_size=6)
        return data.draw(hnp.arrays(object, shape, elements=elements))
    if datatype == "BF16":
        return data.draw(hnp.arrays(np.uint16, shape)).view(ml_dtypes.bfloat16)
    dtype = DATATYPES[datatype].numpy
    finite = {"allow_nan": not text, "allow_infinity": not text} if dtype.kind == "f" else {}
    return data.draw(hnp.arrays(dtype, shape, elements=hnp.from_dtype(dtype, **finite)))


def send(array: np.ndarray[Any, Any], datatype: str, binary: bool) -> np.ndarray[Any, Any]:
    """From the client's array over the wire to the array that the model would get."""
    tensor = InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    body, length = _get_inference_request([tensor], "", [InferRequestedOutput("y")], 0, False, False, 0, None, None)
    length = len(body) if length is None else length
    head = decode_head(body[:length])
    (data,) = split_binary(head, memoryview(body), length)
    if not isinstance(data, np.ndarray):
        data = np.frombuffer(data, DATATYPES[datatype].numpy)
    return data.reshape(head.inputs[0].shape)


def receive(array: np.ndarray[Any, Any], datatype: str, binary: bool) -> np.ndarray[Any, Any]:
    """From the model's array over the wire to the array that the client reads."""
    text, buffers = encode_response("m", "1", None, None, [OutputTensor("y", datatype, array.shape, array, binary)])
    body = b"".join((text, *buffers))
    result = InferResult.from_response_body(body, header_length=len(text) if buffers else None).as_numpy("y")
    assert isinstance(result, np.ndarray)
    return result


def same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Equal shape and, bit for bit, equal content."""
    if left.shape != right.shape:
        return False
    if left.dtype.hasobject:
        return left.tolist() == right.tolist()
    return left.tobytes() == right.tobytes()


@pytest.mark.parametrize("datatype", list(DATATYPES))
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_binary_requests(datatype: str, data: st.DataObject) -> None:
    """Binary inputs of every datatype arrive bit for bit, NaN payloads and all."""
    array = client_array(datatype, data, text=False)
    assert same(send(array, datatype, binary=True), array)


@pytest.mark.parametrize("datatype", [*NUMERIC, "BYTES"])
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_json_requests(datatype: str, data: st.DataObject) -> None:
    """Inline inputs of every datatype that JSON can carry arrive exactly, -0.0 and denormals too."""
    array = client_array(datatype, data, text=True)
    assert same(send(array, datatype, binary=False), array)


@pytest.mark.parametrize("datatype", [*NUMERIC, "BYTES"])
@given(st.data())
@settings(deadline=None, max_examples=20)
def test_nested_json_requests(datatype: str, data: st.DataObject) -> None:
    """Data nested as the shape says is the same array as flat data."""
    array = client_array(datatype, data, text=True)
    nested = np.vectorize(bytes.decode, otypes=[object])(array).tolist() if datatype == "BYTES" else array.tolist()
    tensor = {"name": "x", "shape": array.shape, "datatype": datatype, "data": nested}
    got = decode_head(json.dumps({"inputs": [tensor]}).encode()).inputs[0].data
    assert got is not None and same(got, array)


@pytest.mark.parametrize("datatype", list(DATATYPES))
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_binary_responses(datatype: str, data: st.DataObject) -> None:
    """Binary outputs of every datatype are read back bit for bit."""
    array = client_array(datatype, data, text=False)
    inside = array.view(np.uint16) if datatype == "BF16" else array
    assert same(receive(inside, datatype, binary=True), array)


@pytest.mark.parametrize("datatype", [*NUMERIC, "BYTES"])
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_json_responses(datatype: str, data: st.DataObject) -> None:
    """JSON outputs are read back exactly; all NaNs are one, and BYTES come as text."""
    array = client_array(datatype, data, text=datatype == "BYTES")
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    got = receive(array, datatype, binary=False)
    if datatype == "BYTES":
        assert [str(item).encode() for item in got.reshape(-1)] == array.reshape(-1).tolist()
    else:
        assert same(got, array)
