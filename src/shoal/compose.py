"""The one place where objects are wired together: settings in, a running server out."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, TextIO

from shoal.backends.threads import cpu_budget
from shoal.config.effective import startup_lines
from shoal.config.settings import Settings
from shoal.engine.registry import Engine, ModelState
from shoal.errors import ConfigError
from shoal.server.endpoints import Router
from shoal.server.http_server import HttpServer

__all__ = ["Server", "StopWishes", "serve"]

_log = logging.getLogger("shoal")

# By default the interpreter lets a thread wait 5 ms for the GIL. A worker that has a batch to start, or its result to hand over,
# would lose that much whenever the loop is busy.
_SWITCH_INTERVAL_SECONDS: Final = 0.0005
# How long answers that are rendered may take to leave after draining.
_CLOSE_GRACE_SECONDS: Final = 5.0
# What has outlived the drain timeout is waited for this long, and then its answers: together less than half a second.
_LATE_GRACE_SECONDS: Final = 0.2
# Process groups are told to stop as a whole, and whoever runs us tells us too: one wish to stop may come as several signals.
_SAME_SIGNAL_SECONDS: Final = 0.2


def tune_interpreter() -> None:
    """Settings of the whole process that a server wants: for the command line, not for those who embed one. Call it once loaded.

    What is loaded stays, so the garbage collector need not look at it ever again; and as no request leaves cycles behind, looking
    for them now and then is enough. A collection of everything would stand still for many milliseconds.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class Server:
    """A whole server on the running event loop. `async with Server(settings) as server:` starts and, at the end, drains it.

    `start` returns when the ports are bound and every model is loaded or has failed to load (see `Engine.states`).
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = Engine(strict_readiness=settings.server.strict_readiness)
        self.engine.announce(settings.models)
        self.router = Router(self.engine, settings)
        self.http: HttpServer | None = None
        self.http_port = 0

    async def start(self) -> None:
        """Bind, so that liveness can be asked from the first moment; then load. Raises ConfigError when a port is taken."""
        self.http = HttpServer(self.settings.server, self.router)
        self.http_port = await self.http.start()
        _log.info("listening on %s, port %d", self.settings.server.host, self.http_port)
        for name, model in self.settings.models.items():
            await self.engine.load(name, model)

    def start_draining(self) -> None:
        """From this moment on: not ready, and no new requests. `stop` does the rest."""
        self.router.draining = True
        if self.http is not None:
            self.http.draining = True
        self.engine.draining = True
        for lane in self.engine.lanes():
            lane.start_draining()

    async def stop(self) -> bool:
        """Refuse new requests, finish the accepted ones, close. False if the time for it ran out."""
        self.start_draining()
        finished = await self.engine.drain(self.settings.server.drain_timeout_ms)
        if not finished:  # who still waits is told so, before the connections go
            await self.engine.close(_LATE_GRACE_SECONDS)
        if self.http is not None:
            await self.http.close(_CLOSE_GRACE_SECONDS if finished else _LATE_GRACE_SECONDS)
        await self.engine.close()
        return finished

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()


class StopWishes:
    """Counts how often a process was told to stop: the same signal again within a fifth of a second is the same wish."""

    def __init__(self) -> None:
        self._wishes = 0
        self._came: dict[int, float] = {}

    def count(self, number: int, now_seconds: float) -> int:
        """Which wish a signal that comes now is, beginning with 1; 0 if it repeats the last one of its kind."""
        if now_seconds - self._came.get(number, -math.inf) < _SAME_SIGNAL_SECONDS:
            return 0
        self._came[number] = now_seconds
        self._wishes += 1
        return self._wishes


async def _serve(settings: Settings, out: TextIO) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    wishes = StopWishes()

    def on_signal(number: int) -> None:
        wish = wishes.count(number, time.monotonic())
        if wish == 0:
            return
        if wish > 1:
            print("stopped at once", file=out, flush=True)
            os._exit(128 + number)
        server.start_draining()
        print("draining; a second signal stops at once", file=out, flush=True)
        stopping.set()

    server = Server(settings)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    starting = asyncio.ensure_future(server.start())
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # told to stop while loading
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    else:
        try:
            starting.result()
        except ConfigError as error:
            waiting.cancel()
            await server.engine.close()
            print(f"shoal: {error.message}", file=sys.stderr)
            return 1
        failed = [status for status in server.engine.states if status.state is not ModelState.READY]
        if failed and settings.server.exit_on_load_error:
            waiting.cancel()
            await server.stop()
            print(f"shoal: model {failed[0].name} cannot be served: {failed[0].reason}", file=sys.stderr)
            return 1
        tune_interpreter()
        budget = server.engine.thread_budget
        for line in startup_lines(settings, budget, {"http": server.http_port}, cpu_count=cpu_budget().cpus):
            print(line, file=out)
        for status in server.engine.states:
            spec = status.spec
            if spec is not None and not spec.batchable:
                print(f"model {status.name} is NOT batched, its requests run one at a time: {spec.unbatchable_reason}", file=out)
            if status.inline:
                print(f"model {status.name} runs on the event loop: its batches take less time than a hand-over", file=out)
            if status.state is not ModelState.READY:
                print(f"model {status.name} is NOT ready: {status.reason}", file=out)
        out.flush()
        await stopping.wait()
    finished = await server.stop()
    print("drained" if finished else "drain timeout: some requests were not finished", file=out, flush=True)
    return 0 if finished else 1


def serve(settings: Settings, out: TextIO = sys.stdout) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    run: Callable[..., int]
    try:
        from uvloop import run
    except ImportError:  # no uvloop on this platform
        from asyncio import run
    return run(_serve(settings, out))
