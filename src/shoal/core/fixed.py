"""The plain composer: first in, first out inside strict levels, batches started by the fixed-window policy.

The hot path of most servers. It puts the queue, the policy and the executors' recent batch time together; the order is `queue`'s,
the question whether a batch may start is `policy`'s.
"""

from __future__ import annotations

from typing import Final

from shoal.core.batch import Batch
from shoal.core.expiry import ExpiryTimers
from shoal.core.latency import LatencyModel
from shoal.core.policy import FixedWindow, Plan
from shoal.core.queue import WaitQueue
from shoal.core.rules import FOREVER, Rules
from shoal.core.ticket import Ticket, TicketState

_WAITING: Final = TicketState.WAITING
_LASTING: Final = frozenset({"idle", "delay", "drain", "deadline", "full"})  # reasons that more tickets cannot take away
_OBSERVED_EVERY: Final = 8  # batches; nothing here goes by the model of time, so it need not cost each of them
_NONE_DROPPED: Final[list[Ticket]] = []


class FixedComposer:
    """Triton's rules on a `WaitQueue`. Costs: O(1) to decide in the usual case, O(members) to compose."""

    __slots__ = ("_batches", "_latency", "_policy", "_rules", "_timers", "queue", "service_ns")

    def __init__(self, rules: Rules, timers: ExpiryTimers, latency: LatencyModel) -> None:
        self._rules = rules
        self._latency = latency
        self._batches = 0
        self._timers = timers
        self._policy = FixedWindow(rules)
        self.queue = WaitQueue(rules.levels, rules.delay_expired)
        self.service_ns = 0

    def compose(self, now_ns: int, idle: int, draining: bool) -> Batch | None:
        """See `Composer`."""
        plan = self._plan(now_ns, draining)
        return None if plan is None else self._fill(Batch([], 0, None, ""), plan)

    def _latest_start_ns(self) -> int:
        """The latest start that still meets the earliest deadline; FOREVER without one.

        A quarter is added to the time that batches took lately. While that is unknown, a deadline inside the window means: now.
        """
        expiry_ns = self._timers.next_ns()
        if expiry_ns == FOREVER:
            return FOREVER
        if self.service_ns:
            return expiry_ns - self.service_ns - (self.service_ns >> 2)
        return FOREVER if expiry_ns > self.queue.oldest_ns() + self._rules.max_delay_ns else 0

    def _plan(self, now_ns: int, draining: bool) -> Plan | None:
        latest_ns = self._latest_start_ns() if self._rules.max_delay_ns else FOREVER
        return self._policy.plan(self.queue, now_ns, latest_ns, draining)

    def _fill(self, batch: Batch, plan: Plan) -> Batch:
        """Move tickets from the queue into a batch that is empty, or that is to grow."""
        queue = self.queue
        if plan.by_signature:
            stopped = queue.take_signature(plan.signature, plan.limit_rows, batch)
        else:
            stopped = queue.take(plan.limit_rows, batch)
        batch.reason = plan.reason
        if plan.reason != "preferred":
            if self._rules.single or batch.rows >= self._rules.limit_rows:
                batch.reason = "full"
            elif stopped:
                batch.reason = "shape"
        return batch

    def regrow(self, batch: Batch, now_ns: int, draining: bool) -> bool:
        """See `Composer`. It stays a batch even if a window would be open again: whoever holds it may start it at any moment."""
        members = batch.members
        if batch.reason in _LASTING and not self._overtaken(batch) and not self._rules.reorder:
            count = len(members)
            if self.queue.tickets:
                self._fill(batch, self._policy.everything(batch.reason))
            return len(batch.members) != count
        for ticket in members:
            ticket.state = _WAITING
        self.put_back(batch)
        batch.members, batch.rows = [], 0
        self._fill(batch, self._plan(now_ns, draining) or self._policy.everything(batch.reason))
        return batch.members != members

    def may_change(self, batch: Batch) -> bool:
        """See `Composer`. O(levels)."""
        return batch.rows < self._rules.limit_rows or self._overtaken(batch)

    def _overtaken(self, batch: Batch) -> bool:
        """Whether something waits that comes before the last member."""
        last = batch.members[-1].lane
        return last > 0 and any(self.queue.lanes[:last])

    def put_back(self, batch: Batch) -> None:
        """See `Composer`."""
        self.queue.put_back(batch.members, batch.rows)

    def take_dropped(self) -> list[Ticket]:
        """See `Composer`. Nothing is ever dropped here."""
        return _NONE_DROPPED

    def expired(self, tickets: list[Ticket]) -> None:
        """See `Composer`."""

    def wakeup_ns(self, idle: int, draining: bool) -> int:
        """See `Composer`."""
        latest_ns = self._latest_start_ns() if self._rules.max_delay_ns else FOREVER
        return self._policy.window_end_ns(self.queue, latest_ns, draining)

    def think(self, steps: int) -> bool:
        """See `Composer`. Nothing is there to be thought about."""
        return False

    def started(self, batch: Batch, now_ns: int) -> None:
        """See `Composer`."""

    def completed(self, batch: Batch, taken_ns: int) -> None:
        """See `Composer`."""
        decayed_ns = self.service_ns - (self.service_ns >> 5)
        self.service_ns = max(taken_ns, decayed_ns, 1)
        self._batches += 1
        if not self._batches % _OBSERVED_EVERY:
            self._latency.observe(batch.rows, 0, taken_ns)
