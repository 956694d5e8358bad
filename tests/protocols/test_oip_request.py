"""Heads of inference requests: what is accepted, what is refused, and that the refusal names the field."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import BadRequest, Forbidden, NotSupported, TooLarge
from shoal.protocols.json_guard import check_depth
from shoal.protocols.oip_json import InferHead, Limits, decode_head, split_binary

LIMITS = Limits(max_request_bytes=1 << 20)


def request(**changes: Any) -> dict[str, Any]:
    """A valid request of one binary input [1,5] FP32, with changes to its input or, for known keys, to itself."""
    tensor: dict[str, Any] = {"name": "image", "shape": [1, 5], "datatype": "FP32", "parameters": {"binary_data_size": 20}}
    body: dict[str, Any] = {"inputs": [tensor]}
    for key, value in changes.items():
        (body if key in ("id", "parameters_", "outputs", "inputs") else tensor)[key.replace("parameters_", "parameters")] = value
    return body


def decode(body: Any) -> InferHead:
    """Decode a request given as a tree or as text."""
    return decode_head(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)


def inline(datatype: str, data: Any, shape: list[int]) -> np.ndarray[Any, Any]:
    """The array that inline data becomes."""
    tensor = {"name": "t", "shape": shape, "datatype": datatype, "data": data}
    array = decode({"inputs": [tensor]}).inputs[0].data
    assert array is not None
    return array


def test_plain_binary_head() -> None:
    """A binary request becomes a head with exact sizes and the protocol's defaults."""
    head = decode(request())
    (tensor,) = head.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("image", "FP32", (1, 5))
    assert (tensor.elements, tensor.byte_size, tensor.binary_size, tensor.data) == (5, 20, 20, None)
    assert (head.id, head.priority, head.timeout_us, head.outputs, head.binary_default) == (None, 0, None, None, False)
    assert (head.total_binary_bytes, head.total_bytes, head.cacheable, head.single_slice) == (20, 20, True, True)


def test_parameters_keep_their_type_and_value() -> None:
    """Reserved parameters are taken out and typed; a custom "123" stays the string it was, a float a float (case 6)."""
    parameters = {"priority": 2, "timeout": 1500, "binary_data_output": True, "id": "123", "weight": 1.0, "n": 3, "flag": False}
    head = decode(request(id="r1", parameters_=parameters))
    assert (head.id, head.priority, head.timeout_us, head.binary_default) == ("r1", 2, 1500, True)
    assert head.parameters == {"id": "123", "weight": 1.0, "n": 3, "flag": False}
    assert [type(value) for value in head.parameters.values()] == [str, float, int, bool]


def test_requested_outputs() -> None:
    """Each requested output has its own form; what it does not say, the request says for it."""
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False, "classification": 3, "note": "x"}}]
    head = decode(request(outputs=outputs, parameters_={"binary_data_output": True}))
    assert head.outputs is not None
    first, second = head.outputs
    assert (first.name, first.binary, first.classification) == ("a", True, 0)
    assert (second.name, second.binary, second.classification, second.parameters) == ("b", False, 3, {"note": "x"})
    assert decode(request(outputs=[])).outputs is None


def test_absent_and_empty_optional_parts() -> None:
    """An empty id is no id, timeout 0 is no timeout, null stands for an absent optional part, unknown keys are ignored."""
    head = decode({**request(id="", parameters_={"timeout": 0}), "extra": [1], "outputs": None})
    assert (head.id, head.timeout_us, head.outputs) == (None, None, None)
    assert decode({**request(id=None), "parameters": None}).parameters == {}


@pytest.mark.parametrize("sent", [28, 16, 0, 21, 2**64 - 1])
def test_case_1_wrong_announced_size(sent: int) -> None:
    """Case 1: too many and too few announced bytes are refused before anything is queued, with both counts."""
    with pytest.raises(BadRequest) as caught:
        decode(request(parameters={"binary_data_size": sent}))
    assert str(caught.value) == f'inputs[0] "image": shape [1,5] FP32 needs 20 bytes, got {sent}'


@pytest.mark.parametrize("count", [0, 4, 6, 7])
def test_case_1_wrong_number_of_inline_values(count: int) -> None:
    """Case 1 in its JSON form: surplus and missing values are refused with both counts."""
    with pytest.raises(BadRequest, match=rf'inputs\[0\] "t": shape \[1,5\] FP32 needs 5 values, got {count}$'):
        inline("FP32", [1.0] * count, [1, 5])


@pytest.mark.parametrize("sent", [0, 19, 21, 40])
def test_case_1_wrong_bytes_behind_the_json(sent: int) -> None:
    """Case 1 where the head is right and the body is not: refused naming the tensor, the announced and the sent count."""
    text = json.dumps(request()).encode()
    with pytest.raises(BadRequest, match=rf'input "image": .*20 announced, {sent} sent'):
        split_binary(decode_head(text), memoryview(text + bytes(sent)), len(text))


@pytest.mark.parametrize("shape", [[0], [2, 0], [0, 4], [-1, 4], [-(2**70)], [1, -5]])
def test_case_32_empty_and_negative_dimensions(shape: list[int]) -> None:
    """Case 32: a zero or negative dimension is a 400 that names the shape, whatever else is said."""
    for extra in ({"parameters": {"binary_data_size": 0}}, {"data": []}):
        body = {"inputs": [{"name": "t", "shape": shape, "datatype": "FP32", **extra}]}
        with pytest.raises(BadRequest, match="every dimension must be at least 1") as caught:
            decode(body)
        assert "[" + ",".join(map(str, shape)) + "]" in str(caught.value)


def test_case_32_no_inputs() -> None:
    """Case 32: an empty list of inputs is refused."""
    with pytest.raises(BadRequest, match="inputs: 0 tensors"):
        decode({"inputs": []})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "truncated"),
        (b"[]", "xpected object, got array"),
        (b"{}", "missing required field inputs"),
        (b'{"inputs"', "truncated"),
        (b'{"inputs":NaN}', "got|invalid"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"inputs":[],"x":"\xc0\x80"}', "not UTF-8 at byte 18"),
        (b"\xef\xbb\xbf{}", "malformed"),
        (b'{"inputs":[]} x', "trailing characters"),
        ({"inputs": {}}, "inputs: expected array, got object"),
        (request(name=5), r"inputs\[0\]\.name: expected str, got int"),
        (request(name=None), r"inputs\[0\]\.name: expected str"),
        (request(name=""), r"inputs\[0\]\.name is empty"),
        (request(name="n" * 1025), r"inputs\[0\]\.name is longer than the limit of 1024 bytes"),
        (request(name="é" * 513), r"inputs\[0\]\.name is longer than the limit of 1024 bytes"),
        (request(shape=5), r"inputs\[0\]\.shape: expected array, got int"),
        (request(shape=[1.5]), r"inputs\[0\]\.shape\[.*\]: expected int, got float"),
        (request(shape=["1"]), "expected int, got str"),
        (request(shape=[True]), "expected int, got bool"),
        (request(shape=[1] * 17), "the shape has 17 dimensions, at most 16"),
        (request(shape=[2**16, 2**15]), "more than 2147483647 elements"),
        (request(shape=[2**62, 4, 2**62]), "more than 2147483647 elements"),
        (request(shape=[10**100]), "more than 2147483647 elements"),
        (request(datatype="FLOAT"), "unknown datatype 'FLOAT', expected one of BOOL"),
        (request(datatype=None), r"inputs\[0\]\.datatype: expected str"),
        (request(parameters={}), "neither data nor binary_data_size"),
        (request(parameters={"binary_data_size": -1}), "binary_data_size must be an integer"),
        (request(parameters={"binary_data_size": 20.0}), "binary_data_size must be an integer"),
        (request(parameters={"binary_data_size": "20"}), "binary_data_size must be an integer"),
        (request(parameters={"binary_data_size": True}), "binary_data_size must be an integer"),
        (request(parameters={"binary_data_size": 20, "x": None}), "parameters.x must be a string"),
        (request(parameters={"binary_data_size": 20, "x": [1]}), "parameters.x must be a string"),
        (request(data=[1, 2, 3, 4, 5]), "both data and binary_data_size"),
        (request(parameters=[]), r"inputs\[0\]\.parameters: expected"),
        (request(id=5), "id: expected"),
        (request(id="x" * 1025), "id is longer than the limit"),
        (request(parameters_={"priority": -1}), "parameters.priority must be an integer"),
        (request(parameters_={"priority": True}), "parameters.priority must be an integer"),
        (request(parameters_={"timeout": 1.5}), "parameters.timeout .microseconds. must be an integer"),
        (request(parameters_={"timeout": 2**64}), "parameters.timeout .microseconds. must be an integer"),
        (request(parameters_={"binary_data_output": 1}), "binary_data_output must be true or false"),
        (request(parameters_={"custom": None}), "parameters.custom must be a string"),
        (request(parameters_={"custom": {"a": 1}}), "parameters.custom must be a string"),
        (request(parameters_={"custom": 2**64}), "parameters.custom is an integer of more than 64 bits"),
        (request(outputs=[{}]), r"outputs\[0\]: object missing required field name"),
        (request(outputs=[{"name": "a"}, {"name": "a"}]), 'output "a" is given twice'),
        (request(outputs=[{"name": "a", "parameters": {"binary_data": "yes"}}]), "binary_data must be true or false"),
        (request(outputs=[{"name": "a", "parameters": {"classification": -1}}]), "classification must be an integer"),
        (request(outputs=[{"name": str(i)} for i in range(65)]), "outputs: 65 are requested, at most 64"),
        ({"inputs": [request()["inputs"][0]] * 2}, 'input "image" is given twice'),
        ({"inputs": [{**request()["inputs"][0], "name": str(i)} for i in range(65)]}, "inputs: 65 tensors are given"),
        (request(datatype="BYTES", parameters={"binary_data_size": 19}), "BYTES needs at least 20 bytes, got 19"),
    ],
)
def test_refused_heads(body: Any, message: str) -> None:
    """Every kind of malformed head is a BadRequest whose message names the field or the place."""
    with pytest.raises(BadRequest, match=message):
        decode(body)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[{"name":"a","name":"b","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"a","shape":[1],"n\\u0061me":"b","datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"a","shape":[1],"datatype":"INT8","data":[1],"data":[2]}]}',
        b'{"inputs":[],"inputs":[{"name":"a","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"a:b","shape":[1],"datatype":"INT8","data":[1],"parameters":{"x":1,"x":2}}]}',
    ],
)
def test_duplicate_keys(text: bytes) -> None:
    """A key that stands twice in one object is refused, also when written with escapes: nobody guesses which one counts."""
    with pytest.raises(BadRequest, match="twice in one object"):
        decode(text)


def test_colons_in_strings_are_no_duplicates() -> None:
    """Names, ids and data with colons are fine (the duplicate check counts colons first)."""
    tensor = {"name": "serve:0", "shape": [2], "datatype": "BYTES", "data": ["a:b", '"x":"x":']}
    head = decode({"inputs": [tensor], "id": "urn:1", "unknown": {"a": 1}})
    assert head.inputs[0].data is not None
    assert head.inputs[0].data.tolist() == [b"a:b", b'"x":"x":']


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"x":['])
@pytest.mark.parametrize("prefix", [b"", b'{"inputs":', b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":'])
def test_deep_nesting(opening: bytes, prefix: bytes) -> None:
    """A hundred thousand open brackets are refused by the depth limit, never by the interpreter's recursion limit."""
    with pytest.raises(BadRequest, match="nests deeper than the limit of 32 levels"):
        decode(prefix + opening * 100_000)


def test_depth_limit_is_exact_and_looks_through_strings() -> None:
    """32 levels pass, 33 do not; brackets in strings do not count, also behind escaped quotes and over chunk borders."""
    check_depth(b"[" * 32 + b"]" * 32 + b",[]" * 100, 32)
    with pytest.raises(BadRequest):
        check_depth(b"[" * 33 + b"]" * 33, 32)
    check_depth(b'["' + b"[" * 1000 + b'\\"[[[[[[[' + b'"]', 32)
    check_depth(b'"unfinished ' + b'\\"[' * 1000, 32)
    check_depth(b"[]" * 1_500_000, 32)
    with pytest.raises(BadRequest):
        check_depth(b"[]" * 1_500_000 + b"[" * 33, 32)


def test_depth_of_inline_data() -> None:
    """Data nested as deep as the highest rank is accepted."""
    data: Any = 7
    for _ in range(16):
        data = [data]
    assert inline("INT8", data, [1] * 16).tolist() == data


def test_request_larger_than_the_limit() -> None:
    """The sum of all announced tensors is bounded, each one and together, whether or not the bytes ever come."""
    tensor = {"shape": [1 << 17], "datatype": "FP32", "parameters": {"binary_data_size": 1 << 19}}
    assert decode({"inputs": [{"name": "a", **tensor}, {"name": "b", **tensor}]}).total_bytes == 1 << 20
    with pytest.raises(TooLarge, match="1572864 bytes of tensors exceed the limit of 1048576 bytes"):
        decode({"inputs": [{"name": name, **tensor} for name in "abc"]})
    with pytest.raises(TooLarge, match=r'inputs\[0\] "image"'):
        decode(request(shape=[2**31 - 1]))


def test_shared_memory_is_off() -> None:
    """Tensors in shared memory, in or out, are refused as switched off."""
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 20}
    for body in (request(parameters=region), request(outputs=[{"name": "y", "parameters": region}])):
        with pytest.raises(Forbidden, match="shared memory is switched off"):
            decode(body)


def test_sequences_are_not_supported() -> None:
    """A sequence id says so clearly; the values that mean "no sequence" pass and are no custom parameters."""
    for identifier in (1, "abc", -1, 1.5, None, True):
        with pytest.raises(NotSupported, match="stateful sequences are not supported"):
            decode(request(parameters_={"sequence_id": identifier}))
    for identifier in (0, ""):
        parameters = {"sequence_id": identifier, "sequence_start": False, "sequence_end": False}
        assert decode(request(parameters_=parameters)).parameters == {}


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("INT8", [1, 128], r"data\[1\] is outside of INT8's range -128…127"),
        ("INT8", [1, -129], r"data\[1\] is outside of INT8's range"),
        ("UINT8", [-1, 0], r"data\[0\] is outside of UINT8's range 0…255"),
        ("UINT64", [0, 2**64], r"data\[1\] is outside of UINT64's range"),
        ("INT64", [0, 2**63], r"data\[1\] is outside of INT64's range"),
        ("INT64", [0, 10**300], r"data\[1\] is outside of INT64's range"),
        ("INT32", [1, 1.0], r"data\[1\] is a float, INT32 takes integers"),
        ("INT32", [1, True], r"data\[1\] is a boolean, INT32 takes integers"),
        ("INT32", [1, "1"], r"data\[1\] is a string, INT32 takes integers"),
        ("INT32", [1, None], r"data\[1\] is null, INT32 takes integers"),
        ("FP32", [1, None], r"data\[1\] is null, FP32 takes numbers"),
        ("FP32", [1, True], r"data\[1\] is a boolean, FP32 takes numbers"),
        ("FP32", [1, "1.0"], r"data\[1\] is a string other than"),
        ("FP32", [1, "nan"], r"data\[1\] is a string other than"),
        ("FP32", [1, 1e39], r"data\[1\] is outside of FP32's range"),
        ("FP16", [1, 65520], r"data\[1\] is outside of FP16's range"),
        ("FP64", [1, 10**400], r"malformed|too large"),
        ("BOOL", [True, 1], r"data\[1\] is an integer, BOOL takes true and false"),
        ("BYTES", ["a", 1], r"data\[1\] is an integer, BYTES takes strings"),
        ("BYTES", ["a", None], r"data\[1\] is null, BYTES takes strings"),
        ("BF16", [1.0, 2.0], "BF16 has no JSON form; send it as binary data"),
        ("FP32", [[1.0], 2.0], "mixes lists and values"),
        ("FP32", [1.0, [2.0]], r"data\[1\] is a list"),
        ("FP32", [1.0, {"a": 2.0}], r"data\[1\] is an object"),
        ("FP32", 1.0, "needs 2 values, got 1"),
        ("FP32", "NaN", "needs 2 values, got 1"),
        ("FP32", {"a": 1.0, "b": 2.0}, "data must be a list, got an object"),
        ("FP32", [[], []], "needs 2 values, got 0"),
        ("BYTES", ["a,b"], "needs 2 values, got 1"),
        ("BYTES", "a,b", "data must be a list, got a string"),
    ],
)
def test_refused_inline_data(datatype: str, data: Any, message: str) -> None:
    """Values that the datatype cannot hold are refused and pointed out, never wrapped, rounded or guessed."""
    with pytest.raises(BadRequest, match=r'^inputs\[0\] "t": .*' + message if "malformed" not in message else message):
        inline(datatype, data, [2])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e400", "01", "+1", ".5", "1.", "0x1", "'a'", "[1,]", "1 2"])
def test_malformed_inline_values(text: str) -> None:
    """JSON that is none (the bare word NaN among it) is refused."""
    body = f'{{"inputs":[{{"name":"t","shape":[1],"datatype":"FP64","data":[{text}]}}]}}'
    with pytest.raises(BadRequest):
        decode(body.encode())


@pytest.mark.parametrize(
    ("data", "shape", "fits"),
    [
        ([1, 2, 3, 4], [2, 2], True),
        ([[1, 2], [3, 4]], [2, 2], True),
        ([[[1, 2], [3, 4]]], [1, 2, 2], True),
        ([[1, 2], [3, 4]], [1, 2, 2], True),  # a dimension of 1 left out
        ([[1, 2, 3, 4]], [1, 2, 2], True),  # inner dimensions flat
        ([[1], [2], [3], [4]], [2, 2], False),
        ([[1, 2, 3], [4]], [2, 2], False),
        ([[1, 2], [3, 4]], [4, 1], False),
        ([[[1], [2]], [[3], [4]]], [2, 2, 1], True),
        ([[[1, 2]], [[3, 4]]], [2, 1, 2], True),
        ([[[1, 2]], [[3, 4]]], [1, 2, 2], True),
        ([[[1], [2], [3], [4]]], [2, 2, 1], False),
        ([[1, 2, 3, 4]], [2, 2], True),
    ],
)
def test_nesting(data: Any, shape: list[int], fits: bool) -> None:
    """Flat and nested row-major data become the same array; nesting that contradicts the shape is refused."""
    if fits:
        assert inline("INT32", data, shape).tolist() == np.array([1, 2, 3, 4]).reshape(shape).tolist()
    else:
        with pytest.raises(BadRequest, match=r"nested|ragged"):
            inline("INT32", data, shape)


def test_scalar_inline_data() -> None:
    """A tensor without dimensions takes a bare value or a list of one."""
    assert inline("FP32", 1.5, []).shape == inline("FP32", [1.5], []).shape == ()


def test_inline_limits_of_every_integer() -> None:
    """The extreme values of every integer type pass and keep their value."""
    for datatype, numpy_name in {"INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8", "UINT8": "u1", "UINT64": "u8"}.items():
        bounds = np.iinfo(numpy_name)
        array = inline(datatype, [int(bounds.min), int(bounds.max)], [2])
        assert (array.dtype, array.tolist()) == (np.dtype(numpy_name), [int(bounds.min), int(bounds.max)])


def test_case_34_non_finite_and_tiny_values_in() -> None:
    """Case 34, inwards: the three strings, -0.0 and the smallest denormal arrive as what they are."""
    array = inline("FP32", ["NaN", "Infinity", "-Infinity", -0.0, 1e-45, 3], [6])
    assert array.tobytes() == np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3], np.float32).tobytes()


def test_bytes_like_heads() -> None:
    """Heads come as bytes, bytearray or memoryview."""
    text = json.dumps(request()).encode()
    for form in (text, bytearray(text), memoryview(text)):
        assert decode_head(form).inputs[0].name == "image"


def test_fuzz_sample() -> None:
    """A fixed sample of the fuzz script: only our errors, and every usual ending is reached."""
    location = Path(__file__).with_name("fuzz_oip_json.py")
    spec = importlib.util.spec_from_file_location("fuzz_oip_json", location)
    assert spec is not None and spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    endings = fuzz.run(10_000, seed=3)
    assert endings.pop("accepted") > 500
    assert endings.pop("BadRequest") > 2000
    assert sum(endings.values()) > 0
