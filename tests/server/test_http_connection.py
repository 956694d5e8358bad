"""Framing on real sockets: pieces, order, pipelining, chunks, methods, what is refused and what lives on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.testing.gates import Gate
from shoal.testing.models import doubling, gated
from shoal.testing.raw_http import RawClient, get, infer, infer_parts, json_infer, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

ROW = np.arange(4, dtype=np.float32).reshape(1, 4)
LIVE = get("/v2/health/live")


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """One server for all tests that leave no trace: `double` has rows of 4, `wide` rows of any length."""
    directory = tmp_path_factory.mktemp("models")
    models = {"double": doubling(directory), "wide": doubling(directory, -1)}
    with running_server(local_settings(models)) as running:
        yield running
        running.settled()


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


@pytest.fixture
def client(server: ThreadedServer) -> Iterator[RawClient]:
    """A connection of the test's own."""
    with RawClient(server.port) as connected:
        yield connected


def test_keep_alive(client: RawClient) -> None:
    """One connection serves request after request, with and without bodies."""
    for number in range(5):
        assert client.ask(LIVE).status == 200
        assert client.ask(infer("double", {"x": row(number)})).tensors()["y"].tolist() == [[2.0 * number] * 4]


def test_pipelined_requests_are_answered_in_order(client: RawClient) -> None:
    """A hundred requests in one piece; metadata, which is answered at once, does not overtake inference."""
    requests = [piece for number in range(100) for piece in (infer("double", {"x": row(number)}), get("/v2/models/double"))]
    client.send(b"".join(requests))
    for number in range(100):
        assert client.response().tensors()["y"][0, 0] == 2.0 * number
        assert client.response().json()["name"] == "double"


def test_answers_wait_for_a_slow_first_one(held: tuple[ThreadedServer, Gate]) -> None:
    """The first request stands at the gate; what came behind it on the connection is ready and still comes after it."""
    server, gate = held
    with RawClient(server.port) as client, RawClient(server.port) as other:
        client.send(infer("held", {"x": row(1)}) + LIVE + get("/v2/models/held") + get("/nowhere"))
        gate.wait_entered()
        assert other.ask(LIVE).status == 200  # the others are not held up
        client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.socket.recv(1)
        client.socket.settimeout(30)
        gate.let()
        assert client.response().tensors()["y"][0, 0] == 2.0
        assert [client.response().status for _ in range(3)] == [200, 200, 404]


@pytest.mark.parametrize(
    "request_bytes",
    [
        infer("double", {"x": ROW}),
        json_infer("double", {"x": ("FP32", [1, 4], [0, 1, 2, 3])}),
        post(
            "/v2/models/double/infer",
            chunks=list(infer_parts({"x": ROW})),
            Inference_Header_Content_Length=len(infer_parts({"x": ROW})[0]),
        ),
    ],
    ids=["binary", "json", "chunked"],
)
def test_request_cut_at_every_byte(client: RawClient, request_bytes: bytes) -> None:
    """Wherever the network cuts a request in two, it is the same request, and the next one is in step."""
    for cut in range(1, len(request_bytes)):
        client.send(request_bytes[:cut], request_bytes[cut:] + LIVE)
        assert client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]], cut
        assert client.response().status == 200


def test_request_byte_by_byte(client: RawClient) -> None:
    """Every byte in a piece of its own."""
    request_bytes = infer("double", {"x": ROW})
    client.send(*(request_bytes[index : index + 1] for index in range(len(request_bytes))))
    assert client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_in_odd_pieces(client: RawClient, chunked: bool) -> None:
    """700 KB, larger than the receive buffer, in pieces of odd sizes, another request glued to the last: all in place."""
    array = np.random.default_rng(7).standard_normal((7, 25_013), np.float32)
    front, tail = infer_parts({"x": array})
    body = front + tail
    chunks = [body[start : start + 65_537] for start in range(0, len(body), 65_537)] if chunked else None
    raw = post("/v2/models/wide/infer", body, chunks=chunks, Inference_Header_Content_Length=len(front)) + LIVE
    start = 0
    for size in [1, 2, 3, 997, 104_729, 13, 300_007, len(raw)]:
        client.send(raw[start : start + size])
        start += size
    assert np.array_equal(client.response().tensors()["y"], 2 * array)
    assert client.response().status == 200


def test_large_body_behind_another_request_in_one_read(client: RawClient) -> None:
    """A body that begins in the receive buffer behind other requests and goes on outside of it."""
    array = np.arange(150_000, dtype=np.float32).reshape(1, -1)
    client.send(LIVE + infer("double", {"x": ROW}) + infer("wide", {"x": array}) + LIVE)
    assert client.response().status == 200
    assert client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]]
    assert np.array_equal(client.response().tensors()["y"], 2 * array)
    assert client.response().status == 200


def test_chunked_bodies(client: RawClient) -> None:
    """Chunks of one byte, chunk extensions, trailers, and pipelined requests behind them."""
    front, tail = infer_parts({"x": ROW})
    body = front + tail
    single = post(
        "/v2/models/double/infer", chunks=[body[i : i + 1] for i in range(len(body))], Inference_Header_Content_Length=len(front)
    )
    head = post("/v2/models/double/infer", Inference_Header_Content_Length=len(front), Transfer_Encoding="chunked").replace(
        b"Content-Length: 0\r\n", b""
    )
    with_extras = head + b'%x;name="a b"\r\n%s\r\n0\r\nx-sum: 1\r\nx-more: 2\r\n\r\n' % (len(body), body)
    client.send(single + with_extras + single + LIVE)
    for _ in range(3):
        assert client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]]
    assert client.response().status == 200


def test_expect_continue(client: RawClient) -> None:
    """A client that asks first is told to go on, and its body is used."""
    request_bytes = infer("double", {"x": ROW}, Expect="100-continue")
    end = request_bytes.index(b"\r\n\r\n") + 4
    client.send(request_bytes[:end])
    assert client.response().status == 100
    client.send(request_bytes[end:])
    assert client.response().tensors()["y"].tolist() == [[0, 2, 4, 6]]
    assert client.ask(LIVE).status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_expect_continue_refused(client: RawClient, chunked: bool) -> None:
    """A client that asks first is spared a body that nobody wants; as it may send it all the same, the connection ends."""
    head = post("/v2/models/nobody/infer", chunks=[] if chunked else None, Content_Length=1000, Expect="100-continue")
    head = head[: head.index(b"\r\n\r\n") + 4]
    if chunked:
        head = head.replace(b"Content-Length: 1000\r\n", b"")
    answer = client.ask(head)
    assert (answer.status, answer.json()["reason"]) == (404, "unknown_model")
    assert answer.headers["connection"] == "close"
    assert client.at_end()


def test_expect_something_else(client: RawClient) -> None:
    """Only 100-continue is understood."""
    answer = client.ask(infer("double", {"x": ROW}, Expect="tea"))
    assert answer.status == 400
    assert "expect" in answer.json()["error"]


def test_http_1_0(server: ThreadedServer) -> None:
    """An HTTP/1.0 connection ends after the answer, unless the client asks to keep it; chunks are never sent."""
    old = infer("double", {"x": ROW}).replace(b"HTTP/1.1", b"HTTP/1.0")
    with RawClient(server.port) as client:
        assert client.ask(old).tensors()["y"].tolist() == [[0, 2, 4, 6]]
        assert client.at_end()
    with RawClient(server.port) as client:
        kept = old.replace(b"Host: test\r\n", b"Host: test\r\nConnection: keep-alive\r\n")
        for _ in range(2):
            answer = client.ask(kept)
            assert answer.tensors()["y"].tolist() == [[0, 2, 4, 6]]
            assert answer.headers["connection"] == "keep-alive"


def test_connection_close(client: RawClient) -> None:
    """The last answer says so and the connection ends."""
    answer = client.ask(infer("double", {"x": ROW}, Connection="close"))
    assert answer.tensors()["y"].tolist() == [[0, 2, 4, 6]]
    assert answer.headers["connection"] == "close"
    assert client.at_end()


def test_nothing_behind_connection_close_is_executed(held: tuple[ThreadedServer, Gate]) -> None:
    """What follows a request that ends the connection is not looked at, also while that request is still running."""
    server, gate = held
    with RawClient(server.port) as client:
        client.send(infer("held", {"x": row(1)}, Connection="close"))
        gate.wait_entered()
        client.send(infer("held", {"x": row(2)}))
        server.call(lambda: None)
        gate.open()
        assert client.response().tensors()["y"][0, 0] == 2.0
        assert client.at_end()
    server.settled()
    assert gate.notes == [[1.0]]


def test_head_has_no_body(client: RawClient) -> None:
    """HEAD is answered like GET without the body; also errors; and the connection is in step."""
    length = client.ask(get("/v2")).headers["content-length"]
    client.send(get("/v2", method="HEAD"))
    answer = client.response(head_only=True)
    assert (answer.status, answer.headers["content-length"]) == (200, length)
    client.send(get("/nowhere", method="HEAD"))
    assert client.response(head_only=True).status == 404
    assert client.ask(LIVE).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status", "says"),
    [
        (get("/"), 404, "/v2"),
        (get("/v3/health/live"), 404, "no endpoint"),
        (get("/v2/models"), 404, "no endpoint"),
        (get("/v2/models/double/versions"), 404, "no endpoint"),
        (get("/v2/models/double/infer"), 405, "POST"),
        (post("/v2/health/live"), 405, "GET"),
        (get("/v2", method="DELETE"), 405, "GET"),
        (get("/v2/models/nobody"), 404, "nobody"),
        (get("/v2/models/double/versions/9"), 404, "9"),
        (get("/v2/models/nobody/ready"), 404, "nobody"),
        (infer("nobody", {"x": ROW}), 404, "nobody"),
        (infer("double", {"x": ROW}, version="9"), 404, "9"),
        (post("/v2/repository/models/double/load", b"{}"), 403, "switched off"),
        (post("/v2/repository/models/double/unload", b"{}"), 403, "switched off"),
        (get("/v2/systemsharedmemory/status"), 501, "shared memory"),
        (post("/v2/cudasharedmemory/region/r/register", b"{}"), 501, "shared memory"),
        (post("/v2/repository/index", b"[1"), 400, "JSON"),
        (post("/v2/repository/index", b"[]"), 400, "object"),
        (post("/v2/repository/index", b"x" * 70_000), 413, "65536 bytes"),
    ],
)
def test_clear_answer_and_the_connection_lives(client: RawClient, request_bytes: bytes, status: int, says: str) -> None:
    """What cannot be served is answered with a JSON error that says why, and the next request is served."""
    answer = client.ask(request_bytes)
    assert answer.status == status
    assert says in answer.json()["error"]
    assert answer.json()["reason"]
    assert answer.headers.get("allow") == (says if status == 405 else None)
    assert client.ask(LIVE).status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Inference-Header-Content-Length", "x"),
        ("x-request-timeout-ms", "soon"),
        ("x-priority", "-1"),
        ("x-tenant", "\xff"),
        ("x-request-id", "i" * 300),
    ],
)
@pytest.mark.parametrize("body", [b"{}", b"z" * 500_000])
def test_bad_header_value_names_the_header(client: RawClient, name: str, value: str, body: bytes) -> None:
    """400 names the header; the body, small or large, is passed over, and the connection lives."""
    answer = client.ask(post("/v2/models/double/infer", body, **{name: value}))
    assert answer.status == 400
    assert name.lower() in answer.json()["error"]
    assert client.ask(infer("double", {"x": ROW})).status == 200


def test_request_ids(client: RawClient) -> None:
    """The client's id comes back; without one each answer has its own, errors too."""
    assert client.ask(get("/v2", x_request_id="mine-1")).headers["x-request-id"] == "mine-1"
    assert client.ask(infer("double", {"x": ROW}, x_request_id="mine-2")).headers["x-request-id"] == "mine-2"
    assert client.ask(get("/nowhere", x_request_id="mine-3")).headers["x-request-id"] == "mine-3"
    own = [
        client.ask(request_bytes).headers["x-request-id"] for request_bytes in [LIVE, infer("double", {"x": ROW}), get("/no")] * 3
    ]
    assert len(set(own)) == 9


def test_names_are_unquoted(client: RawClient) -> None:
    """Clients quote model names; queries and a slash at the end do no harm."""
    for path in ("/v2/models/d%6Fuble", "/v2/models/double/", "/v2/models/double?x=1", "http://test/v2/models/double"):
        assert client.ask(get(path)).json()["name"] == "double"


def test_head_too_large(tmp_path: Path) -> None:
    """A head over its limit is answered 431, whether it comes in one piece or dribbles in, complete or not; then the end."""
    with running_server(local_settings({"double": doubling(tmp_path)}, max_header_bytes=1000)) as server:
        large = get("/v2", x_long="y" * 1000)
        for pieces in ([large], [large[:20], large[20:]], [large[:500], large[500:1100]]):
            with RawClient(server.port) as client:
                client.send(*pieces)
                answer = client.response()
                assert (answer.status, answer.json()["reason"]) == (431, "too_large")
                assert "1000 bytes" in answer.json()["error"]
                assert client.at_end()
        with RawClient(server.port) as client:
            assert client.ask(get("/v2", x_long="y" * 900)).status == 200


@pytest.mark.parametrize("size", [10_001, 500_000, 4_000_000, 2**40])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(tmp_path: Path, size: int, chunked: bool) -> None:
    """413 names the limit and reaches a client that goes on sending, whatever the size of its body; others are served on."""
    with running_server(local_settings({"double": doubling(tmp_path)}, max_body_bytes=10_000)) as server:
        with RawClient(server.port) as client:
            present = min(size, 4_000_000)
            if chunked:
                raw = post("/v2/models/double/infer", chunks=[b"z" * 1000] * (present // 1000 + 1))
            else:
                raw = post("/v2/models/double/infer", b"z" * present, Content_Length=size)
            client.send_what_is_taken(raw)
            answer = client.response()
            assert (answer.status, answer.json()["reason"]) == (413, "too_large")
            assert "10000 bytes" in answer.json()["error"]
            if answer.headers.get("connection") != "close":
                assert client.ask(infer("double", {"x": ROW})).status == 200
        with RawClient(server.port) as client:
            assert client.ask(infer("double", {"x": ROW})).status == 200
        server.settled()


def test_refused_body_is_never_taken_for_requests(held: tuple[ThreadedServer, Gate]) -> None:
    """While an older answer is outstanding, a body that is refused and holds something like a request is not executed."""
    server, gate = held
    for hidden in (
        post("/v2/models/held/infer", Content_Length=2**40),
        post("/v2/models/no/infer", Content_Length=9_999_999, Expect="100-continue"),
    ):
        with RawClient(server.port) as client:
            gate.close()
            calls = len(gate.notes)
            client.send(infer("held", {"x": row(1)}) + hidden + infer("held", {"x": row(666)}))
            gate.wait_entered(calls + 1)
            client.send(infer("held", {"x": row(667)}))
            gate.open()
            assert client.response().tensors()["y"][0, 0] == 2.0
            assert client.response().status in (404, 413)
            assert client.at_end()
    server.settled()
    assert [666.0] not in gate.notes and [667.0] not in gate.notes and len(gate.notes) == 2


SMUGGLED = infer("held", {"x": row(666)})


@pytest.mark.parametrize(
    "bad",
    [
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1 1\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nX: a\r\n Content-Length: 500\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n",
        b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"GET /v2 HTTP/2.0\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\0/v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHo\0st: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"not http at all",
        b"\r\n\r\n\r\n\r\nBREW /v2 HTTP/1.1\r\n\r\n",
    ],
)
def test_smuggling_ends_the_connection(held: tuple[ThreadedServer, Gate], bad: bytes) -> None:
    """What cannot be framed beyond doubt is answered 400; nothing behind it on the connection is executed."""
    server, gate = held
    gate.open()
    with RawClient(server.port) as client:
        client.send(bad)
        client.send_what_is_taken(SMUGGLED)
        answer = client.response()
        assert (answer.status, answer.json()["reason"]) == (400, "bad_request")
        assert answer.headers["connection"] == "close"
        assert client.at_end()
    server.settled()
    assert gate.notes == []


def test_answers_before_a_broken_request_still_come(held: tuple[ThreadedServer, Gate]) -> None:
    """Requests in front of a broken one on the connection are answered first, then it, then the end."""
    server, gate = held
    with RawClient(server.port) as client:
        client.send(infer("held", {"x": row(1)}) + LIVE + b"nonsense\r\n\r\n" + SMUGGLED)
        gate.wait_entered()
        gate.open()
        assert [client.response().status for _ in range(3)] == [200, 200, 400]
        assert client.at_end()
    server.settled()
    assert gate.notes == [[1.0]]


def test_index(client: RawClient) -> None:
    """The server's own word of what it serves."""
    index = client.ask(post("/v2/repository/index")).json()
    assert {(entry["name"], entry["version"], entry["state"]) for entry in index} == {
        ("double", "1", "READY"),
        ("wide", "1", "READY"),
    }
