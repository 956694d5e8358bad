"""Anything on the wire gets a clear answer that names the field, and leaves the server as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.settings import ModelSettings, QueueSettings
from shoal.testing.models import python_model
from shoal.testing.raw_http import RawClient, get, infer, infer_parts, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
K = {"name": "k", "shape": [1, 1], "datatype": "INT8", "data": [3]}
GOOD = {"inputs": [X, K]}
GOOD_BINARY = infer("m", {"x": np.array([[1, 2]], np.float32), "k": np.array([[3]], np.int8)})


def with_x(**changes: Any) -> dict[str, Any]:
    """The good request with its input x changed; a value of None takes a key away."""
    changed = {key: value for key, value in {**X, **changes}.items() if value is not None}
    return {"inputs": [changed, K]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """A server with one model `m` of two inputs, x FP32 [2] and k INT8 [1], that answers y = x + k."""
    path = python_model(
        tmp_path_factory.mktemp("models"),
        """
        class Model:
            inputs = {"x": ("FP32", (2,)), "k": ("INT8", (1,))}
            outputs = {"y": ("FP32", (2,))}
            def __call__(self, x, k):
                return x + k
        """,
    )
    with running_server(local_settings({"m": path}, max_body_bytes=1 << 20)) as running:
        yield running
        running.settled()


@pytest.fixture
def client(server: ThreadedServer) -> Iterator[RawClient]:
    """A connection of the test's own."""
    with RawClient(server.port) as connected:
        yield connected


def body(value: Any) -> bytes:
    """JSON, or the bytes themselves."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@pytest.mark.parametrize(
    ("request_body", "names"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'{"inputs": [' + body(X)[:-5], "JSON"),
        (b'{"inputs": "\xff\xfe"}', "UTF-8"),
        (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"inputs": [], "inputs": []}', "inputs"),
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [K]}, '"x" is missing'),
        ({"inputs": [X]}, '"k" is missing'),
        ({"inputs": [X, K, X]}, "twice"),
        ({"inputs": [X, K, {**K, "name": "z"}]}, '"z" is unknown'),
        ({"inputs": [{**K, "name": f"k{i}"} for i in range(65)]}, "64"),
        (with_x(name=""), "name"),
        (with_x(name="n" * 2000), "1024 bytes"),
        (with_x(shape=None), "shape"),
        (with_x(datatype=None), "datatype"),
        (with_x(data=None), "binary_data_size"),
        (with_x(datatype="FP31"), "FP31"),
        (with_x(datatype="INT32"), "FP32"),
        (with_x(datatype=7), "datatype"),
        (with_x(shape=[1, -1]), "[1,-1]"),
        (with_x(shape=[1, 0], data=[]), "[1,0]"),
        (with_x(shape=[0, 2], data=[]), "[0,2]"),
        (with_x(shape=[1, 2.0]), "shape"),
        (with_x(shape=["1", 2]), "shape"),
        (with_x(shape=[1, True]), "shape"),
        (with_x(shape=2), "shape"),
        (with_x(shape=[2], data=[1, 2]), "dimensions"),
        (with_x(shape=[1, 1, 2]), "dimensions"),
        (with_x(shape=[1, 3], data=[1, 2, 3]), "[1,3]"),
        (with_x(shape=[1] * 17), "17 dimensions"),
        (with_x(shape=[2**62, 2**62]), "elements"),
        (with_x(shape=[2**70, 2]), "shape"),
        (with_x(shape=[65536, 65536, 65536, 65536]), "elements"),
        (with_x(data=[1]), "needs 2 values, got 1"),
        (with_x(data=[1, 2, 3]), "needs 2 values, got 3"),
        (with_x(data=[[1], []]), "ragged"),
        (with_x(data=[[1], 2]), "mixes"),
        ({"inputs": [{**X, "shape": [3, 2], "data": [[1, 2, 3], [4, 5, 6]]}, {**K, "shape": [3, 1], "data": [1, 2, 3]}]}, "nested"),
        (with_x(data=[1, "2"]), "data[1]"),
        (with_x(data=[1, None]), "data[1]"),
        (with_x(data=[1, True]), "data[1]"),
        (with_x(data=[1, {"a": 1}]), "data[1]"),
        (with_x(data=7), "values"),
        (with_x(data=[1, 1e39]), "data[1]"),
        (with_x(parameters={"binary_data_size": 8}), "both"),
        (with_x(data=None, parameters={"binary_data_size": 8}), "8 bytes are announced"),
        (with_x(data=None, parameters={"binary_data_size": 7}), "needs 8 bytes"),
        (with_x(data=None, parameters={"binary_data_size": -8}), "binary_data_size"),
        (with_x(data=None, parameters={"binary_data_size": 2**64}), "binary_data_size"),
        (with_x(data=None, parameters={"binary_data_size": "8"}), "binary_data_size"),
        ({"inputs": [X, {**K, "data": [128]}]}, "-128"),
        ({"inputs": [X, {**K, "data": [1.5]}]}, "integers"),
        ({"inputs": [X, {**K, "data": [2**70]}]}, "-128"),
        ({"inputs": [X, {**K, "shape": [2, 1], "data": [1, 2]}]}, "2 rows"),
        ({**GOOD, "outputs": [{"name": "z"}]}, 'no output "z"'),
        ({**GOOD, "outputs": [{"name": "y"}, {"name": "y"}]}, "twice"),
        ({**GOOD, "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "binary_data"),
        ({**GOOD, "outputs": [{"name": "y", "parameters": {"classification": -1}}]}, "classification"),
        ({**GOOD, "outputs": [{}]}, "name"),
        ({**GOOD, "outputs": 5}, "outputs"),
        ({**GOOD, "id": 5}, "id"),
        ({**GOOD, "id": "i" * 2000}, "id"),
        ({**GOOD, "parameters": []}, "parameters"),
        ({**GOOD, "parameters": {"priority": -1}}, "priority"),
        ({**GOOD, "parameters": {"priority": 2}}, "priority"),
        ({**GOOD, "parameters": {"timeout": -1}}, "timeout"),
        ({**GOOD, "parameters": {"timeout": 1.5}}, "timeout"),
        ({**GOOD, "parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
        ({**GOOD, "parameters": {"mine": [1]}}, "mine"),
    ],
)
def test_bad_request_names_the_field(client: RawClient, request_body: Any, names: str) -> None:
    """400, a sentence that names what is wrong, and the connection serves a good request right after."""
    answer = client.ask(post("/v2/models/m/infer", body(request_body)))
    assert answer.status == 400, answer
    assert answer.json()["reason"] == "bad_request"
    assert names in answer.json()["error"], answer.json()["error"]
    assert client.ask(GOOD_BINARY).tensors()["y"].tolist() == [[4, 5]]


@pytest.mark.parametrize(
    ("request_body", "status", "reason"),
    [
        ({**GOOD, "parameters": {"sequence_id": 5}}, 501, "not_supported"),
        (with_x(data=None, parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8}), 403, "forbidden"),
        ({**GOOD, "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, 403, "forbidden"),
        (with_x(shape=[40_000_000, 2]), 413, "too_large"),
    ],
)
def test_other_refusals(client: RawClient, request_body: Any, status: int, reason: str) -> None:
    """What is well-formed but not offered here has a status of its own."""
    answer = client.ask(post("/v2/models/m/infer", body(request_body)))
    assert (answer.status, answer.json()["reason"]) == (status, reason)
    assert client.ask(GOOD_BINARY).status == 200


def test_binary_sizes_that_contradict_each_other(client: RawClient) -> None:
    """The length of the JSON, the announced sizes and the bytes that came must agree."""
    front, tail = infer_parts({"x": np.array([[1, 2]], np.float32), "k": np.array([[3]], np.int8)})
    for header, data, says in [
        (len(front) + len(tail) + 1, front + tail, "inference-header-content-length"),
        (len(front) - 1, front + tail, "JSON"),
        (len(front) + 1, front + tail, "JSON"),
        (len(front), front + tail[:-1], "announced"),
        (len(front), front + tail + b"!", "too many"),
        (len(front), front, "announced"),
        (0, front + tail, "one input"),
    ]:
        answer = client.ask(post("/v2/models/m/infer", data, Inference_Header_Content_Length=header))
        assert answer.status == 400
        assert says in answer.json()["error"]
        assert client.ask(GOOD_BINARY).tensors()["y"].tolist() == [[4, 5]]


def test_chunk_flood(client: RawClient) -> None:
    """A hundred thousand chunks of one byte are a bad request like any other."""
    answer = client.ask(post("/v2/models/m/infer", chunks=[b" "] * 100_000))
    assert answer.status == 400
    assert client.ask(GOOD_BINARY).status == 200


def test_settings_that_would_overflow(tmp_path: Path) -> None:
    """The longest timeout that the protocol can carry is no deadline at all, and no error."""
    path = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (2,))}
            outputs = {"y": ("FP32", (2,))}
            def __call__(self, x):
                return x
        """,
    )
    model = ModelSettings(path=path, queue=QueueSettings(default_timeout_ms=60_000.0))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client:
        for timeout_us in (2**63, 2**64 - 1, 1, 0):
            answer = client.ask(infer("m", {"x": np.array([[1, 2]], np.float32)}, {"parameters": {"timeout": timeout_us}}))
            assert answer.status in ((200,) if timeout_us != 1 else (200, 504))
        server.settled()


def turned(dice: random.Random, good: bytes) -> bytes:
    """Something wrong with these bytes, somewhere."""
    start = dice.randrange(len(good))
    kind = dice.randrange(5)
    if kind == 0:  # bytes turned
        data = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        return bytes(data)
    if kind == 1:  # cut short
        return good[:start]
    if kind == 2:  # a piece missing
        return good[:start] + good[start + dice.randint(1, 40) :]
    if kind == 3:  # a piece twice
        return good[: start + dice.randint(1, 40)] + good[start:]
    return dice.randbytes(dice.randint(1, 300))


def bad_body(dice: random.Random) -> bytes:
    """A request that can be framed; what is wrong is inside."""
    front, tail = infer_parts({"x": np.array([[1, 2]], np.float32), "k": np.array([[3]], np.int8)})
    path = dice.choice(["/v2/models/m/infer"] * 8 + ["/v2/models/q/infer", "/v2/repository/index", "/v2/logging", "/v2/x"])
    if dice.random() < 0.5:
        return post(path, turned(dice, body(GOOD)))
    if dice.random() < 0.2:
        # Of a request that is refused before its body is read, only a body of known length can be passed over.
        return post("/v2/models/m/infer", chunks=[turned(dice, body(GOOD)) or b" ", b" "])
    return post(path, turned(dice, front + tail), Inference_Header_Content_Length=dice.choice([len(front), dice.randrange(200)]))


def test_ten_thousand_bad_requests_and_still_alive(server: ThreadedServer) -> None:
    """Ten thousand requests with something wrong in the body or in the framing; each gets its answer, and then all is as before.

    Each connection sends bodies that are wrong, which it survives, and then bytes that cannot be framed, which end it.
    """
    dice = random.Random(20_261)
    good = [
        GOOD_BINARY,
        post("/v2/models/m/infer", body(GOOD)),
        post("/v2/models/m/infer", chunks=[body(GOOD)]),
        get("/v2/models/m"),
    ]
    refused = framing = sent = 0
    while sent < 10_000:
        with RawClient(server.port) as client:
            count = dice.randrange(10)
            client.send(b"".join(bad_body(dice) for _ in range(count)))
            answers = [client.response() for _ in range(count)]
            assert all(answer.status in (200, 400, 404, 413) for answer in answers)
            assert all("error" in answer.json() for answer in answers if answer.status != 200)
            refused += sum(answer.status != 200 for answer in answers)
            client.send_what_is_taken(turned(dice, dice.choice(good)))
            sent += count + 1
            if dice.random() < 0.3:
                client.vanish()
                continue
            client.half_close()
            framing += client.rest().startswith(b"HTTP/1.1 4")
    assert refused > 7000 and framing > 300
    http = server.server.http
    server.wait_until(lambda: not http.connections)
    server.settled()
    with RawClient(server.port) as client:
        for request_bytes in good:
            assert client.ask(request_bytes).status == 200
        assert client.ask(GOOD_BINARY).tensors()["y"].tolist() == [[4, 5]]
    assert server.call(lambda: len(http.heads)) <= 256
