"""One HTTP request and its one response. Renders response heads; knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import ShoalError
from shoal.protocols.content_coding import encode_content
from shoal.protocols.status import error_body, http_status, retry_headers
from shoal.server.http_head import Head

if TYPE_CHECKING:
    from shoal.core.ticket import Ticket
    from shoal.engine.lane import Lane
    from shoal.server.http_connection import HttpConnection

__all__ = ["COMPRESS_BYTES", "Exchange"]

_REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}

# Up to this size the head and the body go out as one buffer; beyond, the copy would cost more than a second buffer does.
_JOIN_BYTES: Final = 16 << 10
COMPRESS_BYTES: Final = 1 << 10
_COMPRESS_UNASKED_BYTES: Final = 256 << 10

Buffer = bytes | memoryview


class Exchange:
    """A request from its head on, until its response is handed to the connection. Answered exactly once.

    `ticket` and `lane` are set while an inference is queued or running, so that a vanished client can be taken out of the queue;
    `plan` and `infer_id` (the id in the request's JSON, where it was told apart from it) belong to the inference route. `body` is
    memory of the server's pool, to be given back when the body has served. `response` is set while an answer waits for older ones
    on the same connection.
    """

    __slots__ = ("answered", "body", "connection", "head", "infer_id", "keep_alive", "lane", "plan", "response", "ticket")

    def __init__(self, connection: HttpConnection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.keep_alive = head.keep_alive
        self.answered = False
        self.response: list[Buffer] | None = None
        self.ticket: Ticket | None = None
        self.lane: Lane | None = None
        self.plan: Any = None
        self.body: memoryview | None = None
        self.infer_id: bytes | None = None

    def request_id(self) -> bytes:
        """The client's own `x-request-id`, or a fresh one."""
        return self.head.request_id or self.connection.server.next_request_id()

    def send(self, response: list[Buffer]) -> None:
        """Hand a rendered response to the connection."""
        self.answered = True
        self.connection.send(self, response)

    def answer(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[str, str]] = (),
        compress: bool = False,
    ) -> None:
        """Answer with one body; with `compress`, in the coding that the client accepts.

        Only answers of inference are compressed: some clients say that they accept codings and then read everything else, and every
        error, as it comes. Where no coding was asked for by name, small answers are not worth the time, and large ones
        would take too much of it.
        """
        coding = self.head.response_coding if compress else None
        if coding is not None and not self.head.coding_asked:
            coding = coding if COMPRESS_BYTES <= len(body) <= _COMPRESS_UNASKED_BYTES else None
        if coding is not None and body:
            body = encode_content(coding, body)
            headers = (*headers, ("Content-Encoding", coding))
        before, after = self.render_head(status, content_type, len(body), headers)
        head = b"%b%b%b" % (before, self.request_id(), after)
        if self.head.method == b"HEAD":
            self.send([head])
        else:
            self.send([head + body] if len(body) < _JOIN_BYTES else [head, body])

    def render_head(
        self, status: int, content_type: bytes, length: int, headers: Sequence[tuple[str, str]] = ()
    ) -> tuple[bytes, bytes]:
        """The response head up to the request id, and from there to the blank line."""
        if self.connection.server.draining and self.connection.pipeline[-1] is self:
            self.keep_alive = False
        lines = [
            b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b"Status")),
            b"Content-Type: " + content_type,
            b"Content-Length: %d" % length,
        ]
        lines.extend(f"{name}: {value}".encode("latin-1") for name, value in headers)
        if not self.keep_alive:
            lines.append(b"Connection: close")
        elif self.head.http_1_0:
            lines.append(b"Connection: keep-alive")
        lines.append(b"x-request-id: ")
        return b"\r\n".join(lines), b"\r\n\r\n"

    def render_error(self, error: ShoalError) -> tuple[bytes, bytes]:
        """The whole answer with an error, before and after the request id."""
        body = error_body(error)
        status = http_status(error, overload_status=self.connection.server.settings.overload_status)
        before, after = self.render_head(status, b"application/json", len(body), retry_headers(error))
        return before, after + body

    def fail(self, error: ShoalError, status: int | None = None, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Answer with an error; `status` overrides the one of the error table (408 and 431, which only HTTP knows)."""
        server = self.connection.server
        server.count_error(error)
        self.release()
        self.answer(
            error_body(error),
            status=status or http_status(error, overload_status=server.settings.overload_status),
            headers=(*retry_headers(error), *headers),
        )

    def release(self) -> None:
        """Let go of a ticket that is reserved, queued or running, if there is one."""
        ticket, lane = self.ticket, self.lane
        self.ticket = None
        if ticket is not None and lane is not None:
            lane.cancel(ticket)

    def abandon(self) -> None:
        """Nobody reads the answer any more: take what is queued out of the queue."""
        self.answered = True
        self.release()
