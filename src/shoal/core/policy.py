"""The fixed-window policy: may a batch start now, why, and how many rows may it take?

Triton's rules without their faults. Decides only; takes nothing out of the queue, changes no state, and knows nothing of slots.
Two facts keep it O(1) in the usual case. While a window is open and nothing is reordered, everything that waits is in the batch to
come: had the next ticket differed or not fitted, the batch could not grow and would have gone at once. So the totals of the queue
are the totals of the pending batch, and no prefix has to be counted again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from shoal.core.queue import WaitQueue
from shoal.core.rules import FOREVER, Rules
from shoal.core.ticket import Ticket


class Plan(NamedTuple):
    """A batch may start: at most `limit_rows` rows; `reason` unless it turns out to be full or stopped; of which signature.

    `by_signature` is True where tickets of other signatures are passed over.
    """

    reason: str
    limit_rows: int
    by_signature: bool = False
    signature: Hashable = None


class FixedWindow:
    """Rules of one model, applied to its queue.

    `plan` answers None where waiting may still pay; then `window_end_ns` says when to ask again if nothing else happens.
    """

    __slots__ = ("_drain", "_idle", "_limit", "_rules", "_shape")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        limit = 0 if rules.single else rules.limit_rows  # 0: the head alone, since the head always fits
        self._limit: Final = limit
        self._idle: Final = Plan("idle", limit)
        self._drain: Final = Plan("drain", limit)
        self._shape: Final = Plan("shape", limit)

    def everything(self, reason: str) -> Plan:
        """A batch of whatever fits, from the head on."""
        return Plan(reason, self._limit)

    def plan(self, queue: WaitQueue, now_ns: int, latest_start_ns: int, draining: bool) -> Plan | None:
        """Judge a queue in which something waits. `latest_start_ns`: starting later would miss a deadline."""
        rules = self._rules
        if rules.reorder:
            return self._plan_reordered(queue, now_ns, latest_start_ns, draining)
        if draining:
            return self._drain
        if not rules.max_delay_ns:
            return self._idle
        if queue.oldest_ns() + rules.max_delay_ns <= now_ns:
            return Plan("delay", self._limit)
        if rules.preferred:
            if queue.rows >= rules.preferred_min_rows or queue.mixed:
                plan = self._plan_preferred(queue)
                if plan is not None:
                    return plan
        elif queue.rows >= rules.full_rows or queue.is_mixed(rules.full_rows):
            return self._shape
        if latest_start_ns <= now_ns or queue.has_delayed():
            return Plan("deadline", self._limit)
        return None

    def window_end_ns(self, queue: WaitQueue, latest_start_ns: int, draining: bool) -> int:
        """When `plan` will say yes if nothing else happens; in the past if it says so already."""
        rules = self._rules
        oldest_ns = queue.oldest_ns()
        if oldest_ns == FOREVER:  # only delayed tickets wait
            return 0
        if self.plan(queue, oldest_ns, latest_start_ns, draining) is not None:
            return oldest_ns
        return min(oldest_ns + rules.max_delay_ns, latest_start_ns)

    def _plan_preferred(self, tickets: Iterable[Ticket]) -> Plan | None:
        """Triton's walk over a pending batch that is younger than its window."""
        rules = self._rules
        best = rows = 0
        hit = stopped = False
        signature: Hashable = None
        for ticket in tickets:
            if rows:
                if ticket.signature != signature or rows + ticket.rows > rules.limit_rows:
                    stopped = True
                    break
                if rows + ticket.rows > rules.full_rows and not best:
                    best = rows  # the next would pass the largest preferred size and none was hit: what is pending goes
            else:
                signature = ticket.signature
            rows += ticket.rows
            if rows in rules.preferred:
                best = rows
                hit = True
        if best:
            return Plan("preferred" if hit else "shape", best)
        if stopped or rows >= rules.full_rows:
            return self._shape
        return None

    def _plan_reordered(self, queue: WaitQueue, now_ns: int, latest_start_ns: int, draining: bool) -> Plan | None:
        """The first signature, in the order of the queue, whose batch may start.

        The head's signature comes first, so the head is passed over only while its own window is open, and by full batches.
        """
        rules = self._rules
        head = queue.head()
        assert head is not None
        if draining or not rules.max_delay_ns:
            return Plan("drain" if draining else "idle", self._limit, True, head.signature)
        groups: dict[Hashable, list[Ticket]] = {}
        for ticket in queue:
            groups.setdefault(ticket.signature, []).append(ticket)
        for signature, group in groups.items():
            if min(ticket.accepted_ns for ticket in group) + rules.max_delay_ns <= now_ns:
                return Plan("delay", self._limit, True, signature)
            if rules.preferred:
                plan = self._plan_preferred(group)
                if plan is not None:
                    return Plan(plan.reason, plan.limit_rows, True, signature)
            elif sum(ticket.rows for ticket in group) >= rules.full_rows:
                return Plan("shape", self._limit, True, signature)
        if latest_start_ns <= now_ns or queue.has_delayed():
            urgent = min(queue, key=lambda ticket: ticket.expiry_ns)
            return Plan("deadline", self._limit, True, urgent.signature)
        return None
