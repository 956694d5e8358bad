"""One blocking call in a thread of its own, awaited from the loop. For loading models; never for requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(name: str, function: Callable[[], T], *, discard: Callable[[T], None]) -> T:
    """The function's result, or what it raised (SystemExit and the like included).

    If the caller is cancelled meanwhile, the thread goes on, and its result is handed to `discard`. The thread is a daemon: a call
    that never returns keeps nobody from ending.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))
        elif error is None:
            discard(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    result, error = await ended
    thread.join(1.0)  # it has delivered and is about to end
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
