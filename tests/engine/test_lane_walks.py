"""Random walks of a lane whose executors are moved by hand, one event at a time, in every order that threads could bring about.

Executors see a batch's members as they are when they begin, take the offered batch whenever they like, and are heard of later. What
must hold in every order: whoever is answered gets the rows of the own request, everybody ends once, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.invariants import violations
from shoal.core.ticket import Ticket, TicketState
from shoal.engine.execution import execute
from shoal.engine.executor import Completion
from shoal.engine.lane import Lane
from shoal.engine.runner import TensorRunner
from shoal.testing.clock import ManualClock
from shoal.testing.lanes import TAGGED, Endings, FakeBackend, answer_values, tagged_ticket


class Workers:
    """A pool of `size` executors; each is idle or runs (batch, its members when it began)."""

    can_stage = True
    restarts = 0

    def __init__(self, size: int, runner: TensorRunner, clock: Callable[[], int]) -> None:
        self.size = size
        self.jobs: deque[Batch] = deque()
        self.cell: list[Batch] = []
        self.busy: list[tuple[Batch, Sequence[Ticket]]] = []
        self.unheard: list[Completion] = []
        self._runner = runner
        self._clock = clock
        self.on_done: Callable[[Iterable[Completion]], None]

    def start(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Iterable[Completion]], None]) -> None:
        self.on_done = on_done

    def dispatch(self, batch: Batch) -> None:
        self.jobs.append(batch)

    def offer(self, batch: Batch) -> None:
        assert not self.cell, "two batches are offered"
        self.cell.append(batch)

    def withdraw(self) -> bool:
        return bool(self.cell) and self.cell.pop() is not None

    def stop(self) -> None:
        """Nothing to end."""

    async def close(self, grace_seconds: float) -> bool:
        return True

    def begin(self) -> None:
        """An idle executor takes the next job."""
        if self.jobs and len(self.busy) < self.size:
            batch = self.jobs.popleft()
            self.busy.append((batch, batch.members))

    def finish(self, which: int, *, dies: bool = False) -> None:
        """An executor is through: it takes the offered batch, if there is one, and will be heard of."""
        if not self.busy:
            return
        batch, members = self.busy.pop(which % len(self.busy))
        outcome = None if dies else execute(self._runner, members, self._clock)
        began = self.cell.pop() if self.cell and not dies else None
        if began is not None:
            self.busy.append((began, began.members))
        self.unheard.append(Completion(batch, outcome, began, RuntimeError("died") if dies else None))

    def report(self, count: int) -> None:
        """The loop hears of the first so many that are through."""
        heard, self.unheard = self.unheard[:count], self.unheard[count:]
        if heard:
            self.on_done(heard)


def no_negatives(x: Any) -> Any:
    """The rule of the fake model, but a batch with a negative row fails."""
    if (x < 0).any():
        raise ValueError("negative")
    return 2 * x + 1


_EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 9), st.booleans()),
    st.tuples(st.just("submit"), st.integers(1, 3), st.just(False)),
    st.tuples(st.just("expiring"), st.integers(1, 9), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.just(False)),
    st.tuples(st.just("poll"), st.integers(0, 3), st.just(False)),
    st.tuples(st.just("begin"), st.just(0), st.just(False)),
    st.tuples(st.just("finish"), st.integers(0, 3), st.just(False)),
    st.tuples(st.just("die"), st.integers(0, 3), st.just(False)),
    st.tuples(st.just("report"), st.integers(1, 3), st.just(False)),
)


@given(
    events=st.lists(_EVENTS, max_size=60),
    executors=st.integers(1, 3),
    limit=st.integers(1, 5),
    delay_ms=st.sampled_from([0.0, 2.0]),
    levels=st.integers(1, 2),
)
@settings(deadline=None, max_examples=400)
def test_in_every_order_everybody_gets_the_own_rows(
    events: list[tuple[str, int, bool]], executors: int, limit: int, delay_ms: float, levels: int
) -> None:
    """Submissions, cancellations, expiries, failing rows, dying executors and late reports, in any order."""

    async def main() -> None:
        clock = ManualClock()
        workers = Workers(executors, TensorRunner(FakeBackend(no_negatives), limit, clock), clock)
        batching = BatchingSettings(max_batch_size=limit, max_delay_ms=delay_ms)
        queue = QueueSettings(max_queue_rows=30, priority_levels=levels)
        lane = Lane("m", "1", TAGGED, workers, batching=batching, queue=queue, clock=clock)
        endings = Endings()
        wanted: dict[Ticket, list[float]] = {}
        cancelled: set[Ticket] = set()
        tag = 0.0
        for event, number, flag in events:
            if event in ("submit", "expiring"):
                values = [tag + row for row in range(number)]
                if flag:
                    values[number // 2] = -1.0
                tag += 100
                deadline_ns = clock() + 1_500_000 if event == "expiring" else None
                ticket = tagged_ticket(values, endings, deadline_ns=deadline_ns, level=int(tag / 100) % levels + 1)
                if lane.submit(ticket) is None:
                    wanted[ticket] = values
            elif event == "cancel" and wanted:
                ticket = list(wanted)[number % len(wanted)]
                if ticket not in endings.tickets:
                    cancelled.add(ticket)
                lane.cancel(ticket)
            elif event == "poll":
                clock.advance(ms=number)
                lane.poll()
            elif event == "begin":
                workers.begin()
            elif event in ("finish", "die"):
                workers.finish(number, dies=event == "die")
            elif event == "report":
                workers.report(number)
            found = violations(lane._scheduler)
            assert found == [], found
        lane.start_draining()
        for _ in range(1000):
            lane.poll()
            workers.begin()
            workers.finish(0)
            workers.report(1)
            if lane.idle:
                break
        assert lane.idle and violations(lane._scheduler) == []
        assert len(endings.tickets) == len(set(endings.tickets)) and set(endings.tickets) == wanted.keys() - cancelled
        for ticket in endings.tickets:
            if ticket.state is TicketState.ANSWERED:
                assert answer_values(ticket) == [2 * value + 1 for value in wanted[ticket]]
            else:
                assert ticket.state in (TicketState.FAILED, TicketState.EXPIRED) and ticket.error is not None
        await lane.close()

    asyncio.run(main())
