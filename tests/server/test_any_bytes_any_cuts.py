"""Random requests over several connections, cut at random bytes, against a plain reference: everybody gets their own answer.

The model is a rule on tagged rows, so that a row that reached another caller, a byte from an older request, or an answer of another
form is seen at once. Requests are of every kind that takes a way of its own through the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.testing.models import python_model
from shoal.testing.raw_http import RawClient, Response, get, infer, infer_parts, json_infer, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

_COLUMNS = 8000  # 32 000 bytes a row, so that three rows are a large body
_KINDS = (
    "same",
    "headed",
    "id",
    "json",
    "chunked",
    "large",
    "two",
    "text",
    "fixed",
    "live",
    "head",
    "missing",
    "broken",
    "bad",
    "blank",
)


@dataclass
class Case:
    """A request, and what is to come of it."""

    kind: str
    tag: int
    rows: int
    data: bytes


def _array(tag: int, rows: int, columns: int = 2) -> np.ndarray:
    return (np.arange(rows * columns, dtype=np.float32) + 1000 * tag).reshape(rows, columns)


def _case(kind: str, tag: int, rows: int) -> Case:
    x = _array(tag, rows)
    if kind == "same":
        data = infer("m", {"x": x})
    elif kind == "headed":
        data = infer("m", {"x": x}, x_request_timeout_ms=60_000 + tag % 3, x_request_id=f"r{tag}")
    elif kind == "id":
        front, tail = infer_parts({"x": x})
        front = b'{"id":"i%d",' % tag + front[1:]
        data = post("/v2/models/m/infer", front + tail, Inference_Header_Content_Length=len(front))
    elif kind == "json":
        data = json_infer("m", {"x": ("FP32", x.shape, x.tolist())}, {"id": f"i{tag}"})
    elif kind == "chunked":
        front, tail = infer_parts({"x": x})
        body = front + tail
        data = post("/v2/models/m/infer", chunks=[body[:7], body[7:-3], body[-3:]], Inference_Header_Content_Length=len(front))
    elif kind == "large":
        data = infer("wide", {"x": _array(tag, rows, _COLUMNS)})
    elif kind == "two":
        data = infer("two", {"a": x, "b": -x})
    elif kind == "text":
        data = json_infer("text", {"t": ("BYTES", (rows, 1), [f"t{tag}-{row}" for row in range(rows)])})
    elif kind == "fixed":
        data = infer("one", {"x": _array(tag, 1)})
    elif kind == "live":
        data = get("/v2/health/live")
    elif kind == "head":
        data = get("/v2/models/m", method="HEAD")
    elif kind == "missing":
        data = infer("none", {"x": x})
    elif kind == "broken":
        data = post("/v2/models/m/infer", b"{no json %d" % tag)
    elif kind == "bad":
        data = infer("m", {"x": np.full((rows, 2), -1, np.float32)})
    else:
        data = b"\r\n\r\n" + infer("m", {"x": x})
    return Case(kind, tag, rows, data)


def _check(case: Case, answer: Response) -> None:
    kind, tag, rows = case.kind, case.tag, case.rows
    statuses = {"missing": 404, "broken": 400, "bad": 500}
    assert answer.status == statuses.get(kind, 200), (kind, answer)
    assert "connection" not in answer.headers
    x = _array(tag, rows)
    if kind in ("same", "headed", "id", "json", "chunked", "blank"):
        assert np.array_equal(answer.tensors()["y"], 2 * x)
        assert answer.json().get("id") == (f"i{tag}" if kind in ("id", "json") else None)
        assert (answer.headers["x-request-id"] == f"r{tag}") is (kind == "headed")
    elif kind == "large":
        assert np.array_equal(answer.tensors()["y"], _array(tag, rows, _COLUMNS))
    elif kind == "two":
        got = answer.tensors()
        assert np.array_equal(got["sum"], np.zeros((rows, 2)))
        assert np.array_equal(got["long"], np.repeat(2 * x[:, :1], 3, axis=1))
    elif kind == "text":
        assert answer.json()["outputs"][0]["data"] == [f"t{tag}-{row}!" for row in range(rows)]
    elif kind == "fixed":
        assert np.array_equal(answer.tensors()["y"], 3 * _array(tag, 1))


_MODELS: dict[str, str] = {
    "m": """
    class Model:
        inputs = {"x": ("FP32", (2,))}
        outputs = {"y": ("FP32", (2,))}
        def __call__(self, x):
            if (x < 0).any():
                raise ValueError("negative")
            x *= 2
            return x
    """,
    "wide": """
    class Model:
        inputs = {"x": ("FP32", (-1,))}
        outputs = {"y": ("FP32", (-1,))}
        def __call__(self, x):
            return x[:]
    """,
    "two": """
    class Model:
        inputs = {"a": ("FP32", (2,)), "b": ("FP32", (2,))}
        outputs = {"sum": ("FP32", (2,)), "long": ("FP32", (-1,))}
        kept = np.empty((64, 3), np.float32)
        def __call__(self, a, b):
            self.kept[: len(a)] = (a - b)[:, :1]
            return a + b, self.kept[: len(a)]
    """,
    "text": """
    class Model:
        inputs = {"t": ("BYTES", (1,))}
        outputs = {"u": ("BYTES", (1,))}
        def __call__(self, t):
            return np.array([[item + b"!"] for item in t[:, 0]], dtype=object)
    """,
    "one": """
    class Model:
        inputs = {"x": ("FP32", (2,))}
        outputs = {"y": ("FP32", (2,))}
        def __call__(self, x):
            return {"y": 3 * x}
    """,
}


@pytest.fixture(scope="module", params=["thread", "inline"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """All models, with batches of four rows, so that requests are cut too, and two instances where there are threads."""
    directory = tmp_path_factory.mktemp("models")
    threads = request.param == "thread"
    models: dict[str, Any] = {
        name: ModelSettings(
            path=python_model(directory, source),
            probe=False,
            instances=2 if threads and name != "two" else 1,
            execution=request.param,
            batching=BatchingSettings(max_batch_size=1 if name == "one" else 4),
        )
        for name, source in _MODELS.items()
    }
    with running_server(local_settings(models, max_pipelined_requests=5)) as running:
        yield running


_requests = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(1, 6)), min_size=1, max_size=10)


@given(
    connections=st.lists(_requests, min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.booleans()), max_size=25),
    first_tag=st.integers(1, 5000),
)
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everybody_gets_the_own_answer_in_order(
    server: ThreadedServer, connections: list[list[tuple[str, int]]], cuts: list[tuple[int, float, bool]], first_tag: int
) -> None:
    """In whatever pieces it is sent: each connection gets the answers of the reference, in its order, and nothing is left."""
    tag = first_tag
    plans: list[list[Case]] = []
    for requests in connections:
        plan = []
        for kind, rows in requests:
            plan.append(_case(kind, tag % 5000, rows))
            tag += 1
        plans.append(plan)
    left = [b"".join(case.data for case in plan) for plan in plans]
    clients = [RawClient(server.port) for _ in plans]
    try:
        for which, share, wait in cuts:
            index = which % len(plans)
            size = max(1, int(share * share * len(left[index])))
            clients[index].send(left[index][:size])
            left[index] = left[index][size:]
            if wait:
                server.call(lambda: None)  # a turn of the loop, so that pieces are not read as one
        for client, rest in zip(clients, left, strict=True):
            client.send(rest)
        for client, plan in zip(clients, plans, strict=True):
            for case in plan:
                _check(case, client.response(head_only=case.kind == "head"))
        for client in clients:
            client.half_close()
            assert client.at_end()
    finally:
        for client in clients:
            client.close()
    server.settled()
    for name in _MODELS:
        snapshot = server.call(server.lane(name).snapshot)
        assert (snapshot.waiting_rows, snapshot.running_rows) == (0, 0)
