"""Executors: model exceptions, dying threads, contexts, memory. With real threads, held at gates instead of by time."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.invariants import violations
from shoal.core.ticket import Ticket, TicketState
from shoal.engine import executor
from shoal.engine.execution import execute
from shoal.engine.executor import ThreadPool
from shoal.engine.lane import Lane
from shoal.engine.local_pools import TaskPool
from shoal.engine.outcome import Outcome, Result
from shoal.engine.runner import TensorRunner
from shoal.errors import ModelFailed, WorkerLost
from shoal.testing.gates import Gate
from shoal.testing.lanes import TAGGED, Endings, FakeBackend, answer_values, open_lane, tagged_ticket

Run = Callable[[Any], Any]


def test_case_3_one_bad_item_of_eight_gets_its_status_and_seven_are_right(run: Run) -> None:
    """Batch of 8, item 5 raises an error with a 4xx status: it alone fails, with that status; the others get their own rows."""

    class Unprocessable(Exception):
        http_status = 422

    def picky(x: Any) -> Any:
        if 5.0 in x:
            raise Unprocessable("item five")
        return 2 * x + 1

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend(picky)]) as lane:
            tickets = [tagged_ticket([float(i)], endings) for i in range(8)]
            for ticket in tickets:
                lane.submit(ticket)
            await endings.wait(8)
            error = tickets[5].error
            assert isinstance(error, ModelFailed)
            assert (error.http_status, error.message) == (422, "Unprocessable: item five")
            for index in (0, 1, 2, 3, 4, 6, 7):
                assert answer_values(tickets[index]) == [2.0 * index + 1]

    run(main())


@pytest.mark.parametrize("rows_out", [lambda n: n - 1, lambda n: n * 30, lambda n: 0])
def test_case_5_wrong_row_counts_never_become_answers(run: Run, rows_out: Callable[[int], int]) -> None:
    """N - 1, 30 N and 0 rows for N: everyone fails with the output's name and both counts; nothing is cut or shifted; one call."""

    async def main() -> None:
        endings = Endings()
        backend = FakeBackend(lambda x: np.zeros((rows_out(len(x)), 1), np.float32))
        async with open_lane([backend]) as lane:
            for i in range(4):
                lane.submit(tagged_ticket([float(i)], endings))
            await endings.wait(4)
            expected = f'output "y": the model returned {rows_out(4)} rows for 4'
            assert [str(ticket.error) for ticket in endings.tickets] == [expected] * 4
            assert len(backend.calls) == 1
            assert lane.stats.executions == 0

    run(main())


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_an_executor_survives_what_the_model_raises(run: Run, exception: type[BaseException]) -> None:
    """Exits, interrupts and cancellations raised by a model fail its request; the same thread serves the next one."""
    bad = True

    def moody(x: Any) -> Any:
        if bad:
            raise exception
        return 2 * x + 1

    async def main() -> None:
        nonlocal bad
        endings = Endings()
        async with open_lane([FakeBackend(moody)]) as lane:
            lane.submit(tagged_ticket([1.0], endings))
            await endings.wait(1)
            assert isinstance(endings.tickets[0].error, ModelFailed)
            bad = False
            lane.submit(tagged_ticket([1.0], endings))
            await endings.wait(2)
            assert answer_values(endings.tickets[1]) == [3.0]
            assert lane.restarts == 0

    run(main())


def test_case_26_a_dying_executor_takes_only_its_own_batch_with_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread dies in a batch: that batch ends as `worker_lost`; the staged and the waiting requests are answered by another."""
    deaths = 1

    def deadly(runner: Any, members: Sequence[Ticket], clock: Callable[[], int], *rest: Any) -> Outcome:
        nonlocal deaths
        outcome = execute(runner, members, clock, *rest)
        if deaths:
            deaths -= 1
            raise MemoryError("outside of the model")
        return outcome

    monkeypatch.setattr(executor, "execute", deadly)

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)], batching=BatchingSettings(max_batch_size=2)) as lane:
            lost = tagged_ticket([0.0], endings)
            lane.submit(lost)
            await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, 1)
            others = [tagged_ticket([float(i)], endings) for i in range(1, 5)]
            for ticket in others:
                lane.submit(ticket)
            lane.poll()
            assert [ticket.state for ticket in others] == [TicketState.STAGED] * 2 + [TicketState.WAITING] * 2
            gate.open()
            await endings.wait(5)
            await lane.drain()
            assert endings.tickets[0] is lost
            assert isinstance(lost.error, WorkerLost)
            assert [answer_values(ticket) for ticket in others] == [[3.0], [5.0], [7.0], [9.0]]
            assert (lane.restarts, lane.stats.workers_lost) == (1, 1)
            assert violations(lane._scheduler) == []

    run(main())


def test_a_death_after_taking_the_staged_batch_loses_no_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread dies between taking its next batch and saying so: that batch is run by the thread that replaces it."""
    real = executor.Completion
    deaths = 1

    def deadly(batch: Any, outcome: Any, began: Any, died: Any = None) -> Any:
        nonlocal deaths
        if deaths and began is not None:
            deaths -= 1
            raise MemoryError("outside of the model")
        return real(batch, outcome, began, died)

    monkeypatch.setattr(executor, "Completion", deadly)

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)]) as lane:
            lost, saved = tagged_ticket([0.0], endings), tagged_ticket([1.0], endings)
            lane.submit(lost)
            await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, 1)
            lane.submit(saved)
            lane.poll()
            gate.open()
            await endings.wait(2)
            assert isinstance(lost.error, WorkerLost)
            assert answer_values(saved) == [3.0]
            assert violations(lane._scheduler) == []

    run(main())


def test_several_executors_run_at_the_same_time(run: Run) -> None:
    """Three executors, three batches inside the model at once, each with its own backend object."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        first = FakeBackend(gate=gate)
        backends = [first, first.clone(), first.clone()]
        async with open_lane(backends, batching=BatchingSettings(max_batch_size=1)) as lane:
            for i in range(4):
                lane.submit(tagged_ticket([float(i)], endings))
            await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, 3)
            assert lane.snapshot().running_batches == 3
            assert sorted(len(backend.calls) for backend in backends) == [1, 1, 1]
            gate.open()
            await endings.wait(4)
            assert sorted(value for ticket in endings.tickets for value in answer_values(ticket)) == [1.0, 3.0, 5.0, 7.0]
        assert [backend.closed for backend in backends] == [1, 1, 1]

    run(main())


class WatchedQueue:
    """A pool's queue that tells when a worker comes to wait for its next job."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.waiting = threading.Semaphore(0)
        self.put = self._queue.put
        self.empty = self._queue.empty

    def get(self) -> Any:
        """Called by workers."""
        self.waiting.release()
        return self._queue.get()


class WeakTicket(Ticket):
    """A ticket of which one can see that it is gone."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_executor_keeps_nothing_of_its_last_batch(run: Run, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a batch has ended and its owner let go, its ticket, inputs and outputs are gone, though the thread waits for more."""
    monkeypatch.setattr(logging.getLogger("shoal.engine"), "disabled", True)  # the test's own log keeps the traceback

    async def main() -> None:
        endings = Endings()
        memory: list[weakref.ref[Any]] = []

        def remember(x: Any) -> Any:
            y = 2 * x + 1
            memory.extend([weakref.ref(x), weakref.ref(y)])
            if fails:
                raise ValueError("no")
            return y

        queue = WatchedQueue()
        runner = TensorRunner(FakeBackend(remember), 4, time.monotonic_ns)
        pool = ThreadPool("watched", [runner], time.monotonic_ns)
        pool._jobs = queue  # type: ignore[assignment]
        lane = Lane("watched", "1", TAGGED, pool, batching=BatchingSettings(), queue=QueueSettings())
        ticket = WeakTicket(1, 4, None, tagged_ticket([1.0]).payload, endings)
        memory.append(weakref.ref(ticket))
        lane.submit(ticket)
        await endings.wait(1)
        endings.tickets.clear()
        del ticket
        for _ in range(2):  # before the first job, and after it
            await asyncio.get_running_loop().run_in_executor(None, queue.waiting.acquire)
        await lane.drain()
        if fails:
            gc.collect()  # an exception and the frames of its traceback refer to each other
        assert [reference() for reference in memory] == [None] * 3
        await lane.close()

    run(main())


def test_the_model_sees_no_context_of_any_caller(run: Run) -> None:
    """A context variable set by the caller, even before the lane was made, is not seen on the executor."""
    who: ContextVar[str] = ContextVar("who", default="nobody")
    seen: list[str] = []

    def look(x: Any) -> Any:
        seen.append(who.get())
        return x

    async def main() -> None:
        who.set("caller")
        endings = Endings()
        async with open_lane([FakeBackend(look)]) as lane:
            lane.submit(tagged_ticket([1.0], endings))
            await endings.wait(1)

    run(main())
    assert seen == ["nobody"]


def test_case_24_expired_requests_cost_no_executor(run: Run) -> None:
    """100 requests whose deadline passes while the model is busy, then 100 normal ones: all succeed, no thread is restarted."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend]) as lane:
            lane.submit(tagged_ticket([0.0], endings))
            await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, 1)
            for i in range(100):
                lane.submit(tagged_ticket([float(i)], endings, deadline_ns=1))
            lane.poll()
            assert lane.stats.expired == 100
            gate.open()
            await endings.wait(101)
            for i in range(100):
                lane.submit(tagged_ticket([float(i)], endings))
            await endings.wait(201)
            assert [answer_values(ticket) for ticket in endings.tickets[101:]] == [[2.0 * i + 1] for i in range(100)]
            assert lane.restarts == 0
            assert sum(map(len, backend.calls)) == 101

    run(main())


def test_a_task_that_is_cancelled_from_outside_loses_its_batch_only(run: Run) -> None:
    """Somebody cancels the task in which an asynchronous model runs: `worker_lost` for that batch, the next one is served."""

    class Slow:
        def __init__(self) -> None:
            self.hold = True

        async def run(self, members: Sequence[Ticket]) -> Result:
            if self.hold:
                await asyncio.get_running_loop().create_future()
            return Result([member.payload for member in members], 1, 1, 1)

        def close(self) -> None: ...

    async def main() -> None:
        runner, endings = Slow(), Endings()
        pool = TaskPool("slow", [runner], time.monotonic_ns)
        lane = Lane("slow", "1", TAGGED, pool, batching=BatchingSettings(), queue=QueueSettings())
        lane.submit(Ticket(payload="a", on_end=endings))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "shoal-slow"]
        task.cancel()
        await endings.wait(1)
        assert isinstance(endings.tickets[0].error, WorkerLost)
        runner.hold = False
        lane.submit(Ticket(payload="b", on_end=endings))
        await endings.wait(2)
        assert endings.tickets[1].answer == ["b"]
        assert await lane.close() is True

    run(main())
