"""From bytes to request heads and chunked bodies, by way of llhttp (httptools). No sockets, no routes.

Heads are parsed from their complete block of bytes, up to and including the blank line, so the caller always knows where a request
ends. Bodies of known length never come here.
"""

from __future__ import annotations

from typing import Final

import httptools

from shoal.errors import BadRequest, ShoalError, TooLarge
from shoal.server.http_head import Head, set_header

__all__ = ["ChunkedBody", "HeadParser"]

_BLANK: Final = memoryview(bytes(1 << 16))
_MAX_BLANKS: Final = 32


class HeadParser:
    """Parses one complete head at a time; one object serves all connections of a loop."""

    def __init__(self) -> None:
        self._head = Head()
        self._heads = 0
        self._messages = 0
        self._parser = httptools.HttpRequestParser(self)

    def parse(self, block: bytes) -> Head:
        """Parse a head that ends with its blank line. Raises BadRequest for anything that llhttp refuses."""
        head = self._head = Head()
        self._heads = self._messages = 0
        try:
            self._parser.feed_data(block)
            if self._heads != 1:
                raise BadRequest("not a valid HTTP request: incomplete head")
            self._get_back_in_step(head)
        except httptools.HttpParserUpgrade:
            self._parser = httptools.HttpRequestParser(self)
            raise BadRequest("header upgrade: no other protocol is offered here") from None
        except (httptools.HttpParserError, ShoalError) as error:
            self._parser = httptools.HttpRequestParser(self)
            if isinstance(error, ShoalError):
                raise
            if isinstance(error.__context__, ShoalError):  # raised in a callback
                raise error.__context__ from None
            raise BadRequest(f"not a valid HTTP request: {error}") from None
        return head

    def _get_back_in_step(self, head: Head) -> None:
        """The parser now waits for a body that it will not see: show it a blank one, which is cheaper than a new parser.

        Raises BadRequest unless the message ends where `head.content_length` says: where the two ever differed, the parser would
        take the beginning of somebody's next request for a body.
        """
        length = head.content_length
        if not head.keep_alive or head.chunked or length > _MAX_BLANKS * len(_BLANK):
            self._parser = httptools.HttpRequestParser(self)
            return
        while length > 0:
            self._parser.feed_data(_BLANK[:length])
            length -= len(_BLANK)
        if self._messages != 1:
            raise head.error or BadRequest("not a valid HTTP request: its end cannot be told")

    def on_url(self, url: bytes) -> None:  # noqa: D102 (httptools' interface)
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        set_header(self._head, name, value)

    def on_headers_complete(self) -> None:  # noqa: D102
        # llhttp forgets these once a message without a body is complete, so they are asked for here.
        head, parser = self._head, self._parser
        head.method = parser.get_method()
        head.keep_alive = parser.should_keep_alive()
        version = parser.get_http_version()
        if version == "1.0":
            head.http_1_0 = True
            head.expect_continue = False
        elif version != "1.1":
            raise BadRequest(f"not a valid HTTP request: version {version} is not spoken here, use HTTP/1.1")
        self._heads += 1

    def on_message_complete(self) -> None:  # noqa: D102
        self._messages += 1


class ChunkedBody:
    """A body in chunks, decoded as it arrives. Needs a parser of its own, because it spans reads."""

    def __init__(self, block: bytes, limit_bytes: int) -> None:
        self.body = bytearray()
        self.complete = False
        self._limit_bytes = limit_bytes
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._parser.feed_data(block)

    def close(self) -> None:
        """No more comes. The parser refers to us, so that only the garbage collector would free the body."""
        self._parser = None

    def feed(self, data: memoryview) -> int:
        """Take bytes; returns how many belong to this body. Raises BadRequest or TooLarge.

        The end of a chunked body is always a blank line, so feeding up to each one in turn finds the end exactly; nothing behind
        it reaches this parser. A blank line may have begun in the last read, hence the single bytes first.
        """
        raw = bytes(data)
        parser = self._parser
        assert parser is not None
        start = 0
        while start < len(raw):
            end = start + 1 if start < 3 else raw.find(b"\r\n\r\n", start - 3) + 4
            if end < 4 and start >= 3:
                end = len(raw)
            end = max(end, start + 1)
            try:
                parser.feed_data(data[start:end])
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ShoalError):
                    raise error.__context__ from None
                raise BadRequest(f"chunked body: {error}") from None
            start = end
            if self.complete:
                break
        return start

    def on_body(self, chunk: bytes) -> None:  # noqa: D102 (httptools' interface)
        if len(self.body) + len(chunk) > self._limit_bytes:
            raise TooLarge(f"body larger than the limit of {self._limit_bytes} bytes")
        self.body += chunk

    def on_message_complete(self) -> None:  # noqa: D102
        self.complete = True
