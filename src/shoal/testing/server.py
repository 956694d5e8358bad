"""A whole server on a loop of its own in a background thread, for tests with real sockets and blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shoal.compose import Server
from shoal.config.settings import Settings

__all__ = ["ThreadedServer", "running_server"]

T = TypeVar("T")


class ThreadedServer:
    """A started server and a way to reach its loop from the test's thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.server: Server
        self.loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-test-server")

    @property
    def port(self) -> int:
        """The HTTP port."""
        return self.server.http_port

    @property
    def url(self) -> str:
        """`host:port`, as tritonclient wants it."""
        return f"{self.settings.server.host}:{self.port}"

    def start(self) -> None:
        """Return when the server listens and its models are loaded; raises what `Server.start` raised."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Drain and end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the server's loop and wait for its result."""

        async def called() -> T:
            return function()

        return self.run(called())

    def _run(self) -> None:
        try:
            from uvloop import run
        except ImportError:
            from asyncio import run  # type: ignore[assignment]
        run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            self.server = Server(self.settings)
            await self.server.start()
        except BaseException as error:
            self._error = error
            self._started.set()
            return
        self._started.set()
        await self._stopping.wait()
        await self.server.stop()


@contextmanager
def running_server(settings: Settings) -> Iterator[ThreadedServer]:
    """Start, yield, stop."""
    server = ThreadedServer(settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
