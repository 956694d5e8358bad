"""The HTTP listener and what its connections share: receive buffer, known heads, routes, limits, draining."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import ssl
from collections import Counter
from typing import Final

from shoal.config.settings import ServerSettings
from shoal.errors import BadRequest, ConfigError, ShoalError
from shoal.protocols.content_coding import choose_coding
from shoal.server.body_pool import BodyPool
from shoal.server.endpoints import Router
from shoal.server.http_connection import HttpConnection
from shoal.server.http_head import Head
from shoal.server.http_parser import HeadParser

__all__ = ["HttpServer"]

_log = logging.getLogger("shoal.http")

_RECEIVE_BUFFER_BYTES: Final = 256 << 10
_KEPT_BODY_BYTES: Final = 64 << 20
_SMALL_WINDOW_BYTES: Final = 4 << 10
_MAX_HEADS: Final = 256
_MAX_REPEATABLE_HEAD_BYTES: Final = 1024
_METHODS: Final = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", b"CONNECT ")


class HttpServer:
    """Serves one `Router` on one address. Lives on one event loop.

    `draining` is set by the owner: from then on every answer ends its connection.
    """

    def __init__(self, settings: ServerSettings, router: Router) -> None:
        self.settings = settings
        self.router = router
        self.loop = asyncio.get_running_loop()
        self.buffer = bytearray(_RECEIVE_BUFFER_BYTES)
        self.window = memoryview(self.buffer)
        self.small_window = self.window[:_SMALL_WINDOW_BYTES]
        # Up to this length a body may come the short way, where nobody looks whether the pipeline is full with one request.
        self.known_body_bytes = settings.max_body_bytes if settings.max_pipelined_requests > 1 else -1
        self.bodies = BodyPool(_KEPT_BODY_BYTES)
        self.heads: dict[bytes, Head] = {}
        self.connections: set[HttpConnection] = set()
        self.draining = False
        self.errors: Counter[str] = Counter()
        self.unknown_head = Head()
        self.unknown_head.keep_alive = False
        self._parser = HeadParser()
        self._listener: asyncio.Server | None = None
        # Unique across restarts and replicas, and cheap: a random start, then counting.
        self.request_prefix = os.urandom(6).hex().encode() + b"-"
        self.request_numbers = itertools.count(1)

    async def start(self) -> int:
        """Bind and listen; returns the port. Raises ConfigError when the address or the certificate cannot be used."""
        settings = self.settings
        try:
            self._listener = await self.loop.create_server(
                lambda: HttpConnection(self),
                settings.host,
                settings.http_port,
                backlog=1024,
                ssl=self._tls_context(),
            )
        except OSError as error:
            remedy = "choose another --http-port or end the process that has it"
            if error.errno != errno.EADDRINUSE:
                remedy = "use an address of this machine, or 0.0.0.0 for all, and a port that this user may have"
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.http_port}: {error.strerror or error}; {remedy}"
            ) from None
        return int(self._listener.sockets[0].getsockname()[1])

    def _tls_context(self) -> ssl.SSLContext | None:
        certificate, key = self.settings.tls_certificate, self.settings.tls_key
        if certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS certificate {certificate} with key {key} cannot be used: {error}") from None
        return context

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Stop listening; give open connections `grace_seconds` to take their answers, then end them."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        deadline = self.loop.time() + grace_seconds
        while self.connections and (left := deadline - self.loop.time()) > 0:
            self._all_gone = self.loop.create_future()
            try:
                await asyncio.wait_for(self._all_gone, left)
            except TimeoutError:
                break
        for connection in list(self.connections):
            connection.transport.abort()

    _all_gone: asyncio.Future[None] | None = None

    # --- for connections ----------------------------------------------------------------------------------------------------------

    def admit(self, connection: HttpConnection) -> bool:
        """Count a new connection in, unless there are too many."""
        if len(self.connections) >= self.settings.max_connections:
            self.errors["too_many_connections"] += 1
            return False
        self.connections.add(connection)
        return True

    def forget(self, connection: HttpConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections and self._all_gone is not None and not self._all_gone.done():
            self._all_gone.set_result(None)

    def parse_head(self, block: bytes) -> Head:
        """Parse a head that ends with its blank line and find its route; heads that may come again are remembered."""
        head = self._parser.parse(block.lstrip(b"\r\n"))
        if head.accept_encoding is not None:
            head.response_coding = choose_coding(head.accept_encoding)
            head.coding_asked = head.response_coding is not None and "," not in head.accept_encoding
        head.route = self.router.route(head)
        head.plain = (
            head.keep_alive
            and not head.http_1_0
            and not head.coding_asked
            and all(value is None for value in (head.request_id, head.timeout_ms, head.priority, head.tenant))
        )
        if head.repeatable and head.route.lasting and len(block) <= _MAX_REPEATABLE_HEAD_BYTES:
            if len(self.heads) >= _MAX_HEADS:
                self.heads.clear()
            self.heads[block] = head
        return head

    @staticmethod
    def looks_like_http(partial: bytes | bytearray) -> bool:
        """Whether this can be the beginning of a request; spares waiting for the end of what is no head at all."""
        return any(method.startswith(partial[: len(method)]) for method in _METHODS)

    def next_request_id(self) -> bytes:
        """A request id that no other request has."""
        return b"%s%x" % (self.request_prefix, next(self.request_numbers))

    def count_error(self, error: ShoalError) -> None:
        """Every error answer is counted by its reason."""
        self.errors[error.reason] += 1
        if error.http_status >= 500 and not isinstance(error, BadRequest):
            _log.debug("answered %d %s: %s", error.http_status, error.reason, error.message)
