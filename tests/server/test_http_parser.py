"""Heads and chunked bodies from bytes, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadRequest, ShoalError, TooLarge
from shoal.server.http_parser import ChunkedBody, HeadParser

POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"


def test_head_is_read_with_everything_the_server_uses() -> None:
    """Every header that the server understands reaches its field, whatever its spelling."""
    head = HeadParser().parse(
        POST + b"CONTENT-LENGTH: 12\r\nInference-header-content-length: 7\r\nAccept-Encoding: gzip\r\naccept-encoding: deflate\r\n"
        b"Content-Encoding: GZIP\r\nx-request-id: abc\r\nX-Request-Timeout-Ms: 2.5\r\nx-priority: 3\r\nx-tenant: t\xc3\xa9\r\n"
        b"Expect: 100-Continue\r\n\r\n"
    )
    assert (head.method, head.target, head.content_length, head.infer_header_length) == (b"POST", b"/v2/models/m/infer", 12, 7)
    assert (head.accept_encoding, head.content_encoding, head.request_id) == ("gzip,deflate", "gzip", b"abc")
    assert (head.timeout_ms, head.priority, head.tenant, head.expect_continue) == (2.5, 3, "té", True)
    assert head.keep_alive and not head.repeatable and head.error is None


@pytest.mark.parametrize(
    ("head", "field"),
    [
        (b"Inference-Header-Content-Length: -1", "inference-header-content-length"),
        (b"Inference-Header-Content-Length: 1e3", "inference-header-content-length"),
        (b"x-request-timeout-ms: nan", "x-request-timeout-ms"),
        (b"x-request-timeout-ms: -5", "x-request-timeout-ms"),
        (b"x-request-timeout-ms: soon", "x-request-timeout-ms"),
        (b"x-priority: high", "x-priority"),
        (b"x-tenant: \xff\xfe", "x-tenant"),
        (b"Expect: tea", "expect"),
        (b"x-request-id: " + b"i" * 300, "x-request-id"),
    ],
)
def test_unusable_value_names_its_header(head: bytes, field: str) -> None:
    """A header whose value cannot be used is an error that names it; the head stays readable, so the connection can live on."""
    parsed = HeadParser().parse(POST + head + b"\r\n\r\n")
    assert isinstance(parsed.error, BadRequest)
    assert field in parsed.error.message


@pytest.mark.parametrize(
    "block",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length : 5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_smuggling_and_nonsense_are_refused_and_the_parser_lives(block: bytes) -> None:
    """Conflicting lengths, folded headers, bare line feeds and the like are refused; the next head is read correctly."""
    parser = HeadParser()
    with pytest.raises(BadRequest):
        parser.parse(block)
    assert parser.parse(POST + b"Content-Length: 3\r\n\r\n").content_length == 3


@pytest.mark.parametrize("length", [0, 1, 65_535, 65_536, 65_537, 10_000_000])
def test_parser_is_back_in_step_after_a_body_it_never_saw(length: int) -> None:
    """Heads can be parsed one after another although their bodies do not pass the parser."""
    parser = HeadParser()
    for _ in range(3):
        head = parser.parse(POST + b"Content-Length: %d\r\n\r\n" % length)
        assert head.content_length == length and head.keep_alive
    assert not parser.parse(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").keep_alive
    assert not parser.parse(b"GET / HTTP/1.0\r\n\r\n").keep_alive
    assert parser.parse(b"GET /v2 HTTP/1.1\r\n\r\n").target == b"/v2"


def _chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


CHUNKED_HEAD = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=20), st.just(b"\r\n\r\n"), st.just(b"0\r\n\r\n")), max_size=8),
    st.sampled_from([b"", b"x-sum: 1\r\n"]),
    st.binary(max_size=10),
    st.data(),
)
def test_chunked_body_ends_exactly(parts: list[bytes], trailer: bytes, following: bytes, data: st.DataObject) -> None:
    """However the bytes are cut into reads, the body is the parts joined, and nothing behind its end is taken."""
    raw = _chunked(parts, trailer) + following
    decoder = ChunkedBody(CHUNKED_HEAD, 1 << 20)
    position = 0
    while not decoder.complete:
        size = data.draw(st.integers(1, len(raw) - position))
        piece = raw[position : position + size]
        taken = decoder.feed(memoryview(piece))
        position += taken
        assert decoder.complete or taken == len(piece)
    assert bytes(decoder.body) == b"".join(parts)
    assert raw[position:] == following


def test_chunked_body_over_the_limit_is_refused() -> None:
    """The limit counts decoded bytes, and holds before they are kept."""
    decoder = ChunkedBody(CHUNKED_HEAD, 10)
    with pytest.raises(TooLarge, match="10 bytes"):
        decoder.feed(memoryview(_chunked([b"123456", b"78901"])))
    assert len(decoder.body) == 6


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_end_in_our_own_error_or_a_body(raw: bytes) -> None:
    """No input makes the chunk decoder raise anything but our errors."""
    decoder = ChunkedBody(CHUNKED_HEAD, 100)
    try:
        decoder.feed(memoryview(raw))
    except ShoalError:
        return
    assert len(decoder.body) <= 100


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t  "])
def test_blanks_behind_a_value_do_not_count(blanks: bytes) -> None:
    """Blanks behind a number are no part of it; the head keeps its length, and nothing of the next one is taken for a body."""
    parser = HeadParser()
    assert parser.parse(POST + b"Content-Length: 7" + blanks + b"\r\nx-priority: 2" + blanks + b"\r\n\r\n").content_length == 7
    assert parser.parse(b"GET /next HTTP/1.1\r\n\r\n").target == b"/next"


@pytest.mark.parametrize("method", [b"POST", b"GET", b"HEAD"])
def test_a_length_that_cannot_be_used_leaves_the_parser_in_step(method: bytes) -> None:
    """llhttp reads a length that is not understood here: the request is refused as out of step, and the next head is read whole.

    Guards against the parser, which all connections share, eating the beginning of somebody else's request as a body.
    """
    parser = HeadParser()
    with pytest.raises(BadRequest, match="content-length"):
        parser.parse(method + b" / HTTP/1.1\r\nContent-Length: 00000000000000000000016\r\n\r\n")
    assert parser.parse(b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n").target == b"/next"


@pytest.mark.parametrize(
    "lines", [b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked"]
)
def test_other_transfer_codings_are_refused(lines: bytes) -> None:
    """A coding beside `chunked` would have to be undone before the body is looked at: it is refused by name."""
    error = HeadParser().parse(POST + lines + b"\r\n\r\n").error
    assert error is not None and "transfer-encoding" in error.message


_LINES = st.sampled_from(
    [b"Content-Length: 3", b"Content-Length: 3 ", b"Content-Length: 0", b"Content-Length: 000000000000000000000003"]
    + [b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Connection: close", b"Connection: keep-alive", b"Expect: tea"]
    + [b"Upgrade: h2c", b"Connection: upgrade", b"X: y\nContent-Length: 4", b"x-priority: none", b"Host: x", b"X : y"]
)
_HEADS = st.tuples(
    st.sampled_from([b"GET", b"POST", b"HEAD", b"CONNECT", b"PUT", b"BREW"]),
    st.sampled_from([b"1.1", b"1.0", b"0.9", b"2.0"]),
    st.lists(_LINES, max_size=4),
)


@given(heads=st.lists(_HEADS, max_size=8))
@settings(deadline=None, max_examples=300)
def test_what_came_before_never_matters(heads: list[tuple[bytes, bytes, list[bytes]]]) -> None:
    """Whatever heads a parser has seen, it reads the next one as a parser does that has seen nothing."""

    def read(parser: HeadParser, block: bytes) -> object:
        try:
            head = parser.parse(block)
        except BadRequest as error:
            return error.message
        return (head.method, head.target, head.content_length, head.chunked, head.keep_alive, str(head.error))

    parser = HeadParser()
    for number, (method, version, lines) in enumerate(heads):
        block = b"%b /%d HTTP/%b\r\n%b\r\n\r\n" % (method, number, version, b"\r\n".join(lines))
        assert read(parser, block) == read(HeadParser(), block)
