"""One HTTP/1.1 connection: bytes in, requests out to their routes, responses back in order.

The connection knows framing, limits, timeouts and flow control. It knows no endpoint and no model: a `Head` brings its route, and
a route answers through the `Exchange`.

Theory of operation. At any time the connection is in one of four states: between requests (or in an incomplete head), inside a body
of known length, inside a chunked body, or throwing away what nobody wants any more. A head that is byte for byte one that llhttp
has parsed before is looked up instead (`HttpServer.heads`), which spares a callback per header on connections that repeat
themselves. A body of known length is sliced out of the receive buffer when it is there already; otherwise the event loop reads it
straight into its own buffer. The receive buffer is shared by all connections of a server, which is safe because whatever is read is
consumed before control returns to the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from shoal.errors import BadRequest, ShoalError, TooLarge
from shoal.server.http_exchange import Exchange
from shoal.server.http_head import Head
from shoal.server.http_parser import ChunkedBody

if TYPE_CHECKING:
    from shoal.server.http_server import HttpServer

__all__ = ["HttpConnection"]

# A refused request whose remaining body is at most this long is read to its end and thrown away, so that the connection lives on.
_MAX_DISCARD_BYTES: Final = 1 << 20
# After an answer that ends the connection, what the client still sends is thrown away this long, so that it can read the answer.
_LINGER_SECONDS: Final = 1.0
_FOREVER: Final = 1 << 62
_LARGE_BODY_BYTES: Final = 64 << 10

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.BufferedProtocol):
    """Protocol object of one accepted socket. Created by `HttpServer`, which also holds what connections share."""

    __slots__ = (
        "_active",
        "_backlog",
        "_between",
        "_chunked",
        "_closing",
        "_discard_bytes",
        "_exchange",
        "_filled",
        "_known_block",
        "_known_head",
        "_look_again",
        "_may_send_more",
        "_partial_head",
        "_reading_paused",
        "_request_deadline",
        "_target",
        "_timer",
        "_write_blocked",
        "_write_left_bytes",
        "pipeline",
        "server",
        "transport",
    )

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        # Requests that are being read or not answered yet, oldest first.
        self.pipeline: deque[Exchange] = deque()
        # Nothing is being read or thrown away: the next byte begins a request.
        self._between = True
        # The last head on this connection that may come again, and its bytes.
        self._known_block: bytes | None = None
        self._known_head = server.unknown_head
        # The beginning of a head whose blank line has not arrived.
        self._partial_head: bytearray | None = None
        # The request whose body is being read, and that body: of known length (`_target`, filled so far) or in chunks.
        self._exchange: Exchange | None = None
        self._target: memoryview | None = None
        self._filled = 0
        self._chunked: ChunkedBody | None = None
        # How much is still to be thrown away of a refused request's body.
        self._discard_bytes = 0
        # Requests that were read together with others when the client had enough of them in flight already.
        self._backlog: bytearray | None = None
        # Whether a connection that ends may still have bytes of the client under way.
        self._may_send_more = False
        self._closing = False
        self._reading_paused = False
        self._write_blocked = False
        self._write_left_bytes = _FOREVER
        self._active = True
        self._timer: asyncio.TimerHandle | None = None
        self._look_again = 0.0
        self._request_deadline = 0.0

    # --- life of the socket ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102 (asyncio's interface)
        self.transport = cast(asyncio.Transport, transport)
        if not self.server.admit(self):
            self._closing = True
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=self.server.settings.write_buffer_bytes)
        self._watch(self.server.settings.header_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._closing = True
        self.server.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for exchange in self.pipeline:
            exchange.abandon()
        self.pipeline.clear()
        self._drop_what_is_read()
        self._backlog = None

    def eof_received(self) -> bool:
        """The client has gone: what it asked for is cancelled. A half-closed connection counts as gone, as in most servers."""
        self._closing = True
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than we answer: stop taking requests from it."""
        self._write_blocked = True
        self._write_left_bytes = self.transport.get_write_buffer_size()
        self._watch(self.server.settings.body_timeout_ms)
        self._update_reading()

    def resume_writing(self) -> None:  # noqa: D102
        self._write_blocked = False
        self._write_left_bytes = _FOREVER
        self._update_reading()

    def _update_reading(self) -> None:
        blocked = self._write_blocked or len(self.pipeline) >= self.server.settings.max_pipelined_requests
        if blocked != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = blocked
            if blocked:
                self._between = False
                self.transport.pause_reading()
            elif self._backlog is None:
                self.transport.resume_reading()
            else:
                self.server.loop.call_soon(self._take_up_backlog)

    def _take_up_backlog(self) -> None:
        """Go on with what had been read when the client had to wait, and then with reading."""
        if self._backlog is None or self._reading_paused:
            return
        data, self._backlog = memoryview(self._backlog), None
        while data and not self._closing:
            buffer = self.get_buffer(len(data))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.buffer_updated(size)
            if self._backlog is not None:
                self._backlog += data
                return
        if not self._reading_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def close(self) -> None:
        """Close once what has been written is sent."""
        self._closing = True
        self.transport.close()

    def close_if_idle(self) -> None:
        """Close now unless a request is being read or answered; then the answer closes it."""
        if not self.pipeline and self._partial_head is None and self._backlog is None:
            self.close()

    # --- timeouts: one timer a connection, moved only when it fires or must fire earlier ----------------------------------------

    @property
    def _mid_request(self) -> bool:
        return self._exchange is not None or self._partial_head is not None

    def _watch(self, timeout_ms: float) -> None:
        """Look again in `timeout_ms`. A timer that stands earlier already is left there, and moved on when it fires."""
        loop = self.server.loop
        when = self._look_again = loop.time() + timeout_ms / 1000
        self._active = False
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        """Look whether anything has moved since the timer was set; what stands still is ended."""
        self._timer = None
        settings = self.server.settings
        left_bytes = self.transport.get_write_buffer_size()
        busy = self._active or self._mid_request or bool(self.pipeline)
        if self.server.loop.time() < self._look_again:
            self._timer = self.server.loop.call_at(self._look_again, self._on_timer)
        elif left_bytes and (self._write_blocked or self._closing or not busy):
            if left_bytes >= self._write_left_bytes:
                self.transport.abort()
            else:
                self._write_left_bytes = left_bytes
                self._watch(settings.body_timeout_ms)
        elif self._mid_request and self._reading_paused:  # we are who holds it up
            self._must_arrive_within(settings.header_timeout_ms)
        elif self._mid_request:
            if self.server.loop.time() < self._request_deadline:
                self._watch((self._request_deadline - self.server.loop.time()) * 1000)
            elif self._exchange is not None:
                self._fail(BadRequest("the request's body did not arrive in time"), status=408)
            else:
                self._fail(BadRequest("the request's head did not arrive in time"), status=408)
        elif self._discard_bytes and not self._active:
            self.transport.abort()
        elif busy:
            self._write_left_bytes = _FOREVER
            self._watch(settings.idle_timeout_ms)
        else:
            self.close()

    # --- bytes in ---------------------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        target = self._target
        if target is not None:
            return target[self._filled :]
        # What comes with a head is copied once more, so after a large body only a small piece is read with the next head.
        return self.server.small_window if self._known_head.content_length > _LARGE_BODY_BYTES else self.server.window

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        self._active = True
        if self._between and not self._closing:
            block = self._known_block
            buffer = self.server.buffer
            if block is not None and buffer.startswith(block):
                head = self._known_head
                start = len(block)
                if start + head.content_length == nbytes:  # one whole request like the last one, and nothing else
                    exchange = Exchange(self, head)
                    pipeline = self.pipeline
                    pipeline.append(exchange)
                    head.route.receive_part(exchange, buffer, start, nbytes)
                    if len(pipeline) > 1:
                        self._update_reading()
                    return
            self._read_requests(0, nbytes)
        elif self._target is not None:
            self._filled += nbytes
            if self._filled < len(self._target):
                return
            self._finish_body()
        elif self._backlog is not None:  # some event loops still bring what was under way when reading was paused
            self._backlog += self.server.window[:nbytes]
        else:
            start = 0
            if self._discard_bytes:
                start = min(nbytes, self._discard_bytes)
                self._discard_bytes -= start
            if self._chunked is not None:
                start = self._read_chunks(start, nbytes)
            if start < nbytes:
                self._read_requests(start, nbytes)
        self._between = (
            self._target is None
            and self._backlog is None
            and not self._reading_paused
            and self._chunked is None
            and self._partial_head is None
            and not self._discard_bytes
        )

    def _read_requests(self, start: int, stop: int) -> None:
        """Take requests out of the receive buffer; a request begins at `start`, or an incomplete head goes on there."""
        server = self.server
        buffer, window, heads = server.buffer, server.window, server.heads
        if self._partial_head is not None and not self._reading_paused:
            start = self._complete_head(start, stop)
        while start < stop and not self._closing:
            if self._discard_bytes:
                rest = min(stop - start, self._discard_bytes)
                self._discard_bytes -= rest
                start += rest
                continue
            if self._reading_paused:
                self._backlog = bytearray(window[start:stop])
                return
            if buffer[start] in b"\r\n":  # blank lines between requests are allowed
                start = stop - len(bytes(window[start:stop]).lstrip(b"\r\n"))
                continue
            end = buffer.find(b"\r\n\r\n", start, stop) + 4
            if end < 4:
                self._begin_partial_head(start, stop)
                return
            block = bytes(window[start:end])
            head = heads.get(block)
            if head is None:
                start = self._take_new_head(block, end, stop)
            else:
                if head.keep_alive and head.content_length <= min(server.known_body_bytes, self._body_limit(head)):
                    self._known_block, self._known_head = block, head
                start = self._take_request(head, end, stop)

    def _begin_partial_head(self, start: int, stop: int) -> None:
        limit = self.server.settings.max_header_bytes
        if stop - start > limit:
            self._fail(TooLarge(f"request head larger than {limit} bytes"), status=431)
            return
        partial = bytearray(self.server.window[start:stop])
        if not self.server.looks_like_http(partial):
            self._fail(BadRequest("not a valid HTTP request"))
            return
        self._partial_head = partial
        self._must_arrive_within(self.server.settings.header_timeout_ms)

    def _complete_head(self, start: int, stop: int) -> int:
        """More bytes of an incomplete head; returns where what follows it begins."""
        partial = self._partial_head
        assert partial is not None
        known = len(partial)
        limit = self.server.settings.max_header_bytes
        partial += self.server.window[start : min(stop, start + limit + 4)]
        end = partial.find(b"\r\n\r\n", max(0, known - 3)) + 4
        if end < 4:
            if len(partial) > limit:
                self._fail(TooLarge(f"request head larger than {limit} bytes"), status=431)
            return stop
        self._partial_head = None
        return self._take_new_head(bytes(partial[:end]), start + end - known, stop)

    def _take_new_head(self, block: bytes, end: int, stop: int) -> int:
        """A head that is not known yet; its body begins at `end`. Returns where the next request begins."""
        server = self.server
        if len(block) > server.settings.max_header_bytes:
            self._fail(TooLarge(f"request head larger than {server.settings.max_header_bytes} bytes"), status=431)
            return stop
        try:
            head = server.parse_head(block)
        except BadRequest as error:
            self._fail(error)
            return stop
        if head.chunked:
            return self._begin_chunks(head, block, end, stop)
        return self._take_request(head, end, stop)

    def _take_request(self, head: Head, start: int, stop: int) -> int:
        """A head was read and its body of known length begins at `start`; returns where the next request begins."""
        length = head.content_length
        end = start + length
        exchange = Exchange(self, head)
        pipeline = self.pipeline
        pipeline.append(exchange)
        if not head.keep_alive:  # the last request of this connection, whatever follows
            self._closing = True
        if end <= stop and length <= self._body_limit(head):
            head.route.receive_part(exchange, self.server.buffer, start, end)
            if len(pipeline) >= self.server.settings.max_pipelined_requests:
                self._update_reading()
            return end
        refusal = self._refusal(exchange)
        if refusal is not None:
            self._refuse(exchange, refusal, end - start)
            return start
        if head.expect_continue:
            self.transport.write(_CONTINUE)
        target = self.server.bodies.take(length, head.infer_header_length or 0)
        present = stop - start
        target[:present] = self.server.window[start:stop]
        self._exchange, self._target, self._filled = exchange, target, present
        self._must_arrive_within(self.server.settings.body_timeout_ms)
        return stop

    def _finish_body(self) -> None:
        """The body that was read straight into place is complete."""
        exchange, body = self._exchange, self._target
        assert exchange is not None
        self._exchange = self._target = None
        exchange.body = body
        exchange.head.route.receive(exchange, body)
        self._update_reading()

    def _begin_chunks(self, head: Head, block: bytes, start: int, stop: int) -> int:
        exchange = Exchange(self, head)
        self.pipeline.append(exchange)
        if not head.keep_alive:
            self._closing = True
        refusal = self._refusal(exchange)
        if refusal is not None:
            self._refuse(exchange, refusal, _FOREVER)
            return stop
        if head.expect_continue:
            self.transport.write(_CONTINUE)
        self._exchange = exchange
        self._chunked = ChunkedBody(block, self._body_limit(head))
        self._must_arrive_within(self.server.settings.body_timeout_ms)
        return self._read_chunks(start, stop)

    def _read_chunks(self, start: int, stop: int) -> int:
        chunked, exchange = self._chunked, self._exchange
        assert chunked is not None and exchange is not None
        error: ShoalError | None
        try:
            start += chunked.feed(self.server.window[start:stop])
            error = exchange.head.route.grow(exchange, len(chunked.body))
        except ShoalError as raised:
            error = raised
        if error is not None:
            self._fail(error)
            return stop
        if chunked.complete:
            chunked.close()
            self._exchange = self._chunked = None
            exchange.head.route.receive(exchange, bytes(chunked.body))
            self._update_reading()
        return start

    def _must_arrive_within(self, timeout_ms: float) -> None:
        self._request_deadline = self.server.loop.time() + timeout_ms / 1000
        self._watch(timeout_ms)

    # --- refusals ---------------------------------------------------------------------------------------------------------------

    def _body_limit(self, head: Head) -> int:
        return min(self.server.settings.max_body_bytes, cast(int, head.route.max_body_bytes))

    def _refusal(self, exchange: Exchange) -> ShoalError | None:
        """Ask everything that can refuse a request before its body is read."""
        head = exchange.head
        if head.error is not None:
            return head.error
        limit = self._body_limit(head)
        if head.content_length > limit:
            return TooLarge(f"body of {head.content_length} bytes is larger than the limit of {limit} bytes")
        return cast("ShoalError | None", head.route.reserve(exchange))

    def _refuse(self, exchange: Exchange, error: ShoalError, body_bytes: int) -> None:
        """Answer before the body was read, and get the body out of the way within a bound."""
        if body_bytes > _MAX_DISCARD_BYTES or exchange.head.expect_continue:
            exchange.keep_alive = False
            self._may_send_more = True
        exchange.fail(error)
        if exchange.keep_alive:
            self._discard_bytes = body_bytes
            self._watch(self.server.settings.header_timeout_ms)

    def _fail(self, error: ShoalError, status: int | None = None) -> None:
        """The connection is out of step, or nobody goes on sending: answer what can be answered, and end it."""
        exchange = self._exchange
        self._drop_what_is_read()
        if exchange is None:
            exchange = Exchange(self, self.server.unknown_head)
            self.pipeline.append(exchange)
        exchange.keep_alive = False
        self._may_send_more = True
        exchange.fail(error, status)

    def _drop_what_is_read(self) -> None:
        if self._chunked is not None:
            self._chunked.close()
        self._exchange = self._target = self._chunked = self._partial_head = None

    # --- bytes out --------------------------------------------------------------------------------------------------------------

    def send_one(self, exchange: Exchange, response: bytes) -> None:
        """Send a small response to a client that keeps the connection: `send` without its preparations, in the usual case."""
        pipeline = self.pipeline
        if len(pipeline) != 1 or self._reading_paused or pipeline[0] is not exchange:
            self.send(exchange, [response])
            return
        pipeline.clear()
        if not self.transport.is_closing():
            self.transport.write(response)

    def send(self, exchange: Exchange, response: list[bytes | memoryview]) -> None:
        """Send a response when its turn comes. Called once per exchange, by the exchange."""
        pipeline = self.pipeline
        if not exchange.keep_alive:  # nothing of what follows is looked at, also while older requests are still answered
            self._closing = True
        if pipeline and pipeline[0] is exchange:
            pipeline.popleft()
            self._write(exchange, response)
            while pipeline and pipeline[0].response is not None:
                following = pipeline.popleft()
                self._write(following, cast("list[bytes | memoryview]", following.response))
            if self._reading_paused:
                self._update_reading()
        else:
            exchange.response = response

    def _write(self, exchange: Exchange, response: list[bytes | memoryview]) -> None:
        transport = self.transport
        if transport.is_closing():
            return
        if len(response) == 1:
            transport.write(response[0])
        else:
            transport.writelines(response)
        if not exchange.keep_alive:
            self._linger()

    def _linger(self) -> None:
        """Say that no more comes, and ignore the client until it has read what was sent: an early close could destroy it."""
        self._closing = True
        self._discard_bytes = _FOREVER
        for exchange in self.pipeline:
            exchange.abandon()
        self.pipeline.clear()
        self._drop_what_is_read()
        self._backlog = None
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.server.loop.call_later(_LINGER_SECONDS, self._end_linger)
        elif self._may_send_more:  # TLS cannot close one direction
            self.server.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _end_linger(self) -> None:
        """End the connection, unless the client is still taking what was sent: then the timer ends it when that stands still."""
        if self.transport.get_write_buffer_size():
            self._write_left_bytes = _FOREVER
            self._watch(self.server.settings.body_timeout_ms)
        else:
            self.transport.abort()
