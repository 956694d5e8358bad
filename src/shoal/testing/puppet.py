"""A driver moved by hand: it does with a scheduler's decisions what an engine does, without threads, models or waiting.

For tests of schedulers and of code that stands between requests and a scheduler. It holds no rules of its own.
"""

from __future__ import annotations

from collections.abc import Hashable

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.decisions import Dispatch, Expire, Refuse, Stage
from shoal.core.invariants import check_invariants
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState
from shoal.testing.clock import ManualClock


class PuppetDriver:
    """A scheduler, a manual clock, and a record of what was decided. Invariants are checked after every step.

    `running` are the batches under way, oldest first; `staged` the one offered; `expired` all expired tickets; `refusals` all
    refusals; `started` all batches that ever ran, in order.
    """

    def __init__(
        self,
        batching: BatchingSettings | None = None,
        queue: QueueSettings | None = None,
        *,
        executors: int = 1,
        stage: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.scheduler = Scheduler(batching or BatchingSettings(), queue or QueueSettings(), executors=executors, stage=stage)
        self.running: list[Batch] = []
        self.staged: Batch | None = None
        self.started: list[Batch] = []
        self.expired: list[Ticket] = []
        self.refusals: list[Refuse] = []

    def submit(
        self,
        rows: int = 1,
        *,
        signature: Hashable = None,
        level: int = 0,
        timeout_ms: float | None = None,
        payload_bytes: int = 0,
        poll: bool = True,
    ) -> Ticket:
        """Submit one ticket now; look at its state for what became of it."""
        deadline_ns = None if timeout_ms is None else self.clock.now_ns + round(timeout_ms * 1e6)
        ticket = Ticket(rows, payload_bytes, signature, None, None, deadline_ns, level)
        refusal = self.scheduler.submit(ticket, self.clock.now_ns)
        if refusal is not None:
            self.refusals.append(refusal)
        if poll:
            self.poll()
        return ticket

    def poll(self) -> None:
        """Ask for what is due and do it."""
        for decision in self.scheduler.poll(self.clock.now_ns):
            match decision:
                case Dispatch(batch):
                    self._began(batch)
                case Stage(batch):
                    self.staged = batch
                case Expire(tickets):
                    self.expired += tickets
        check_invariants(self.scheduler)

    def advance(self, ms: float) -> None:
        """Move the clock, stopping at every wake-up that the scheduler asks for, as a timer would."""
        end_ns = self.clock.now_ns + round(ms * 1e6)
        while (wakeup_ns := self.scheduler.next_wakeup_ns()) is not None and wakeup_ns <= end_ns:
            self.clock.now_ns = max(self.clock.now_ns, wakeup_ns)
            self.poll()
            again_ns = self.scheduler.next_wakeup_ns()
            if again_ns is not None and again_ns <= self.clock.now_ns:
                raise AssertionError("the scheduler asks to be polled again at once: a busy loop")
        self.clock.now_ns = end_ns

    def finish(self, batch: Batch | None = None, *, failed: tuple[Ticket, ...] = ()) -> list[Ticket]:
        """End a running batch (the oldest), start the staged one if there is one, and poll. Returns cut tickets that ended."""
        batch = batch or self.running[0]
        self.running.remove(batch)
        for ticket in batch.members:
            ticket.state = TicketState.FAILED if ticket in failed else TicketState.ANSWERED
        ended = list(self.scheduler.complete(batch, self.clock.now_ns))
        staged = self.scheduler.staged
        if staged is not None:
            self.scheduler.start(staged, self.clock.now_ns)
            self._began(staged)
        self.poll()
        return ended

    def finish_all(self) -> None:
        """End batch after batch until nothing runs."""
        while self.running:
            self.finish()

    def _began(self, batch: Batch) -> None:
        self.running.append(batch)
        self.started.append(batch)
        if self.staged is batch:
            self.staged = None
