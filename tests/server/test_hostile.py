"""What a hostile, hasty or slow client must not achieve, and what a reload must not leave behind. Real sockets, tagged rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings, QueueSettings
from shoal.core.invariants import violations
from shoal.testing.gates import Gate
from shoal.testing.models import doubling, gated, python_model
from shoal.testing.raw_http import RawClient, get, infer, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

LIVE = get("/v2/health/live")


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """A server with the model `double`."""
    with running_server(local_settings({"double": doubling(tmp_path_factory.mktemp("models"))})) as running:
        yield running
        running.settled()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[ThreadedServer, Gate]]:
    """A server that takes one request at a time from each connection, with a model `held` that waits at a gate."""
    path, gate = gated(tmp_path)
    with running_server(local_settings({"held": path}, max_pipelined_requests=1)) as running:
        try:
            yield running, gate
        finally:
            gate.open()
        running.settled()


def test_a_strange_length_does_not_reach_the_next_client(server: ThreadedServer) -> None:
    """A length that is not understood ends its connection, and takes nothing from the request of somebody else."""
    with RawClient(server.port) as evil, RawClient(server.port) as other:
        answer = evil.ask(b"POST /v2/models/double/infer HTTP/1.1\r\nContent-Length: 00000000000000000000016\r\n\r\n")
        assert answer.status == 400 and "content-length" in answer.json()["error"]
        assert answer.headers["connection"] == "close"
        assert other.ask(get("/v2/health/live", probe="not seen before")).status == 200


def test_blank_behind_the_length(server: ThreadedServer) -> None:
    """A length with a blank behind it counts: the body is no request, whatever it looks like."""
    smuggled = b"GET /v2/models/double HTTP/1.1\r\n\r\n"
    with RawClient(server.port) as client:
        client.send(b"POST /v2/repository/index HTTP/1.1\r\nContent-Length: %d \r\n\r\n" % len(smuggled) + smuggled + LIVE)
        assert client.response().status == 400
        live = client.response()
        assert live.status == 200 and live.body == b""


@pytest.mark.parametrize("blanks", [b"\r\n", b"\r\n\r\n", b"\n\r\n\r\n\r\n\r", b"\r\n" * 5000])
@pytest.mark.parametrize("apart", [False, True])
def test_blank_lines_between_requests(server: ThreadedServer, blanks: bytes, apart: bool) -> None:
    """Blank lines before and between requests are passed over, however the bytes arrive."""
    with RawClient(server.port) as client:
        pieces = [blanks, LIVE, blanks, infer("double", {"x": row(3)})]
        client.send(*pieces) if apart else client.send(b"".join(pieces))
        assert client.response().status == 200
        assert client.response().tensors()["y"].tolist() == [[6.0] * 4]


def test_a_head_without_end_is_refused_at_once(server: ThreadedServer) -> None:
    """A head beyond the limit is refused when it is seen, not kept until its time is up."""
    with RawClient(server.port) as client:
        client.send_what_is_taken(b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000)
        assert client.response().status == 431


def test_one_pipelined_request_is_one(held: tuple[ThreadedServer, Gate]) -> None:
    """With `max_pipelined_requests = 1` the second request waits for the answer to the first, however often heads repeat."""
    server, gate = held
    lane = server.lane("held")
    with RawClient(server.port) as client:
        gate.open()
        for number in range(3):  # from now on the head is known
            assert client.ask(infer("held", {"x": row(number)})).tensors()["y"][0, 0] == 2 * number
        gate.close()
        for number in (3, 4, 5):
            client.send(infer("held", {"x": row(number)}))
        gate.wait_entered(4)
        with RawClient(server.port) as other:  # by its answer the loop has read what it was going to read
            assert other.ask(LIVE).status == 200
        assert server.call(lambda: lane.snapshot().waiting_requests) == 0
        gate.open()
        assert [client.response().tensors()["y"][0, 0] for _ in range(3)] == [6.0, 8.0, 10.0]


def test_a_head_that_we_do_not_read_is_not_late(tmp_path: Path) -> None:
    """The time for a head does not run while the server itself has stopped reading the connection."""
    path, gate = gated(tmp_path)
    settings = local_settings({"held": path}, max_pipelined_requests=2, header_timeout_ms=20.0)
    with running_server(settings) as server, RawClient(server.port) as client, RawClient(server.port) as other:
        first, second, third = (infer("held", {"x": row(number)}) for number in (1, 2, 3))
        client.send(first + second + third[:20])
        gate.wait_entered()
        client.send(third[20:])
        other.socket.settimeout(30)
        assert other.at_end()  # an idle connection: its time, and so more than that of the head, is over
        gate.open()
        assert [client.response().tensors()["y"][0, 0] for _ in range(3)] == [2.0, 4.0, 6.0]


def test_last_answer_is_read_to_its_end(tmp_path: Path) -> None:
    """The answer that ends a connection is not cut off while the client still reads it, however slowly."""
    path = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (4,))}
            outputs = {"y": ("FP32", (-1,))}
            def __call__(self, x):
                return np.repeat(x[:, :1], 5_000_000, axis=1)
        """,
    )
    with running_server(local_settings({"big": path})) as server, RawClient(server.port) as client:
        client.send(infer("big", {"x": row(7)}, Connection="close"))
        (connection,) = server.call(lambda: list(server.server.http.connections))  # type: ignore[union-attr]
        server.wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
        server.call(connection._end_linger)  # what the timer does
        answer = client.response()
        assert answer.headers["connection"] == "close"
        assert (answer.tensors()["y"] == 7.0).all()


def test_known_heads_survive_a_reload(tmp_path: Path) -> None:
    """Requests whose heads were known before a model was loaded anew go to the new one, every head of them."""
    source = """
    class Model:
        inputs = {"x": ("FP32", (4,))}
        outputs = {"y": ("FP32", (4,))}
        def __call__(self, x):
            return FACTOR * x
    """
    old, new = (python_model(tmp_path, source.replace("FACTOR", str(factor))) for factor in (2, 3))
    requests = [infer("m", {"x": row(5)}, client=name) for name in ("a", "b", "c")]
    with running_server(local_settings({"m": old})) as server, RawClient(server.port) as client:
        for request in requests * 3:
            assert client.ask(request).tensors()["y"][0, 0] == 10.0
        server.run(server.server.engine.load("m", ModelSettings(path=new, probe=False)))
        for request in requests * 3:
            assert client.ask(request).tensors()["y"][0, 0] == 15.0
        server.settled()


def test_what_does_not_exist_is_not_remembered(server: ThreadedServer) -> None:
    """Endless names of models, versions and paths leave nothing behind in the server."""
    router, http = server.server.router, server.server.http
    assert http is not None
    with RawClient(server.port) as client:
        for _ in range(2):
            assert client.ask(infer("double", {"x": row(1)})).status == 200
        before = server.call(lambda: (len(router._routes), len(router._infer_routes), len(http.heads)))
        for number in range(50):
            assert client.ask(infer(f"no-{number}", {"x": row(1)})).status == 404
            assert client.ask(infer("double", {"x": row(1)}, version=str(number + 2))).status == 404
            assert client.ask(get(f"/v2/models/no-{number}/ready")).status == 404
            assert client.ask(get(f"/nowhere/{number}")).status == 404
            assert client.ask(get("/v2/models/double/infer", client=number)).status == 405
        assert server.call(lambda: (len(router._routes), len(router._infer_routes), len(http.heads))) == before


def test_bodies_that_nobody_needs_are_small(server: ThreadedServer) -> None:
    """An endpoint that is no inference takes no large body, neither of known length nor in chunks: nothing bounds their number."""
    with RawClient(server.port) as client:
        answer = client.ask(b"POST /v2/repository/index HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n")
        assert answer.status == 413
    with RawClient(server.port) as client:
        client.send_what_is_taken(post("/v2/repository/index", chunks=[b" " * 30_000] * 5))
        assert client.response().status == 413


# --- places in the queue ------------------------------------------------------------------------------------------------------


def begun(request: bytes, size: int = 10) -> tuple[bytes, bytes]:
    """A request in two pieces: its head with the first bytes of the body, and the rest."""
    end = request.index(b"\r\n\r\n") + 4 + size
    return request[:end], request[end:]


@pytest.fixture
def single(tmp_path: Path) -> Iterator[tuple[ThreadedServer, Gate]]:
    """A gated model `held` in whose queue two requests have room."""
    path, gate = gated(tmp_path)
    settings = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_rows=2))
    with running_server(local_settings({"held": settings})) as running:
        try:
            yield running, gate
        finally:
            gate.open()
        running.settled()


def test_places_of_bodies_that_never_come_are_given_back(single: tuple[ThreadedServer, Gate]) -> None:
    """Clients that vanish in the middle of a body, however often, leave the queue as empty as it was."""
    server, gate = single
    gate.open()
    lane = server.lane("held")
    first, _ = begun(infer("held", {"x": row(1)}))
    chunked = post("/v2/models/held/infer", chunks=[b"{" * 30])[:-20]
    for number in range(6):
        with RawClient(server.port) as client:
            client.send(chunked if number % 2 else first)
            server.wait_until(lambda: not lane.idle)
            client.half_close() if number % 3 else client.vanish()
            server.wait_until(lambda: lane.idle)
    server.check_invariants()
    with RawClient(server.port) as client:
        assert client.ask(infer("held", {"x": row(4)})).tensors()["y"][0, 0] == 8.0


def test_full_queue_with_pipelines(single: tuple[ThreadedServer, Gate]) -> None:
    """Where two have room and one runs, the rest of a pipeline is refused, in order, and every place comes back."""
    server, gate = single
    with RawClient(server.port) as client, RawClient(server.port) as late:
        client.send(infer("held", {"x": row(0)}))
        gate.wait_entered()
        client.send(b"".join(infer("held", {"x": row(number)}) for number in range(1, 8)))
        server.wait_waiting("held", 2)
        first, rest = begun(infer("held", {"x": row(9)}))
        refused = late.ask(first)  # before the body has come; what comes of it is passed over
        assert (refused.status, refused.json()["reason"]) == (429, "queue_full")
        assert late.ask(rest + LIVE).status == 200
        gate.open()
        answers = [client.response() for _ in range(8)]
        assert [answer.status for answer in answers] == [200] * 3 + [429] * 5
        assert [answer.tensors()["y"][0, 0] for answer in answers[:3]] == [0.0, 2.0, 4.0]
        server.settled()
        assert client.ask(infer("held", {"x": row(5)})).tensors()["y"][0, 0] == 10.0


@pytest.mark.parametrize("back", [False, True])
def test_model_goes_while_a_body_arrives(tmp_path: Path, back: bool) -> None:
    """A model is loaded anew, or unloaded, between the head and the end of the body: the new one answers, or it is 503."""
    source = """
    class Model:
        inputs = {"x": ("FP32", (4,))}
        outputs = {"y": ("FP32", (4,))}
        def __call__(self, x):
            return FACTOR * x
    """
    old, new = (python_model(tmp_path, source.replace("FACTOR", str(factor))) for factor in (2, 3))
    first, rest = begun(infer("m", {"x": row(5)}))
    with running_server(local_settings({"m": old})) as server, RawClient(server.port) as client:
        engine, lane = server.server.engine, server.lane("m")
        client.send(first)
        server.wait_until(lambda: not lane.idle)
        work = engine.load("m", ModelSettings(path=new, probe=False)) if back else engine.unload("m")
        changing = asyncio.run_coroutine_threadsafe(work, server.loop)
        epoch = server.call(lambda: engine.epoch)
        server.wait_until(lambda: engine.epoch > epoch or lane._scheduler._draining)
        client.send(rest)
        answer = client.response()
        assert answer.status == (200 if back else 503)
        assert not back or answer.tensors()["y"][0, 0] == 15.0
        changing.result(30)
        assert server.call(lambda: lane.idle) and violations(lane._scheduler) == []


def test_chunks_count_against_the_queue(tmp_path: Path) -> None:
    """Bodies in chunks hold as many bytes of the queue as have come; beyond its bound they are refused, and then it is empty."""
    settings = ModelSettings(path=doubling(tmp_path, -1), probe=False, queue=QueueSettings(max_queue_bytes=100_000))
    chunked = post("/v2/models/m/infer", chunks=[b" " * 60_000, b" "])[:-20]
    with running_server(local_settings({"m": settings})) as server:
        lane = server.lane("m")
        with RawClient(server.port) as first, RawClient(server.port) as second:
            first.send(chunked)
            server.wait_until(lambda: lane._scheduler._reserved_bytes >= 59_000)
            second.send_what_is_taken(chunked)
            answer = second.response()
            assert (answer.status, answer.json()["reason"]) == (429, "queue_full")
            server.check_invariants()
        server.settled()
