"""Many tickets at once, cancelled at random: nobody gets another's rows, everything ends once, nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.invariants import violations
from shoal.core.ticket import Ticket, TicketState
from shoal.errors import ModelFailed
from shoal.testing.lanes import FakeBackend, answer_values, open_lane, tagged_ticket

Run = Callable[[Any], Any]


def picky(x: Any) -> Any:
    """Fails when it sees a row whose tag ends in 77."""
    if (x % 100 == 77).any():
        raise ValueError("a bad row")
    return 2 * x + 1


@pytest.mark.parametrize("executors", [1, 3])
@pytest.mark.parametrize("stage", [True, False])
def test_two_thousand_tickets_with_random_cancels(run: Run, executors: int, stage: bool) -> None:
    """2,000 tickets of 1 to 7 unique rows (and some of 20, which are cut), a tenth cancelled at random moments, 1 row in 100 bad.

    Every ticket that was not cancelled is told exactly once; answers are its own rows; it fails if and only if it has a bad row.
    """

    async def main() -> None:
        dice = random.Random(executors * 2 + stage)
        told: dict[Ticket, int] = {}
        wanted: dict[Ticket, list[float]] = {}
        cancelled: set[Ticket] = set()

        def ended(ticket: Ticket) -> None:
            told[ticket] = told.get(ticket, 0) + 1

        backends = [FakeBackend(picky) for _ in range(executors)]
        batching = BatchingSettings(max_batch_size=16)
        async with open_lane(backends, batching=batching, queue=QueueSettings(max_queue_rows=None), stage=stage) as lane:
            tag = 0
            open_tickets: list[Ticket] = []
            for number in range(2000):
                rows = 20 if number % 97 == 0 else dice.randint(1, 7)
                values = [float(tag + k) for k in range(rows)]
                tag += rows
                ticket = tagged_ticket(values, ended, level=0)
                wanted[ticket] = values
                assert lane.submit(ticket) is None
                open_tickets.append(ticket)
                if dice.random() < 0.3:
                    await asyncio.sleep(0)
                if dice.random() < 0.1:
                    victim = open_tickets.pop(dice.randrange(len(open_tickets)))
                    if victim not in told:
                        lane.cancel(victim)
                        cancelled.add(victim)
                if number % 100 == 0:
                    assert violations(lane._scheduler) == []
            await lane.drain()
            assert lane.idle
            assert violations(lane._scheduler) == []
            stats, snapshot = lane.stats, lane.snapshot()
        assert set(told) == set(wanted) - cancelled
        assert set(told.values()) == {1}
        assert cancelled
        for ticket in told:
            bad = any(value % 100 == 77 for value in wanted[ticket])
            assert (ticket.state is TicketState.FAILED) == bad
            if bad:
                assert isinstance(ticket.error, ModelFailed)
                assert ticket.error.message == "ValueError: a bad row"
            else:
                assert answer_values(ticket) == [2 * value + 1 for value in wanted[ticket]]
        assert stats.success.count + stats.fail.count == len(told)
        assert stats.cancelled + stats.discarded == len(cancelled)
        assert stats.inferences == sum(rows * each.executions for rows, each in stats.batch_sizes.items())
        assert snapshot.accepted == 2000
        assert snapshot.answered + snapshot.failed + snapshot.cancelled == 2000

    run(main())


def test_case_30_pending_tables_are_empty_after_mixed_sizes_and_timeouts(run: Run) -> None:
    """5,000 requests with rows cycling 16, 7, 7, 1, 13, every tenth already too late: all end, and no table keeps anything."""

    async def main() -> None:
        told: list[Ticket] = []
        async with open_lane([FakeBackend()], queue=QueueSettings(max_queue_rows=None)) as lane:
            sizes = (16, 7, 7, 1, 13)
            for number in range(5000):
                deadline_ns = 1 if number % 10 == 9 else None
                lane.submit(tagged_ticket([float(number)] * sizes[number % 5], told.append, deadline_ns=deadline_ns))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            await lane.drain()
            scheduler = lane._scheduler
            assert len(told) == 5000
            assert sum(ticket.state is TicketState.EXPIRED for ticket in told) == lane.stats.expired == 500
            assert all(answer_values(ticket) == [2 * values + 1] * ticket.rows for ticket, values in _answered(told))
            assert lane.idle
            assert len(scheduler._queue.lanes[0]) <= 64
            assert len(scheduler._timers) <= 128
            assert not scheduler._running
            assert not scheduler._splits
            assert not scheduler._reserved
            assert not lane._pool._completed  # type: ignore[attr-defined]
            assert not lane._pool._cell  # type: ignore[attr-defined]

    run(main())


def _answered(tickets: list[Ticket]) -> list[tuple[Ticket, float]]:
    """Answered tickets with the value that all their rows had."""
    return [
        (ticket, float(np.frombuffer(ticket.payload.inputs[0], np.float32)[0]))
        for ticket in tickets
        if ticket.state is TicketState.ANSWERED
    ]
