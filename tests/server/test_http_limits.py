"""Time, space and clients that go away: every bound of a connection, and that whoever breaks one harms nobody else."""

from __future__ import annotations

import gzip
import ssl
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings
from shoal.errors import ConfigError
from shoal.testing.gates import Gate
from shoal.testing.models import doubling, gated, python_model
from shoal.testing.raw_http import RawClient, get, infer, infer_parts, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

ROW = np.arange(4, dtype=np.float32).reshape(1, 4)
LIVE = get("/v2/health/live")


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[ThreadedServer, Gate]]:
    """A server whose model `held` waits at a gate; opened at the end."""
    path, gate = gated(tmp_path)
    with running_server(local_settings({"held": path})) as running:
        try:
            yield running, gate
        finally:
            gate.open()
        running.settled()


# --- time --------------------


@pytest.mark.parametrize("beginning", [b"G", b"GET /v2 HTTP/1.1\r\nHost: x\r\n", b"POST /v2/models/m/infer HTTP/1.1\r\nConte"])
def test_slow_head(tmp_path: Path, beginning: bytes) -> None:
    """A head that does not arrive in time is answered 408, and the connection ends."""
    settings = local_settings({"m": doubling(tmp_path)}, header_timeout_ms=200.0)
    with running_server(settings) as server, RawClient(server.port) as client:
        answer = client.ask(beginning)
        assert answer.status == 408
        assert "head" in answer.json()["error"]
        assert client.at_end()


@pytest.mark.parametrize("chunked", [False, True])
def test_slow_body(tmp_path: Path, chunked: bool) -> None:
    """A body that does not arrive in time is answered 408; the place that was held for it in the queue is free again."""
    settings = local_settings({"m": doubling(tmp_path)}, body_timeout_ms=50.0)
    with running_server(settings) as server, RawClient(server.port) as client:
        if chunked:
            client.send(post("/v2/models/m/infer", chunks=[b"half"])[:-5])
        else:
            client.send(post("/v2/models/m/infer", b"half", Content_Length=1000))
        answer = client.response()
        assert answer.status == 408
        assert "body" in answer.json()["error"]
        assert client.at_end()
        server.settled()
        assert server.lane("m").snapshot().cancelled == 1


def test_dribbling_does_not_extend_the_time(tmp_path: Path) -> None:
    """The whole head must arrive in time, not just a byte of it now and then."""
    settings = local_settings({"m": doubling(tmp_path)}, header_timeout_ms=200.0)
    with running_server(settings) as server, RawClient(server.port) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nx: ")
        client.socket.settimeout(0.005)
        data = b""
        while not data:  # a byte every 5 ms, until the server has had enough
            try:
                client.send(b"y")
                data = client.socket.recv(1 << 16)
            except TimeoutError:
                continue
        assert data.startswith(b"HTTP/1.1 408")


def test_silent_connections_end(tmp_path: Path) -> None:
    """A connection on which nothing was ever sent ends after the head's time, one that has been used after the idle time."""
    settings = local_settings({"m": doubling(tmp_path)}, header_timeout_ms=600.0, idle_timeout_ms=50.0)
    with running_server(settings) as server:
        with RawClient(server.port) as client:
            assert client.at_end()
        with RawClient(server.port) as client:
            assert client.ask(LIVE).status == 200
            assert client.at_end()
        server.wait_until(lambda: not server.server.http.connections)


def test_waiting_for_the_model_is_not_idleness(tmp_path: Path) -> None:
    """However long the model takes, the client that waits for it is not cut off by the timeouts of heads, bodies or idleness."""
    path, gate = gated(tmp_path)
    settings = local_settings({"held": path}, header_timeout_ms=200.0, body_timeout_ms=50.0, idle_timeout_ms=50.0)
    with running_server(settings) as server, RawClient(server.port) as client:
        client.send(infer("held", {"x": row(1)}))
        gate.wait_entered()
        for _ in range(3):
            with RawClient(server.port) as silent:  # its end shows that this much time has passed
                assert silent.at_end()
        gate.open()
        assert client.response().tensors()["y"][0, 0] == 2.0


# --- numbers of things --------------------


def test_too_many_connections(tmp_path: Path) -> None:
    """One connection more than allowed is closed at once and counted; when one ends there is room again."""
    with running_server(local_settings({"m": doubling(tmp_path)}, max_connections=3)) as server:
        clients = [RawClient(server.port) for _ in range(3)]
        assert all(client.ask(LIVE).status == 200 for client in clients)
        with RawClient(server.port) as client:
            client.send_what_is_taken(LIVE)
            assert client.at_end()
        assert server.call(lambda: server.server.http.errors["too_many_connections"]) == 1
        clients.pop().close()
        server.wait_until(lambda: len(server.server.http.connections) == 2)
        with RawClient(server.port) as client:
            assert client.ask(LIVE).status == 200
        for client in clients:
            assert client.ask(LIVE).status == 200
            client.close()


def test_pipeline_limit(tmp_path: Path) -> None:
    """No more requests of one connection are taken than allowed; the others wait unread, and all are answered in order."""
    path, gate = gated(tmp_path)
    with running_server(local_settings({"held": path}, max_pipelined_requests=8)) as server:
        with RawClient(server.port) as client, RawClient(server.port) as other:
            client.send(b"".join(infer("held", {"x": row(number)}) for number in range(100)))
            gate.wait_entered()
            lane = server.lane("held")
            server.wait_until(lambda: lane.snapshot().accepted == 8)
            assert other.ask(LIVE).status == 200
            assert server.call(lambda: max(len(connection.pipeline) for connection in server.server.http.connections)) == 8
            assert server.call(lambda: lane.snapshot().accepted) == 8
            gate.open()
            assert [client.response().tensors()["y"][0, 0] for _ in range(100)] == [2.0 * number for number in range(100)]
            assert client.ask(LIVE).status == 200
        server.settled()


def test_pipeline_limit_with_bodies_and_partial_heads(tmp_path: Path) -> None:
    """Whatever lies behind the limit, a large body, half a head, a chunked request, is taken up where it stood."""
    with running_server(local_settings({"m": doubling(tmp_path, -1)}, max_pipelined_requests=2)) as server:
        large = np.arange(100_000, dtype=np.float32).reshape(1, -1)
        front, tail = infer_parts({"x": large})
        chunked = post(
            "/v2/models/m/infer", chunks=[front, tail[:70_000], tail[70_000:]], Inference_Header_Content_Length=len(front)
        )
        small = infer("m", {"x": row(3)})
        with RawClient(server.port) as client:
            client.send(small * 5 + infer("m", {"x": large}) + small * 5 + chunked + small * 5 + small[:50], small[50:])
            got = [client.response().tensors()["y"] for _ in range(18)]
        assert [array.shape[1] for array in got] == [4] * 5 + [100_000] + [4] * 5 + [100_000] + [4] * 6
        assert np.array_equal(got[5], 2 * large) and np.array_equal(got[11], 2 * large)
        server.settled()


# --- writing --------------------


def test_slow_reader_is_bounded_and_harms_nobody(tmp_path: Path) -> None:
    """A client that asks for large answers and reads none is not read from any more; others go on; later it gets everything."""
    path = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (1,))}
            outputs = {"y": ("FP32", (250_000,))}
            def __call__(self, x):
                return np.repeat(x, 250_000, axis=1)
        """,
    )
    settings = local_settings({"big": path}, write_buffer_bytes=1 << 20, max_pipelined_requests=4)
    with running_server(settings) as server:
        with RawClient(server.port) as slow, RawClient(server.port) as other:
            requests = b"".join(infer("big", {"x": np.array([[number]], np.float32)}) for number in range(40))
            slow.send(requests)
            http, lane = server.server.http, server.lane("big")
            server.wait_until(lambda: any(connection._write_blocked for connection in http.connections) and lane.idle)
            for number in range(3):
                assert other.ask(infer("big", {"x": np.array([[number]], np.float32)})).tensors()["y"][0, -1] == number
            (blocked,) = server.call(lambda: [connection for connection in http.connections if connection._write_blocked])
            # At most one answer beyond the mark, and those whose requests had been taken already.
            assert server.call(blocked.transport.get_write_buffer_size) <= (1 << 20) + 5 * 1_000_200
            assert server.call(lambda: lane.snapshot().answered) < 43
            for number in range(40):
                values = slow.response().tensors()["y"]
                assert values.shape == (1, 250_000) and values[0, 0] == number and values[0, -1] == number
        server.settled()


def test_reader_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    """After the body's time without any progress in writing, the connection is given up and its memory freed."""
    path = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (1,))}
            outputs = {"y": ("FP32", (2_000_000,))}
            def __call__(self, x):
                return np.repeat(x, 2_000_000, axis=1)
        """,
    )
    settings = local_settings({"big": path}, write_buffer_bytes=1 << 16, body_timeout_ms=100.0)
    with running_server(settings) as server, RawClient(server.port) as client:
        client.send(infer("big", {"x": np.array([[1]], np.float32)}) * 4)
        http = server.server.http
        server.wait_until(lambda: any(connection._write_blocked for connection in http.connections))
        server.wait_until(lambda: not http.connections)


# --- clients that go away --------------------


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_client_gone_while_queued(held: tuple[ThreadedServer, Gate], how: str) -> None:
    """Its ticket leaves the queue and is never run; the others of the batch that was being formed are answered."""
    server, gate = held
    lane = server.lane("held")
    first, gone, mate = (RawClient(server.port) for _ in range(3))
    first.send(infer("held", {"x": row(1)}))
    gate.wait_entered()
    gone.send(infer("held", {"x": row(2)}))
    server.wait_waiting("held", 1)
    mate.send(infer("held", {"x": row(3)}))
    server.wait_waiting("held", 2)
    getattr(gone, how)()
    server.wait_waiting("held", 1)
    server.check_invariants()
    gate.open()
    assert first.response().tensors()["y"][0, 0] == 2.0
    assert mate.response().tensors()["y"][0, 0] == 6.0
    server.settled()
    assert gate.notes == [[1.0], [3.0]]
    assert server.call(lambda: lane.stats.cancelled) == 1
    first.close(), mate.close()


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_client_gone_while_running(held: tuple[ThreadedServer, Gate], how: str) -> None:
    """Its rows are thrown away and counted; its batch-mates get theirs and nothing hangs."""
    server, gate = held
    lane = server.lane("held")
    first, gone, mate = (RawClient(server.port) for _ in range(3))
    first.send(infer("held", {"x": row(1)}))
    gate.wait_entered()
    gone.send(infer("held", {"x": np.full((2, 4), 2, np.float32)}))
    server.wait_waiting("held", 2)
    mate.send(infer("held", {"x": row(3)}))
    server.wait_waiting("held", 3)
    gate.let()
    gate.wait_entered(2)
    assert first.response().tensors()["y"][0, 0] == 2.0
    http = server.server.http
    getattr(gone, how)()
    server.wait_until(lambda: len(http.connections) == 2)
    gate.open()
    assert mate.response().tensors()["y"][0, 0] == 6.0
    server.settled()
    assert gate.notes == [[1.0], [2.0, 2.0, 3.0]]
    assert server.call(lambda: (lane.stats.discarded, lane.stats.discarded_rows)) == (1, 2)
    first.close(), mate.close()


def test_client_gone_in_the_middle_of_a_body(held: tuple[ThreadedServer, Gate]) -> None:
    """The place held for it in the queue is given back, whichever way the body came."""
    server, _ = held
    lane = server.lane("held")
    for request_bytes in (
        post("/v2/models/held/infer", b"half", Content_Length=1000),
        post("/v2/models/held/infer", chunks=[b"h"])[:-5],
    ):
        client = RawClient(server.port)
        client.send(request_bytes)
        server.wait_until(lambda: lane.snapshot().reserved_requests == 1)
        client.close()
        server.settled()
        assert lane.snapshot().held_bytes == 0


def test_whole_pipeline_is_cancelled_with_its_client(held: tuple[ThreadedServer, Gate]) -> None:
    """All requests that wait on a connection leave with it."""
    server, gate = held
    client = RawClient(server.port)
    client.send(infer("held", {"x": row(1)}))
    gate.wait_entered()
    client.send(b"".join(infer("held", {"x": row(number)}) for number in range(2, 12)))
    server.wait_waiting("held", 10)
    client.vanish()
    server.wait_waiting("held", 0)
    gate.open()
    server.settled()
    assert gate.notes == [[1.0]]


# --- content codings --------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_codings_of_bodies(held: tuple[ThreadedServer, Gate], coding: str) -> None:
    """Compressed bodies are read, JSON length and all, and answers are compressed when asked for."""
    server, gate = held
    gate.open()
    front, tail = infer_parts({"x": ROW})
    compress = gzip.compress if coding == "gzip" else zlib.compress
    expand = gzip.decompress if coding == "gzip" else zlib.decompress
    body = compress(front + tail)
    with RawClient(server.port) as client:
        headers = {"Content_Encoding": coding, "Inference_Header_Content_Length": len(front)}
        assert client.ask(post("/v2/models/held/infer", body, **headers)).tensors()["y"].tolist() == [[0, 2, 4, 6]]
        answer = client.ask(post("/v2/models/held/infer", body, Accept_Encoding=coding, **headers))
        assert answer.headers["content-encoding"] == coding
        answer.body = expand(answer.body)
        assert answer.tensors()["y"].tolist() == [[0, 2, 4, 6]]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bomb(tmp_path: Path, coding: str) -> None:
    """A small body that unfolds to more than the limit is refused without taking the memory; the connection lives."""
    bomb = gzip.compress(bytes(50 << 20)) if coding == "gzip" else zlib.compress(bytes(50 << 20))
    with (
        running_server(local_settings({"m": doubling(tmp_path)}, max_body_bytes=1 << 20)) as server,
        RawClient(server.port) as client,
    ):
        answer = client.ask(post("/v2/models/m/infer", bomb, Content_Encoding=coding))
        assert (answer.status, answer.json()["reason"]) == (413, "too_large")
        assert client.ask(infer("m", {"x": ROW})).status == 200


@pytest.mark.parametrize(("coding", "status"), [("gzip", 400), ("deflate", 400), ("br", 501), ("gzip, deflate", 501)])
def test_bad_codings(held: tuple[ThreadedServer, Gate], coding: str, status: int) -> None:
    """Bodies that are not what they are said to be, and codings that are not known, are refused; the connection lives."""
    server, _ = held
    with RawClient(server.port) as client:
        assert client.ask(post("/v2/models/held/infer", b"neither", Content_Encoding=coding)).status == status
        assert client.ask(LIVE).status == 200


# --- TLS --------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for localhost that nobody signed, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    files = str(directory / "certificate.pem"), str(directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture
def secure(tmp_path: Path, certificate: tuple[str, str]) -> Iterator[tuple[ThreadedServer, ssl.SSLContext]]:
    """A server over TLS and a context that trusts it."""
    settings = local_settings(
        {"m": doubling(tmp_path, -1)}, tls_certificate=certificate[0], tls_key=certificate[1], max_body_bytes=8 << 20
    )
    with running_server(settings) as server:
        yield server, ssl.create_default_context(cafile=certificate[0])
        server.settled()


def test_tls(secure: tuple[ThreadedServer, ssl.SSLContext]) -> None:
    """Small, pipelined, large and chunked requests over TLS; Connection: close and a clean end."""
    server, context = secure
    with RawClient(server.port, tls=context) as client:
        assert client.ask(infer("m", {"x": ROW})).tensors()["y"].tolist() == [[0, 2, 4, 6]]
        client.send(infer("m", {"x": ROW}) * 10)
        assert all(client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]] for _ in range(10))
        large = np.random.default_rng(1).standard_normal((1, 500_000), np.float32)
        client.send(infer("m", {"x": large}) + LIVE)
        assert np.array_equal(client.response().tensors()["y"], 2 * large)
        assert client.response().status == 200
        front, tail = infer_parts({"x": large})
        chunks = [front] + [tail[start : start + 100_000] for start in range(0, len(tail), 100_000)]
        answer = client.ask(post("/v2/models/m/infer", chunks=chunks, Inference_Header_Content_Length=len(front)))
        assert np.array_equal(answer.tensors()["y"], 2 * large)
        assert client.ask(get("/v2", Connection="close")).status == 200
        assert client.at_end()


def test_tls_refusals_are_readable(secure: tuple[ThreadedServer, ssl.SSLContext]) -> None:
    """Over TLS too, 413 reaches a client that has more to send, and 400 one that makes no sense."""
    server, context = secure
    with RawClient(server.port, tls=context) as client:
        client.send(post("/v2/models/m/infer", b"z" * 100_000, Content_Length=9 << 20))
        assert client.response().status == 413
    with RawClient(server.port, tls=context) as client:
        client.send_what_is_taken(b"nonsense\r\n\r\n")
        assert client.response().status == 400
        assert client.at_end()


def test_plain_bytes_on_a_tls_port(secure: tuple[ThreadedServer, ssl.SSLContext]) -> None:
    """A client without TLS is turned away and harms nobody."""
    server, context = secure
    with RawClient(server.port) as client:
        client.send_what_is_taken(LIVE)
        client.rest()
    with RawClient(server.port, tls=context) as client:
        assert client.ask(LIVE).status == 200


def test_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    """Starting says which file is wrong."""
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    with (
        pytest.raises(ConfigError, match=r"bad\.pem"),
        running_server(local_settings({"m": ModelSettings(path=doubling(tmp_path))}, tls_certificate=str(bad), tls_key=str(bad))),
    ):
        pass
