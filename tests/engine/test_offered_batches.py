"""A batch lies ready while a piece of a cut request fails: executors are moved by hand, so the order of events is certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.invariants import violations
from shoal.core.ticket import TicketState
from shoal.engine.execution import execute
from shoal.engine.executor import Completion
from shoal.engine.lane import Lane
from shoal.engine.runner import TensorRunner
from shoal.errors import ModelFailed
from shoal.testing.clock import ManualClock
from shoal.testing.lanes import TAGGED, Endings, FakeBackend, answer_values, tagged_ticket

Run = Callable[[Any], Any]


class HandPool:
    """Two executors that do what the test says: `dispatched` batches run, `cell` holds the one that is offered."""

    can_stage = True
    size = 2
    restarts = 0

    def __init__(self) -> None:
        self.dispatched: list[Batch] = []
        self.cell: list[Batch] = []
        self.on_done: Callable[[Iterable[Completion]], None]

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        self.on_done = on_done

    def dispatch(self, batch: Batch) -> None:
        self.dispatched.append(batch)

    def offer(self, batch: Batch) -> None:
        self.cell.append(batch)

    def withdraw(self) -> bool:
        return bool(self.cell) and self.cell.pop() is not None

    def stop(self) -> None:
        """Nothing to end."""

    async def close(self, grace_seconds: float) -> bool:
        return True


def refuse_one(x: Any) -> Any:
    """Fails for any batch with a row of value 1."""
    if (x == 1).any():
        raise ValueError("one")
    return 2 * x + 1


@pytest.mark.parametrize("reported_together", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_failed_piece_moves_nobody_elses_rows(run: Run, begun: bool, reported_together: bool) -> None:
    """A cut request fails while its last piece stands in the offered batch, before another caller's rows.

    Whether or not the other executor has begun that batch by then: the other caller gets its own rows. Guards against members
    being taken out of a batch that is under way, which would shift everybody's rows behind them.
    """

    async def main() -> None:
        clock = ManualClock()
        pool, endings = HandPool(), Endings()
        runner = TensorRunner(FakeBackend(refuse_one), 4, clock)
        lane = Lane("m", "1", TAGGED, pool, batching=BatchingSettings(max_batch_size=4), queue=QueueSettings(), clock=clock)
        cut = tagged_ticket([float(value) for value in range(1, 11)], endings)
        other = tagged_ticket([100.0, 101.0], endings)
        lane.submit(cut)
        lane.submit(other)
        lane.poll()
        first, second = pool.dispatched
        (offered,) = pool.cell
        assert [member.rows for member in offered.members] == [2, 2]
        began = pool.cell.pop() if begun else None
        members = offered.members  # as the executor sees them
        completions = [
            Completion(first, execute(runner, first.members, clock), None),
            Completion(second, execute(runner, second.members, clock), began),
        ]
        for completion in [completions] if reported_together else [[one] for one in completions]:
            pool.on_done(completion)
            assert violations(lane._scheduler) == []
        if begun:
            pool.on_done([Completion(offered, execute(runner, members, clock), None)])
        else:
            last = pool.dispatched[-1]
            pool.on_done([Completion(last, execute(runner, last.members, clock), None)])
        assert cut.state is TicketState.FAILED and isinstance(cut.error, ModelFailed)
        assert answer_values(other) == [201.0, 203.0]
        assert violations(lane._scheduler) == [] and lane.idle
        await lane.close()

    run(main())


@pytest.mark.parametrize("reported_together", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_an_offered_batch_that_memory_would_not_take_is_put_together_anew(run: Run, begun: bool, reported_together: bool) -> None:
    """Four rows do not fit, while four more lie ready: those start two by two, or are halved if somebody has begun them."""

    def model(x: Any) -> Any:
        if len(x) > 2:
            raise MemoryError("no room")
        return 2 * x + 1

    async def main() -> None:
        clock = ManualClock()
        pool, endings = HandPool(), Endings()
        backend = FakeBackend(model)
        runner = TensorRunner(backend, 4, clock)
        lane = Lane("m", "1", TAGGED, pool, batching=BatchingSettings(max_batch_size=4), queue=QueueSettings(), clock=clock)
        tickets = [tagged_ticket([float(value)], endings) for value in range(12)]
        for ticket in tickets:
            lane.submit(ticket)
        lane.poll()
        first, second = pool.dispatched
        (offered,) = pool.cell
        began = pool.cell.pop() if begun else None
        completions = [
            Completion(first, execute(runner, first.members, clock), began),
            Completion(second, execute(runner, second.members, clock), None),
        ]
        for completion in [completions] if reported_together else [[one] for one in completions]:
            pool.on_done(completion)
            assert violations(lane._scheduler) == []
        assert lane.memory_cap_rows == 2
        after = len(backend.calls)
        running = [offered] if begun else pool.dispatched[2:]
        while running or pool.cell:
            batch = running.pop() if running else pool.cell.pop()
            pool.on_done([Completion(batch, execute(runner, batch.members, clock), None)])
            assert violations(lane._scheduler) == []
        sizes = [len(call) for call in backend.calls[after:]]
        assert sizes == ([4, 2, 2] if begun else [2, 2])
        assert [answer_values(ticket) for ticket in tickets] == [[2.0 * value + 1] for value in range(12)]
        assert len(endings.tickets) == 12 and lane.idle
        await lane.close()

    run(main())
