"""Executors without threads: batches run on the loop itself, either at once or as one task each. Same contract as `ThreadPool`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from shoal.core.batch import Batch
from shoal.engine.execution import AsyncRunner, Runner, execute, execute_async
from shoal.engine.executor import Completion
from shoal.engine.outcome import Outcome
from shoal.engine.quarantine import Quarantine

__all__ = ["InlinePool", "TaskPool"]

_log = logging.getLogger("shoal.engine")


class InlinePool:
    """Runs each batch in the loop's thread, in a turn of its own: for models that are cheaper than a thread hand-over.

    The loop stands still while the model runs.
    """

    can_stage = False
    size: int = 1

    def __init__(self, runner: Runner, clock: Callable[[], int]) -> None:
        self.restarts = 0
        self._runner = runner
        self._clock = clock
        self._quarantine = Quarantine()
        self._pending: deque[Batch] = deque()
        self._stopped = False
        self._context = contextvars.Context()
        self._loop: asyncio.AbstractEventLoop
        self._on_done: Callable[[Iterable[Completion]], None]

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        """Begin."""
        self._loop = loop
        self._on_done = on_done

    def dispatch(self, batch: Batch) -> None:
        """Run this batch in the loop's next turn."""
        self._pending.append(batch)
        self._loop.call_soon(self._run, context=self._context)

    def _run(self) -> None:
        batch = self._pending.popleft()
        try:
            outcome = execute(self._runner, batch.members, self._clock, self._quarantine, (KeyboardInterrupt,))
        except BaseException as error:
            self._on_done((Completion(batch, None, None, error),))
            raise
        self._on_done((Completion(batch, outcome, None),))

    def offer(self, batch: Batch) -> None:
        """Never called: nothing is staged."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Nothing is ever offered."""
        return False

    def stop(self) -> None:
        """Free the model."""
        if not self._stopped:
            self._stopped = True
            try:
                self._runner.close()
            except Exception:
                _log.exception("closing a model")

    async def close(self, grace_seconds: float) -> bool:
        """Free the model, after what is pending has run."""
        if self._pending:
            ran = asyncio.get_running_loop().create_future()
            self._loop.call_soon(ran.set_result, None)  # behind what is pending
            await ran
        self.stop()
        return True


class TaskPool:
    """Awaits an asynchronous function, one task for each batch, in an empty context; at most one batch per runner at a time."""

    can_stage = False

    def __init__(self, name: str, runners: Sequence[AsyncRunner], clock: Callable[[], int]) -> None:
        self.size = len(runners)
        self.restarts = 0
        self._name: Final = name
        self._all: Final = tuple(runners)
        self._free = list(runners)
        self._clock = clock
        self._quarantine = Quarantine()
        self._tasks: set[asyncio.Task[Outcome]] = set()
        self._context = contextvars.Context()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop
        self._on_done: Callable[[Iterable[Completion]], None]

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        """Begin."""
        self._loop = loop
        self._on_done = on_done

    def dispatch(self, batch: Batch) -> None:
        """Run this batch as a task."""
        runner = self._free.pop()
        running = execute_async(runner, batch.members, self._clock, self._quarantine)
        task = self._loop.create_task(running, name=f"shoal-{self._name}", context=contextvars.Context())
        self._tasks.add(task)
        # Reported from here, because a task that is cancelled before its first step runs no line of its own.
        task.add_done_callback(partial(self._finished, runner, batch), context=self._context)

    def _finished(self, runner: AsyncRunner, batch: Batch, task: asyncio.Task[Outcome]) -> None:
        self._tasks.discard(task)
        self._free.append(runner)
        died = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._on_done((Completion(batch, None if died else task.result(), None, died),))

    def offer(self, batch: Batch) -> None:
        """Never called: nothing is staged."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Nothing is ever offered."""
        return False

    def stop(self) -> None:
        """Free the functions."""
        if not self._stopped:
            self._stopped = True
            for runner in self._all:
                try:
                    runner.close()
                except Exception:
                    _log.exception("closing a function")

    async def close(self, grace_seconds: float) -> bool:
        """Wait for the running tasks; cancel what still runs when the time is up, and then it is False."""
        finished = True
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_seconds)
            finished = not late
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=grace_seconds)
        self.stop()
        return finished
