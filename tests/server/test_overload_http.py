"""A full queue, deadlines and readiness over HTTP: how many are let in, what the others are told, and what refusing costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings
from shoal.testing.gates import Gate
from shoal.testing.models import doubling, gated
from shoal.testing.raw_http import RawClient, get, infer, infer_parts, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

LIVE = get("/v2/health/live")
READY = get("/v2/health/ready")


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@contextlib.contextmanager
def bounded(directory: Path, max_queue_rows: int, **server: Any) -> Iterator[tuple[ThreadedServer, Gate]]:
    """A server whose model `m` stands at a gate, with a bounded queue; opened at the end."""
    path, gate = gated(directory, columns=-1)
    model = ModelSettings(
        path=path, probe=False, batching=BatchingSettings(max_batch_size=4), queue=QueueSettings(max_queue_rows=max_queue_rows)
    )
    with running_server(local_settings({"m": model}, **server)) as running:
        try:
            yield running, gate
        finally:
            gate.open()
        running.settled()


@contextlib.contextmanager
def fill(server: ThreadedServer, gate: Gate, rows: int) -> Iterator[RawClient]:
    """One request runs and `rows` wait, all on the connection that is given."""
    with RawClient(server.port) as client:
        calls = len(gate.notes)
        client.send(infer("m", {"x": row(0)}))
        gate.wait_entered(calls + 1)
        client.send(b"".join(infer("m", {"x": row(number)}) for number in range(1, rows + 1)))
        server.wait_waiting("m", rows)
        yield client


def test_exactly_the_limit_is_accepted(tmp_path: Path) -> None:
    """Of ten times as many as fit, on as many connections, exactly as many as fit are answered 200 and all others 429."""
    limit = 20
    with bounded(tmp_path, limit) as (server, gate), fill(server, gate, 0) as running:
        clients = [RawClient(server.port) for _ in range(10 * limit)]
        for number, client in enumerate(clients):
            client.send(infer("m", {"x": row(number)}))
        lane = server.lane("m")
        server.wait_until(lambda: sum(lane.stats.refused.values()) == 9 * limit)
        server.check_invariants()
        assert server.call(lambda: lane.snapshot().waiting_rows) == limit
        gate.open()
        answers = [client.response() for client in clients]
        assert running.response().status == 200
        served = [number for number, answer in enumerate(answers) if answer.status == 200]
        assert len(served) == limit
        assert [answers[number].tensors()["y"][0, 0] for number in served] == [2.0 * number for number in served]
        assert {answer.status for answer in answers} == {200, 429}
        # A refused client is served as soon as there is room, on the same connection.
        refused = next(client for client, answer in zip(clients, answers, strict=True) if answer.status == 429)
        assert refused.ask(infer("m", {"x": row(7)})).tensors()["y"][0, 0] == 14.0
        for client in clients:
            client.close()


def test_what_a_refused_client_is_told(tmp_path: Path) -> None:
    """The JSON body has the key that clients look for, the reason and the queue, and a hint, also before any rate was measured."""
    with bounded(tmp_path, 3) as (server, gate):
        with fill(server, gate, 3) as client, RawClient(server.port) as refused:
            answer = refused.ask(infer("m", {"x": row(9)}))
            told = answer.json()
            assert (answer.status, told["reason"]) == (429, "queue_full")
            assert told["queue"]["waiting_rows"] == 3 and told["queue"]["max_queue_rows"] == 3
            assert '"m" is full: 3 of 3 rows' in told["error"]
            assert (answer.headers["retry-after"], told["retry_after_ms"]) == ("1", 1000)  # nothing was served yet
            gate.open()
            assert [client.response().status for _ in range(4)] == [200] * 4
        gate.close()
        with fill(server, gate, 3), RawClient(server.port) as refused:
            answer = refused.ask(infer("m", {"x": row(9)}))
            told = answer.json()
            assert answer.status == 429
            hint_ms = int(answer.headers["retry-after-ms"])
            assert told["retry_after_ms"] == hint_ms
            assert int(answer.headers["retry-after"]) == max(1, -(-hint_ms // 1000))
            assert f"Try again in {hint_ms} ms" in told["error"]
            gate.open()


@pytest.mark.parametrize("status", [429, 503])
def test_overload_status(tmp_path: Path, status: int) -> None:
    """The status of a full queue can be set back to 503; the reason stays."""
    with bounded(tmp_path, 1, overload_status=status) as (server, gate), fill(server, gate, 1), RawClient(server.port) as refused:
        answer = refused.ask(infer("m", {"x": row(9)}))
        assert (answer.status, answer.json()["reason"]) == (status, "queue_full")


def test_refused_before_the_body_is_sent(tmp_path: Path) -> None:
    """With a full queue the head alone is enough for the answer; the body that follows is passed over and the connection lives."""
    with bounded(tmp_path, 1) as (server, gate), fill(server, gate, 1) as client, RawClient(server.port) as refused:
        request_bytes = infer("m", {"x": np.zeros((1, 200_000), np.float32)})
        end = request_bytes.index(b"\r\n\r\n") + 4
        refused.send(request_bytes[:end])
        answer = refused.response()
        assert (answer.status, answer.json()["reason"]) == (429, "queue_full")
        gate.open()
        assert [client.response().status for _ in range(2)] == [200, 200]
        refused.send(request_bytes[end:])
        assert refused.ask(infer("m", {"x": row(2)})).tensors()["y"][0, 0] == 4.0


def test_refused_head_with_a_chunked_body(tmp_path: Path) -> None:
    """A chunked body of unknown length cannot be passed over: the answer comes at once, and ends the connection."""
    with bounded(tmp_path, 1) as (server, gate), fill(server, gate, 1), RawClient(server.port) as refused:
        refused.send(post("/v2/models/m/infer", chunks=[b"x"])[:-5])
        answer = refused.response()
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        assert refused.at_end()


def test_place_is_held_from_the_head_on(tmp_path: Path) -> None:
    """A request whose body is under way has its place: who comes later is refused, and it is served when its body is there."""
    with (
        bounded(tmp_path, 1) as (server, gate),
        fill(server, gate, 0) as running,
        RawClient(server.port) as early,
        RawClient(server.port) as late,
    ):
        request_bytes = infer("m", {"x": np.full((1, 100_000), 3, np.float32)})
        early.send(request_bytes[:1000])
        lane = server.lane("m")
        server.wait_until(lambda: lane.snapshot().reserved_requests == 1)
        assert late.ask(infer("m", {"x": row(1)})).status == 429
        early.send(request_bytes[1000:])
        server.wait_waiting("m", 1)
        gate.open()
        assert early.response().tensors()["y"][0, -1] == 6.0
        assert running.response().status == 200


def test_more_rows_than_the_place_that_was_held(tmp_path: Path) -> None:
    """A place is held for one row; a body with more rows than there is room for is refused all the same, and gives it back."""
    with bounded(tmp_path, 3) as (server, gate), fill(server, gate, 1) as client, RawClient(server.port) as other:
        large = infer("m", {"x": np.zeros((3, 40_000), np.float32)})
        assert other.ask(large).status == 429
        server.check_invariants()
        assert server.lane("m").snapshot().held_rows == 1
        other.send(infer("m", {"x": np.full((2, 4), 5, np.float32)}))
        server.wait_waiting("m", 3)
        gate.open()
        assert [client.response().status for _ in range(2)] == [200, 200]
        assert other.response().tensors()["y"].tolist() == [[10.0] * 4] * 2


def test_more_rows_than_could_ever_wait(tmp_path: Path) -> None:
    """What would not fit into an empty queue is 413: no retry can help."""
    with bounded(tmp_path, 3) as (server, _), RawClient(server.port) as client:
        answer = client.ask(infer("m", {"x": np.zeros((4, 4), np.float32)}))
        assert (answer.status, answer.json()["reason"]) == (413, "too_large")
        assert "retry-after" not in answer.headers


@pytest.mark.parametrize("unready_when_full", [False, True])
def test_health_while_the_queue_is_full(tmp_path: Path, unready_when_full: bool) -> None:
    """A full queue never touches liveness; readiness only where the settings say so; metadata is served on."""
    with (
        bounded(tmp_path, 2, unready_when_full=unready_when_full) as (server, gate),
        fill(server, gate, 2) as client,
        RawClient(server.port) as probe,
    ):
        assert probe.ask(LIVE).status == 200
        assert probe.ask(READY).status == (503 if unready_when_full else 200)
        assert probe.ask(get("/v2/models/m/ready")).status == 200
        assert probe.ask(get("/v2/models/m")).json()["name"] == "m"
        gate.open()
        assert [client.response().status for _ in range(3)] == [200] * 3
        server.settled()
        assert probe.ask(READY).status == 200


def test_model_that_failed_to_load(tmp_path: Path) -> None:
    """Not ready, with the reason; the model that did load is served; readiness of all depends on the setting."""
    bad = tmp_path / "broken.py"
    bad.write_text("raise ValueError('weights are missing')\n")
    for strict in (True, False):
        models = {"good": doubling(tmp_path), "bad": f"{bad}:Model"}
        with running_server(local_settings(models, strict_readiness=strict)) as server, RawClient(server.port) as client:
            answer = client.ask(READY)
            assert answer.status == (503 if strict else 200)
            if strict:
                assert "weights are missing" in answer.json()["error"]
            assert client.ask(LIVE).status == 200
            assert client.ask(get("/v2/models/good/ready")).status == 200
            answer = client.ask(get("/v2/models/bad/ready"))
            assert answer.status == 503 and "weights are missing" in answer.json()["error"]
            answer = client.ask(infer("bad", {"x": row(1)}))
            assert (answer.status, answer.json()["reason"]) == (503, "not_ready")
            assert client.ask(infer("good", {"x": row(1)})).tensors()["y"][0, 0] == 2.0
            index = {entry["name"]: entry for entry in client.ask(post("/v2/repository/index")).json()}
            assert index["bad"]["state"] == "UNAVAILABLE" and "weights are missing" in index["bad"]["reason"]


@pytest.mark.parametrize("by", ["parameter", "header", "both", "default"])
def test_deadline_while_the_only_executor_is_busy(tmp_path: Path, by: str) -> None:
    """504 at the deadline, although the executor never became free; the place is free again and the request is never run."""
    path, gate = gated(tmp_path)
    queue = QueueSettings(default_timeout_ms=30.0 if by == "default" else None)
    model = ModelSettings(path=path, probe=False, queue=queue)
    with (
        running_server(local_settings({"m": model})) as server,
        RawClient(server.port) as busy,
        RawClient(server.port) as client,
    ):
        try:
            busy.send(infer("m", {"x": row(1)}))
            gate.wait_entered()
            timeout_us = {"parameter": 30_000, "both": 3_600_000_000}.get(by)
            fields = {"parameters": {"timeout": timeout_us, "binary_data_output": True}} if timeout_us else None
            headers = {"x_request_timeout_ms": 30} if by in ("header", "both") else {}
            answer = client.ask(infer("m", {"x": row(2)}, fields, **headers))
            assert (answer.status, answer.json()["reason"]) == (504, "deadline_exceeded")
            assert "retry-after" not in answer.headers
            assert server.lane("m").snapshot().held_requests == 0
            server.check_invariants()
        finally:
            gate.open()
        assert busy.response().tensors()["y"][0, 0] == 2.0
        server.settled()
        assert gate.notes == [[1.0]]
        assert client.ask(infer("m", {"x": row(3)})).tensors()["y"][0, 0] == 6.0


def test_deadline_of_one_does_not_touch_its_mates(tmp_path: Path) -> None:
    """What waits together with an expired request goes on waiting and is answered."""
    with bounded(tmp_path, 10) as (server, gate), fill(server, gate, 2) as client, RawClient(server.port) as hasty:
        assert hasty.ask(infer("m", {"x": row(9)}, x_request_timeout_ms=20)).status == 504
        gate.open()
        assert [client.response().tensors()["y"][0, 0] for _ in range(3)] == [0.0, 2.0, 4.0]
        server.settled()
        assert [9.0] not in gate.notes


def test_raw_body_counts_against_the_bytes(tmp_path: Path) -> None:
    """The bound in bytes holds for announced bodies, before any of them is there."""
    path, gate = gated(tmp_path, columns=-1)
    model = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_bytes=1_000_000))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as first, RawClient(server.port) as second:
        front, _ = infer_parts({"x": np.zeros((1, 150_000), np.float32)})
        head = post("/v2/models/m/infer", Content_Length=len(front) + 600_000, Inference_Header_Content_Length=len(front))
        first.send(head)
        lane = server.lane("m")
        server.wait_until(lambda: lane.snapshot().reserved_bytes > 0)
        second.send(head)
        answer = second.response()
        assert (answer.status, answer.json()["reason"]) == (429, "queue_full")
        assert "bytes" in answer.json()["error"]
        gate.open()
        first.send(front + bytes(600_000))
        assert first.response().tensors()["y"].shape == (1, 150_000)
        server.settled()
