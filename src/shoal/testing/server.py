"""A whole server on a loop of its own in a background thread, for tests with real sockets and blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from shoal.compose import Server
from shoal.config.settings import ModelSettings, ServerSettings, Settings
from shoal.core.invariants import check_invariants
from shoal.engine.lane import Lane

__all__ = ["ThreadedServer", "local_settings", "running_server"]

T = TypeVar("T")

_SAFETY_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 0.001


def local_settings(models: Mapping[str, ModelSettings | str], **server: Any) -> Settings:
    """Settings of a server on a free loopback port. A model that is only a path is served with defaults and without probing."""
    return Settings(
        server=msgspec.structs.replace(ServerSettings(http_port=0), **server),
        models={
            name: ModelSettings(path=model, probe=False) if isinstance(model, str) else model for name, model in models.items()
        },
    )


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

    def lane(self, model: str, version: str | None = None) -> Lane:
        """The lane of a model. Touch it on the server's loop only (`call`)."""
        return self.call(lambda: self.server.engine.lane(model, version))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition`, which is looked at on the server's loop, holds. Raises TimeoutError after 30 s."""

        async def waiting() -> None:
            async with asyncio.timeout(_SAFETY_SECONDS):
                while not condition():  # noqa: ASYNC110 (state of others, which tells nobody of its changes)
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)

        self.run(waiting())

    def wait_waiting(self, model: str, rows: int) -> None:
        """Return when exactly `rows` rows wait for an executor of the model. Raises TimeoutError after 30 s."""
        lane = self.lane(model)
        self.wait_until(lambda: lane.snapshot().waiting_rows == rows)

    def settled(self) -> None:
        """Wait until nothing waits or runs, and check the conservation laws of every model's scheduler."""
        lanes = self.call(lambda: list(self.server.engine.lanes()))
        self.wait_until(lambda: all(lane.idle for lane in lanes))
        self.check_invariants()

    def check_invariants(self) -> None:
        """Raise AssertionError naming every law of a scheduler that does not hold now."""

        def check() -> None:
            for lane in self.server.engine.lanes():
                check_invariants(lane._scheduler)

        self.call(check)

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
