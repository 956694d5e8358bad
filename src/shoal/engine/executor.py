"""Thread executors: workers that run batches, the cell in which the next batch lies ready, and the way back to the loop.

A batch reaches a worker through a queue (`dispatch`: an executor is free) or through the cell (`offer`: all are busy). A worker
that has finished looks into the cell before anything else, so the next batch starts without waiting for the loop; its completion
says so. The loop may take a batch out of the cell again (`withdraw`) as long as no worker has. One append or pop of a deque is
atomic under the GIL; there is no other lock. Knows batches and runners; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol

from shoal.core.batch import Batch
from shoal.engine.execution import Runner, execute
from shoal.engine.outcome import Outcome
from shoal.engine.quarantine import Quarantine

__all__ = ["Completion", "Pool", "ThreadPool"]

_log = logging.getLogger("shoal.engine")
_JOIN_SECONDS = 1.0


class Completion:
    """A batch ended on an executor. `outcome` is None if the executor died, of `died`. `began`: the offered batch that it took."""

    __slots__ = ("batch", "began", "died", "outcome")

    def __init__(self, batch: Batch, outcome: Outcome | None, began: Batch | None, died: BaseException | None = None) -> None:
        self.batch = batch
        self.outcome = outcome
        self.began = began
        self.died = died


class Pool(Protocol):
    """The executors of one lane. All methods are called on the loop's thread."""

    size: int
    can_stage: bool
    restarts: int

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        """Begin. `on_done` is called on the loop with whatever has been completed."""
        ...

    def dispatch(self, batch: Batch) -> None:
        """Run this batch on a free executor."""
        ...

    def offer(self, batch: Batch) -> None:
        """Let the next executor that becomes free take this batch by itself. At most one is offered."""
        ...

    def withdraw(self) -> bool:
        """Take the offered batch back; False if an executor has taken it already."""
        ...

    def stop(self) -> None:
        """Let executors end when what they run is done. Does not wait."""
        ...

    async def close(self, grace_seconds: float) -> bool:
        """`stop`, and wait until all have ended; False if some had not when the time was up. They are left behind, unheard."""
        ...


class _Worker:
    """One thread and what it runs."""

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self.runner = runner
        self.batch: Batch | None = None
        self.began: Batch | None = None  # taken from the cell, not yet reported
        self.thread: threading.Thread


class ThreadPool:
    """One thread for each runner.

    Threads are daemons, so that a model that hangs can't keep the interpreter from ending; `close` joins them. A new thread starts
    with an empty context, so nothing of a caller's context variables is seen by the model. If a worker dies of anything that is not
    the model's (those are caught in `execute`), another with the same runner takes its place.
    """

    can_stage = True

    def __init__(self, name: str, runners: Sequence[Runner], clock: Callable[[], int]) -> None:
        self.size = len(runners)
        self.restarts = 0
        self._clock = clock
        self._quarantine = Quarantine()
        self._jobs: SimpleQueue[Batch | None] = SimpleQueue()
        self._cell: deque[Batch] = deque()
        self._completed: deque[Completion] = deque()
        self._waking = False
        self._stopping = False
        self._deaf = False
        self._abandoned = False
        self._workers = {_Worker(f"shoal-{name}-{index}", runner) for index, runner in enumerate(runners)}
        self._all_ended: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._on_done: Callable[[Iterable[Completion]], None]
        self._context = contextvars.Context()

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        """Start the threads."""
        self._loop = loop
        self._on_done = on_done
        for worker in self._workers:
            self._start(worker)

    def _start(self, worker: _Worker) -> None:
        worker.thread = threading.Thread(target=self._live, args=(worker,), name=worker.name, daemon=True)
        worker.thread.start()

    # ---------------------------------------------------------------- on the loop

    def dispatch(self, batch: Batch) -> None:
        """Run this batch on a free executor."""
        self._jobs.put(batch)

    def offer(self, batch: Batch) -> None:
        """Let the next worker that becomes free take this batch by itself."""
        self._cell.append(batch)

    def withdraw(self) -> bool:
        """Take the offered batch back; False if a worker has taken it already."""
        try:
            self._cell.pop()
        except IndexError:
            return False
        return True

    def stop(self) -> None:
        """Let workers end when what they run is done. Does not wait."""
        if not self._stopping:
            self._stopping = True
            self._cell.clear()
            for _ in self._workers:
                self._jobs.put(None)

    async def close(self, grace_seconds: float) -> bool:
        """Stop, and wait for the threads; False if one was still busy when the time was up."""
        threads = [worker.thread for worker in self._workers]
        self.stop()
        if self._workers:
            self._all_ended = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._all_ended, grace_seconds)
            except TimeoutError:
                self._abandoned = True
                names = sorted(worker.name for worker in self._workers)
                _log.warning("left behind, still running the model after %.1f s: %s", grace_seconds, ", ".join(names))
        left = {worker.thread for worker in self._workers}
        for thread in threads:
            if thread not in left:
                thread.join(_JOIN_SECONDS)  # it has sent its last message
        return not left

    def _woken(self) -> None:
        self._waking = False  # before the first pop: what is appended from now on wakes us again
        completed = self._completed
        taken: list[Completion] = []
        while completed:
            taken.append(completed.popleft())
        if taken and not self._abandoned:
            self._on_done(taken)

    def _ended(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        if not self._workers and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _replace(self, worker: _Worker) -> None:
        """A worker died, and its last completion has been reported: another takes its place."""
        self.restarts += 1
        self._start(worker)

    # ---------------------------------------------------------------- on the workers' threads

    def _live(self, worker: _Worker) -> None:
        try:
            self._work(worker)
        except BaseException as error:
            _log.exception("executor %s died", worker.name)
            if worker.batch is not None:
                self._report(Completion(worker.batch, None, worker.began, error))
            if worker.began is not None:
                self._jobs.put(worker.began)
            worker.batch = worker.began = None
            self._call_loop(self._replace, worker)
            return
        try:
            worker.runner.close()
        except Exception:
            _log.exception("closing the model of executor %s", worker.name)
        self._call_loop(self._ended, worker)

    def _work(self, worker: _Worker) -> None:
        jobs, cell, clock, runner, quarantine = self._jobs, self._cell, self._clock, worker.runner, self._quarantine
        while not self._deaf:
            worker.batch = jobs.get()
            if worker.batch is None:
                return
            while worker.batch is not None:
                outcome = execute(runner, worker.batch.members, clock, quarantine)
                try:
                    worker.began = cell.pop()
                except IndexError:
                    worker.began = None
                self._report(Completion(worker.batch, outcome, worker.began))
                worker.batch, worker.began = worker.began, None
                del outcome  # nothing of a batch stays alive while we wait for the next

    def _report(self, completion: Completion) -> None:
        self._completed.append(completion)
        if not self._waking:
            self._waking = True
            self._call_loop(self._woken)

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args, context=self._context)
        except RuntimeError:
            self._deaf = True  # the loop is closed: nobody will ever ask for anything again
