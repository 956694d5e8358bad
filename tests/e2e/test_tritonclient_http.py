"""Every method in scope of an unmodified `tritonclient.http`, blocking and asyncio, against a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings
from shoal.datatypes import DATATYPES
from shoal.models import digits_samples_path
from shoal.testing.gates import Gate
from shoal.testing.models import gated, python_model
from shoal.testing.server import ThreadedServer, local_settings, running_server

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "BYTES": np.array([[b"", b"a\x00b", "é".encode()], [b"x" * 300, b"\xff", b"end"]], dtype=object),
    "BF16": np.array([[1, -2.5, 3e38], [0, -0.0, 0.125]], np.float32).astype(ml_dtypes.bfloat16),
    "FP16": np.array([[1, -2.5, 65504], [6e-8, -0.0, 0.1]], np.float16),
    "FP32": np.array([[1, -2.5, 3e38], [1e-45, -0.0, 0.1]], np.float32),
    "FP64": np.array([[1, -2.5, 1e308], [5e-324, -0.0, 0.1]], np.float64),
}
for _name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"):
    _info = np.iinfo(DATATYPES[_name].numpy)
    ARRAYS[_name] = np.array([[_info.min, 0, _info.max], [1, 2, 3]], DATATYPES[_name].numpy)

MODELS = {
    "types": f"""
        DATATYPES = {sorted(ARRAYS)!r}

        class Model:
            inputs = {{"in_" + name: (name, (3,)) for name in DATATYPES}}
            outputs = {{"out_" + name: (name, (3,)) for name in DATATYPES}}
            def __call__(self, **arrays):
                return {{name.replace("in_", "out_"): array for name, array in arrays.items()}}
        """,
    "scores": """
        class Model:
            inputs = {"x": ("FP32", (3,))}
            outputs = {"scores": ("FP32", (3,)), "sum": ("FP32", (1,))}
            labels = {"scores": ("cat", "dog", "eel")}
            echo_parameters = True
            def __call__(self, x):
                return {"scores": x, "sum": x.sum(axis=1, keepdims=True)}
        """,
}


class Caller:
    """Calls a method by name on the blocking client, or on the asyncio one and waits: so each test is written once."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.module: Any = triton if kind == "sync" else triton_aio
        self._runner = asyncio.Runner() if kind == "aio" else None
        if self._runner is None:
            self._client = triton.InferenceServerClient(url, concurrency=4)
        else:
            self._client = self._runner.run(self._connect(url))

    @staticmethod
    async def _connect(url: str) -> Any:
        return triton_aio.InferenceServerClient(url)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if self._runner is None or name in ("generate_request_body", "parse_response_body"):
            return method
        return lambda *args, **options: self._runner.run(method(*args, **options))

    def end(self) -> None:
        """Close the client and its loop."""
        self.close()
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """The embedded model and two of Python on one server."""
    directory = tmp_path_factory.mktemp("models")
    models: dict[str, ModelSettings | str] = {name: python_model(directory, source) for name, source in MODELS.items()}
    models["digits"] = ModelSettings(path="digits")
    models["leveled"] = ModelSettings(
        path=python_model(directory, MODELS["scores"]), version="7", queue=QueueSettings(priority_levels=3, default_priority=2)
    )
    with running_server(local_settings(models)) as running:
        yield running
        running.settled()


@pytest.fixture(params=["sync", "aio"])
def client(request: pytest.FixtureRequest, server: ThreadedServer) -> Iterator[Caller]:
    """Each test once with the blocking client, once with the other."""
    caller = Caller(request.param, server.url)
    yield caller
    caller.end()


def tensor(name: str, datatype: str, array: np.ndarray[Any, Any], *, binary: bool = True) -> triton.InferInput:
    """An input with its data."""
    value = triton.InferInput(name, list(array.shape), datatype)
    value.set_data_from_numpy(array, binary_data=binary)
    return value


def scores(*values: float, binary: bool = True) -> list[triton.InferInput]:
    """The input of the model `scores`."""
    return [tensor("x", "FP32", np.array([values], np.float32), binary=binary)]


def test_health(client: Caller) -> None:
    """Live, ready, and ready by model and version."""
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("digits") and client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "9") and not client.is_model_ready("nobody")


def test_metadata(client: Caller) -> None:
    """Server and model metadata: names, versions, shapes with the batch in front."""
    told = client.get_server_metadata()
    assert told["name"] == "shoal" and told["version"] and "binary_tensor_data" in told["extensions"]
    told = client.get_model_metadata("digits")
    assert (told["name"], told["versions"], told["platform"]) == ("digits", ["1"], "onnxruntime_onnx")
    assert told["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert told["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    assert client.get_model_metadata("leveled", "7")["versions"] == ["7"]
    with pytest.raises(InferenceServerException, match="nobody"):
        client.get_model_metadata("nobody")


def test_config(client: Caller) -> None:
    """The configuration in the words that clients parse: limits, dims without the batch, priorities."""
    told = client.get_model_config("digits")
    assert told["max_batch_size"] == 64
    assert told["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": [1, 8, 8]}]
    assert told["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    batching = client.get_model_config("leveled", "7")["dynamic_batching"]
    assert (batching["priority_levels"], batching["default_priority_level"]) == (3, 2)


def test_repository_index(client: Caller) -> None:
    """All models with their states."""
    index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert set(index) == {"digits", "types", "scores", "leveled"}
    assert index["leveled"]["version"] == "7" and all(entry["state"] == "READY" for entry in index.values())


@pytest.mark.parametrize("binary", [True, False])
def test_embedded_model_classifies_held_out_images(client: Caller, binary: bool) -> None:
    """Images that the training never saw, together and alone, are recognised; the rows do not depend on their company."""
    samples = json.loads(Path(digits_samples_path()).read_text())[:20]
    images = np.array([sample["pixels"] for sample in samples], np.float32).reshape(-1, 1, 8, 8)
    output = triton.InferRequestedOutput("logits", binary_data=binary)
    together = client.infer("digits", [tensor("image", "FP32", images, binary=binary)], outputs=[output]).as_numpy("logits")
    assert together.shape == (len(samples), 10)
    assert np.mean(together.argmax(axis=1) == [sample["label"] for sample in samples]) >= 0.9
    alone = client.infer("digits", [tensor("image", "FP32", images[7:8], binary=binary)], outputs=[output]).as_numpy("logits")
    np.testing.assert_allclose(alone[0], together[7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_every_datatype(client: Caller, binary_in: bool, binary_out: bool) -> None:
    """Fourteen inputs and outputs in one request, each of its datatype, with the ends of its range, come back as they were."""
    inputs, outputs = [], []
    for name, array in ARRAYS.items():
        value = array
        if name == "BYTES" and not binary_in:
            value = np.array([["", "a b", "é"], ["x" * 300, "ÿ", "end"]], dtype=object)
        inputs.append(tensor("in_" + name, name, value, binary=binary_in or name == "BF16"))
        outputs.append(triton.InferRequestedOutput("out_" + name, binary_data=binary_out or name == "BF16"))
    if not binary_out and binary_in:  # not UTF-8: only binary data can carry it
        outputs[list(ARRAYS).index("BYTES")] = triton.InferRequestedOutput("out_BYTES", binary_data=True)
    result = client.infer("types", inputs, outputs=outputs)
    for name, array in ARRAYS.items():
        got = result.as_numpy("out_" + name)
        assert result.get_output("out_" + name)["datatype"] == name
        if name == "BYTES":
            text = [item if isinstance(item, str) else item.decode("latin-1") for item in got.reshape(-1)]
            if binary_in:
                assert got.reshape(-1).tolist() == array.reshape(-1).tolist()
            else:
                assert text[1] == "a b" and text[5] == "end"
        else:
            assert got.dtype == array.dtype and got.tobytes() == array.tobytes(), name


def test_all_outputs_when_none_are_named(client: Caller) -> None:
    """Without requested outputs all come, in binary."""
    result = client.infer("scores", scores(1, 2, 3))
    assert result.as_numpy("scores").tolist() == [[1, 2, 3]]
    assert result.as_numpy("sum").tolist() == [[6]]
    assert "binary_data_size" in result.get_output("sum")["parameters"]


def test_requested_outputs(client: Caller) -> None:
    """Only what was asked for, in the order of asking, each in its own form; unknown ones are an error that names them."""
    wanted = [triton.InferRequestedOutput("sum", binary_data=False), triton.InferRequestedOutput("scores", binary_data=True)]
    response = client.infer("scores", scores(1, 2, 3), outputs=wanted).get_response()
    assert [output["name"] for output in response["outputs"]] == ["sum", "scores"]
    assert response["outputs"][0]["data"] == [6]
    result = client.infer("scores", scores(1, 2, 3), outputs=wanted[:1])
    assert result.as_numpy("scores") is None and result.as_numpy("sum").tolist() == [[6]]
    with pytest.raises(InferenceServerException, match='no output "nothing"'):
        client.infer("scores", scores(1, 2, 3), outputs=[triton.InferRequestedOutput("nothing")])


@pytest.mark.parametrize("binary", [True, False])
def test_classification(client: Caller, binary: bool) -> None:
    """The k best as value:index:label, best first."""
    wanted = [triton.InferRequestedOutput("scores", binary_data=binary, class_count=2)]
    got = client.infer("scores", scores(0.5, 0.25, 4), outputs=wanted).as_numpy("scores")
    assert [item if isinstance(item, str) else item.decode() for item in got[0]] == ["4.0:2:eel", "0.5:0:cat"]


def test_identifiers_and_parameters(client: Caller) -> None:
    """The request's id comes back; custom parameters of every type do where the model asks for it."""
    given = {"text": "123", "number": 7, "share": 0.5, "flag": True}
    response = client.infer("scores", scores(1, 2, 3), request_id="r-17", parameters=given).get_response()
    assert response["id"] == "r-17"
    assert response["parameters"] == given
    assert (response["model_name"], response["model_version"]) == ("scores", "1")
    assert client.infer("leveled", scores(1, 2, 3), "7").get_response()["model_version"] == "7"


def test_priority_and_timeout(client: Caller) -> None:
    """Levels in range are accepted, those above it refused by name; a timeout that is not reached changes nothing."""
    for priority in (0, 1, 3):
        assert client.infer("leveled", scores(1, 2, 3), priority=priority, timeout=10_000_000).as_numpy("sum").tolist() == [[6]]
    with pytest.raises(InferenceServerException, match="priority") as caught:
        client.infer("leveled", scores(1, 2, 3), priority=4)
    assert caught.value.status() == "400"


def test_headers_and_query(client: Caller) -> None:
    """Headers and query parameters of the caller do no harm."""
    result = client.infer("scores", scores(1, 2, 3), headers={"x-request-id": "abc", "x-priority": "1"}, query_params={"a": 1})
    assert result.as_numpy("sum").tolist() == [[6]]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression(client: Caller, coding: str, binary: bool) -> None:
    """Compressed requests and responses, with and without a binary part."""
    result = client.infer(
        "scores",
        scores(1, 2, 3, binary=binary),
        outputs=[triton.InferRequestedOutput("sum", binary_data=binary)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert result.as_numpy("sum").tolist() == [[6]]


def test_static_methods(client: Caller, server: ThreadedServer) -> None:
    """A body made by the client's own function, sent by other means, is answered with what its own function can read."""
    import http.client

    body, length = client.generate_request_body(scores(1, 2, 3), outputs=[triton.InferRequestedOutput("sum")])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v2/models/scores/infer", body, {"Inference-Header-Content-Length": str(length)})
    response = connection.getresponse()
    header_length = int(response.headers["Inference-Header-Content-Length"])
    result = client.parse_response_body(response.read(), header_length=header_length)
    connection.close()
    assert result.as_numpy("sum").tolist() == [[6]]


def test_statistics(client: Caller, server: ThreadedServer) -> None:
    """Counts of rows and executions, durations by stage, and figures by batch size agree with each other and with what was sent."""

    def figures() -> dict[str, Any]:
        (entry,) = client.get_inference_statistics("scores")["model_stats"]
        return entry

    server.settled()
    before = figures()
    three = [tensor("x", "FP32", np.ones((3, 3), np.float32))]
    for inputs in [scores(1, 2, 3)] * 4 + [three] * 2:
        client.infer("scores", inputs)
    server.settled()
    after = figures()
    assert (after["name"], after["version"]) == ("scores", "1")
    assert after["inference_count"] - before["inference_count"] == 10
    assert after["execution_count"] - before["execution_count"] == 6
    assert after["last_inference"] > 1_600_000_000_000
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 6
    stats = after["inference_stats"]
    stages = ["queue", "compute_input", "compute_infer", "compute_output"]
    assert all(stats[stage]["count"] == stats["success"]["count"] and stats[stage]["ns"] > 0 for stage in stages)
    assert sum(stats[stage]["ns"] for stage in stages) <= stats["success"]["ns"]
    sizes = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in after["batch_stats"]}
    assert sum(size * count for size, count in sizes.items()) == after["inference_count"]
    assert sum(sizes.values()) == after["execution_count"]
    everything = client.get_inference_statistics()["model_stats"]
    assert {entry["name"] for entry in everything} == {"digits", "types", "scores", "leveled"}


def test_failures_are_counted(client: Caller, server: ThreadedServer) -> None:
    """A refused request is no inference."""
    (before,) = client.get_inference_statistics("scores")["model_stats"]
    with pytest.raises(InferenceServerException, match="shape") as caught:
        client.infer("scores", [tensor("x", "FP32", np.ones((1, 4), np.float32))])
    assert caught.value.status() == "400"
    (after,) = client.get_inference_statistics("scores")["model_stats"]
    assert after["inference_count"] == before["inference_count"]


def test_trace_and_log_settings(client: Caller) -> None:
    """Settings can be read and, as far as they have an effect, changed; others are refused by name."""
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings("digits")["trace_level"] == ["OFF"]
    assert client.update_trace_settings(settings={"trace_level": ["OFF"]})["trace_level"] == ["OFF"]
    assert client.update_trace_settings("digits", {"trace_level": "OFF"})["trace_level"] == ["OFF"]
    with pytest.raises(InferenceServerException, match="trac") as caught:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    assert caught.value.status() == "501"
    before = client.get_log_settings()
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.get_log_settings()["log_verbose_level"] == 1
    assert client.update_log_settings(before) == before
    with pytest.raises(InferenceServerException, match="log_colour"):
        client.update_log_settings({"log_colour": True})
    with pytest.raises(InferenceServerException, match="log_verbose_level"):
        client.update_log_settings({"log_verbose_level": -1})


@pytest.mark.parametrize(
    ("method", "arguments", "status"),
    [
        ("load_model", ("digits",), "403"),
        ("unload_model", ("digits",), "403"),
        ("get_system_shared_memory_status", (), "501"),
        ("get_system_shared_memory_status", ("region",), "501"),
        ("register_system_shared_memory", ("region", "/key", 64), "501"),
        ("unregister_system_shared_memory", ("region",), "501"),
        ("unregister_system_shared_memory", (), "501"),
        ("get_cuda_shared_memory_status", (), "501"),
        ("register_cuda_shared_memory", ("region", b"handle", 0, 64), "501"),
        ("unregister_cuda_shared_memory", (), "501"),
    ],
)
def test_what_is_not_offered_says_so(client: Caller, method: str, arguments: tuple[Any, ...], status: str) -> None:
    """Control of the repository and shared memory: a clear error, and the server goes on."""
    with pytest.raises(InferenceServerException, match=r"switched off|not available") as caught:
        getattr(client, method)(*arguments)
    assert caught.value.status() == status
    assert client.is_model_ready("digits")


def test_async_infer(server: ThreadedServer) -> None:
    """The blocking client's own concurrency: several requests in flight, each with its own answer."""
    with triton.InferenceServerClient(server.url, concurrency=8) as client:
        pending = [client.async_infer("scores", scores(number, 0, 0), request_id=str(number)) for number in range(50)]
        for number, request in enumerate(pending):
            result = request.get_result()
            assert result.get_response()["id"] == str(number)
            assert result.as_numpy("sum").tolist() == [[number]]


def test_many_at_once_with_asyncio(server: ThreadedServer) -> None:
    """Two hundred requests in flight in one program, each with its own answer."""

    async def ask() -> list[float]:
        async with triton_aio.InferenceServerClient(server.url) as client:
            results = await asyncio.gather(*(client.infer("scores", scores(number, 1, 0)) for number in range(200)))
            return [float(result.as_numpy("sum")[0, 0]) for result in results]

    assert asyncio.run(ask()) == [number + 1.0 for number in range(200)]


def held_server(directory: Path) -> tuple[Any, Gate]:
    """Settings of a server whose model stands at a gate."""
    path, gate = gated(directory)
    return local_settings({"held": ModelSettings(path=path, probe=False, batching=BatchingSettings(max_batch_size=16))}), gate


def test_ten_separate_clients_share_executions(tmp_path: Path) -> None:
    """Ten clients in ten threads, none of whom knows of the others: two tensor operations, and each gets its own rows."""
    settings, gate = held_server(tmp_path)
    got: dict[int, list[float]] = {}

    def ask(number: int, url: str) -> None:
        with triton.InferenceServerClient(url, network_timeout=30, connection_timeout=30) as client:
            array = np.full((1, 4), number, np.float32)
            got[number] = client.infer("held", [tensor("x", "FP32", array)]).as_numpy("y")[0].tolist()

    with running_server(settings) as server:
        threads = [threading.Thread(target=ask, args=(number, server.url)) for number in range(10)]
        threads[0].start()
        gate.wait_entered()
        for thread in threads[1:]:
            thread.start()
        server.wait_waiting("held", 9)
        gate.open()
        for thread in threads:
            thread.join(30)
        assert got == {number: [2.0 * number] * 4 for number in range(10)}
        with triton.InferenceServerClient(server.url) as client:
            (stats,) = client.get_inference_statistics("held")["model_stats"]
        assert (stats["inference_count"], stats["execution_count"]) == (10, 2)
        assert {entry["batch_size"]: entry["compute_infer"]["count"] for entry in stats["batch_stats"]} == {1: 1, 9: 1}
    assert len(gate.notes) == 2 and sorted(gate.notes[1]) == list(range(1, 10))


def test_a_client_sees_the_deadline_and_the_full_queue(tmp_path: Path) -> None:
    """The two endings that clients must tell apart: 504 for a deadline, 429 with a hint in the message for a full queue."""
    path, gate = gated(tmp_path)
    model = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_rows=1))
    with (
        running_server(local_settings({"held": model})) as server,
        triton.InferenceServerClient(server.url, concurrency=3) as client,
    ):
        array = np.ones((1, 4), np.float32)
        first = client.async_infer("held", [tensor("x", "FP32", array)])
        gate.wait_entered()
        with pytest.raises(InferenceServerException, match="expired") as caught:
            client.infer("held", [tensor("x", "FP32", array)], timeout=20_000)
        assert caught.value.status() == "504"
        second = client.async_infer("held", [tensor("x", "FP32", array)])
        server.wait_waiting("held", 1)
        with pytest.raises(InferenceServerException, match="is full") as caught:
            client.infer("held", [tensor("x", "FP32", array)])
        assert caught.value.status() == "429"
        gate.open()
        assert [request.get_result().as_numpy("y")[0, 0] for request in (first, second)] == [2.0, 2.0]
