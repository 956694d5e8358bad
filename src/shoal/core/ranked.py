"""The ranked composer: which of the waiting requests run next, together, and when.

Order is the queue's (`ranked_queue`): levels with ageing, tenants by weight, deadlines. Here a batch is made of it: one signature,
within its budget, of lengths that go well together, large enough and no larger than its deadlines allow (`selection`), at the time
that the rule for starting says (`pacing`). Nothing here counts bounds or ends tickets; what cannot be answered in time any more is
handed to the scheduler by `take_dropped`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from heapq import nlargest
from typing import Final

from shoal.core.batch import Batch
from shoal.core.latency import LatencyModel
from shoal.core.losses import Losses
from shoal.core.pacing import Pacing
from shoal.core.ranked_queue import Band, Flow, RankedQueue, Run, first_rows, in_order
from shoal.core.rules import FOREVER, Rules
from shoal.core.selection import best_run, cutoff_of_several, largest_in_time, round_to_allowed
from shoal.core.ticket import Ticket, TicketState

_WAITING: Final = TicketState.WAITING
_STAGED: Final = TicketState.STAGED

View = tuple[Flow, Sequence[int], Sequence[Ticket]]
"""A flow with those of its keys and tickets that may be taken: its own lists, or a selection of one signature."""

Entry = tuple[Flow, Sequence[Ticket], int]
"""A flow with its tickets that may be taken, and the index of the first of them."""


class _Draft:
    """A batch being made: its members, and what they come to."""

    __slots__ = ("cost", "due_ns", "longest", "members", "rows", "runs", "signature", "stopped", "tokens")

    def __init__(self) -> None:
        self.members: list[Ticket] = []
        self.signature: Hashable = None
        self.rows = 0
        self.cost = 0.0
        self.tokens = 0
        self.longest = 0
        self.due_ns = 1 << 64  # the earliest deadline of a member
        self.runs: list[Run] | None = []  # where the members stand in the queue, if that is known
        self.stopped = ""  # the reason why something that waited was not taken


class RankedComposer:
    """See `Composer`. Costs: O(flows · log n) to decide, O(members · log flows) to compose; with lengths O(window) instead."""

    def __init__(self, rules: Rules, latency: LatencyModel, executors: int) -> None:
        self._rules = rules
        self._latency = latency
        self._executors = executors
        self.queue = RankedQueue(rules)
        self.pacing = Pacing(rules, latency, executors)
        if rules.adaptive:
            self.queue.arrivals = self.pacing.arrivals
        self.losses = Losses(rules.fair)
        self._dropped: list[Ticket] = []
        self._running: dict[Batch, int] = {}  # when each is expected to end
        self._simple_cost = rules.max_cost == FOREVER and not rules.window_rows
        self._unit_cost = rules.cost_unit == "rows"
        self._by_rows = self._simple_cost and self._unit_cost and not rules.preferred and not rules.allowed
        self._by_work = rules.padded or rules.ragged or not self._unit_cost
        self._work_per_row = 1.0  # of recent batches; for what a batch of so many rows may take
        self._length_now = 0
        self.service_ns = 0

    # ---------------------------------------------------------------- how long

    def _span(self, rows: int) -> int:
        """Nanoseconds, on the safe side, of a batch of so many rows such as come lately."""
        if self._by_work:
            return self._latency.upper_ns(rows * self._work_per_row, self._length_now)
        return self._latency.upper_ns(rows)

    def _work(self, draft: _Draft) -> float:
        """What the time of this batch depends on: rows, padded or real tokens, or the cost that a function said."""
        if self._rules.padded:
            return draft.longest * draft.rows
        if self._rules.ragged:
            return draft.tokens
        return draft.rows if self._unit_cost else draft.cost

    def _draft_span(self, draft: _Draft) -> int:
        return self._latency.upper_ns(self._work(draft), draft.longest) if self._by_work else self._latency.upper_ns(draft.rows)

    def _alone_span(self, ticket: Ticket) -> int:
        if self._rules.padded or self._rules.ragged:
            return self._latency.upper_ns(ticket.rows * ticket.length, ticket.length)
        return self._latency.upper_ns(self._rules.cost_of(ticket))

    # ---------------------------------------------------------------- compose

    def compose(self, now_ns: int, idle: int, draining: bool) -> Batch | None:
        """See `Composer`."""
        return self._compose(now_ns, idle, draining, forced=False)

    def _compose(self, now_ns: int, idle: int, draining: bool, *, forced: bool) -> Batch | None:
        queue = self.queue
        queue.promote(now_ns)
        start_ns = now_ns if idle else max(now_ns, min(self._running.values(), default=now_ns))
        dropping = self._rules.early_drop and self._latency.known
        if dropping:
            self._drop_hopeless(start_ns)
            if not queue.tickets:
                return None
        reason = "idle" if forced else self._may_start(now_ns, idle, draining)
        rules = self._rules
        if not reason and self._simple_cost and not queue.mixed and not rules.preferred:
            return None
        limit = 0 if rules.single else rules.limit_rows
        if rules.adaptive and limit:
            limit = min(limit, self.pacing.take_limit(now_ns, idle, queue.rows))
        draft = self._draft(start_ns, limit, dropping)
        if not reason:
            reason = draft.stopped
            if rules.preferred:
                reason = self._cut_to_preferred(draft) or reason
            if not reason:
                return None
        if rules.allowed:
            self._cut_to_allowed(draft)
        return self._batch(draft, reason)

    def _may_start(self, now_ns: int, idle: int, draining: bool) -> str:
        """Why a batch may start now, or "" where it has to fill, or to wait, first."""
        rules, queue = self._rules, self.queue
        if draining:
            return "drain"
        if rules.adaptive:
            return self.pacing.may_start(now_ns, idle, queue)
        if not rules.max_delay_ns:
            return "idle"
        if queue.oldest_ns() + rules.max_delay_ns <= now_ns:
            return "delay"
        if queue.rows >= rules.limit_rows and not rules.preferred and not queue.mixed:
            return "full"
        return "deadline" if self._latest_start_ns() <= now_ns else ""

    def _latest_start_ns(self) -> int:
        """The latest start that still meets the earliest deadline, with one more row than waits; FOREVER without one."""
        if not self._rules.by_deadline:
            return FOREVER
        due_ns = self.queue.first_due_ns()
        if due_ns >= FOREVER:
            return FOREVER
        return due_ns - self._span(min(self.queue.rows + 1, self._rules.limit_rows))

    def expired(self, tickets: list[Ticket]) -> None:
        """See `Composer`."""
        self.losses.lost(tickets)

    def wakeup_ns(self, idle: int, draining: bool) -> int:
        """See `Composer`."""
        rules = self._rules
        if draining:
            return 0
        if rules.adaptive:
            return self.pacing.wakeup_ns(idle, self.queue)
        return min(self.queue.oldest_ns() + rules.max_delay_ns, self._latest_start_ns())

    # ---------------------------------------------------------------- choosing members

    def _draft(self, start_ns: int, limit: int, dropping: bool) -> _Draft:
        """Choose members, without taking them out."""
        draft = _Draft()
        for band in self.queue.bands:
            if not band.active:
                continue
            if draft.members:
                self._fill(draft, band, start_ns, limit, dropping)
            else:
                self._open(draft, band, start_ns, limit, dropping)
            if draft.rows >= limit or draft.stopped == "budget":
                break
        return draft

    def _open(self, draft: _Draft, band: Band, start_ns: int, limit: int, dropping: bool) -> None:
        """The members that the batch is for: of the first band, of the signature whose turn it is."""
        views = self._views(band, None)
        if self.queue.mixed:
            draft.signature = self._head(views).signature
            views = self._views(band, draft)
        else:
            draft.signature = self.queue.signature
        cutoff_ns = 0
        if dropping and limit:
            limit, cutoff_ns = self._cutoff(views, band, start_ns, limit)
        self._take(draft, band, views, cutoff_ns, start_ns, limit)

    def _fill(self, draft: _Draft, band: Band, start_ns: int, limit: int, dropping: bool) -> None:
        """Left-over room for a lower band, as far as nobody in the batch is late for it."""
        room = limit
        allowed = self._rules.allowed
        if allowed:
            index = bisect_left(allowed, draft.rows)
            room = min(limit, allowed[index] if index < len(allowed) else draft.rows)
        cutoff_ns = 0
        if self._rules.early_drop and dropping:
            slack_ns = draft.due_ns - start_ns
            if slack_ns < FOREVER:
                while room > draft.rows and self._span(room) > slack_ns:
                    room -= max(1, (room - draft.rows) // 4)
            cutoff_ns = start_ns + self._span(room)
        if room > draft.rows:
            self._take(draft, band, self._views(band, draft), cutoff_ns, start_ns, room)

    def _views(self, band: Band, draft: _Draft | None) -> list[View]:
        """The band's flows; with a draft, of mixed signatures, only what has its signature."""
        if draft is None or not self.queue.mixed:
            return [(flow, flow.keys, flow.tickets) for flow in band.active]
        signature = draft.signature
        views: list[View] = []
        for flow in band.active:
            tickets = [ticket for ticket in flow.tickets if ticket.signature == signature]
            if tickets:
                views.append((flow, [ticket.due_ns for ticket in tickets], tickets))
        return views

    def _head(self, views: Sequence[View]) -> Ticket:
        """The ticket whose turn it is."""
        return min(views, key=lambda view: view[0].start)[2][0]

    def _take(self, draft: _Draft, band: Band, views: Sequence[View], cutoff_ns: int, start_ns: int, limit: int) -> None:
        """Add tickets with a key of at least `cutoff_ns`, in their order, up to `limit` rows in all."""
        entries = [(flow, tickets, bisect_left(keys, cutoff_ns) if cutoff_ns else 0) for flow, keys, tickets in views]
        if self._rules.window_rows:
            self._take_like(draft, band, entries, start_ns, limit, bool(cutoff_ns))
        elif self._by_rows and self.queue.rows == self.queue.tickets:
            self._take_rows(draft, band, entries, limit)
        else:
            self._take_fitting(draft, in_order(band, entries, self._rules), start_ns, limit, bool(cutoff_ns))

    def _take_rows(self, draft: _Draft, band: Band, entries: Sequence[Entry], limit: int) -> None:
        """The usual case: every ticket is one row, and rows are all that counts. A tenant's rows lie together in the batch."""
        counts = first_rows(entries, max(limit, 1) - draft.rows)
        for (flow, tickets, first), count in zip(entries, counts, strict=True):
            if count:
                draft.members += tickets[first : first + count]
                draft.rows += count
                draft.due_ns = min(draft.due_ns, tickets[first].due_ns)
                if draft.runs is not None:
                    draft.runs.append((band, flow, first, count))

    def _take_fitting(self, draft: _Draft, tickets: Iterator[Ticket], start_ns: int, limit: int, timed: bool) -> None:
        """Rows and costs of any size: what fits, in order; after the first that does not fit, a few smaller ones may still."""
        rules = self._rules
        misses = 0
        for ticket in tickets:
            rows = draft.rows + ticket.rows
            if draft.members:
                fault = ""
                if rows > limit:
                    fault = "shape"
                elif rules.max_cost != FOREVER and self._cost_with(draft, ticket) > rules.max_cost:
                    fault = "budget"
                elif timed and start_ns + self._span_with(draft, ticket) > min(draft.due_ns, ticket.due_ns):
                    fault = "shape"
                if fault:
                    draft.stopped = draft.stopped or fault
                    misses += 1
                    if misses > 4:
                        return
                    continue
            self._add(draft, ticket)
            if draft.rows >= limit:
                return

    def _add(self, draft: _Draft, ticket: Ticket) -> None:
        draft.runs = None
        draft.members.append(ticket)
        draft.rows += ticket.rows
        draft.cost += self._rules.cost_of(ticket)
        draft.tokens += ticket.rows * ticket.length
        draft.longest = max(draft.longest, ticket.length)
        draft.due_ns = min(draft.due_ns, ticket.due_ns)

    def _cost_with(self, draft: _Draft, ticket: Ticket) -> float:
        """What counts against the budget with one more: padded tokens are the longest times the rows."""
        if self._rules.cost_unit == "tokens" and self._rules.padded:
            return max(draft.longest, ticket.length) * (draft.rows + ticket.rows)
        return draft.cost + self._rules.cost_of(ticket)

    def _span_with(self, draft: _Draft, ticket: Ticket) -> int:
        longest = max(draft.longest, ticket.length)
        if self._rules.padded:
            return self._latency.upper_ns(longest * (draft.rows + ticket.rows), longest)
        if self._rules.ragged:
            return self._latency.upper_ns(draft.tokens + ticket.rows * ticket.length, longest)
        if self._unit_cost:
            return self._latency.upper_ns(draft.rows + ticket.rows)
        return self._latency.upper_ns(draft.cost + self._rules.cost_of(ticket))

    def _take_like(
        self,
        draft: _Draft,
        band: Band,
        entries: Sequence[Entry],
        start_ns: int,
        limit: int,
        timed: bool,
    ) -> None:
        """Of the first so many in order, those whose lengths go best with the head's."""
        rules = self._rules
        window: list[Ticket] = []
        rows = 0
        for ticket in in_order(band, entries, rules):
            window.append(ticket)
            rows += ticket.rows
            if rows >= rules.window_rows:
                break
        if not window:
            return
        if draft.members:  # filling up: what is as long as what is there costs no padding
            self._take_fitting(draft, iter([ticket for ticket in window if ticket.length <= draft.longest]), start_ns, limit, timed)
            return
        head = window[0]
        ordered = sorted(window, key=lambda ticket: ticket.length)
        position = next(index for index, ticket in enumerate(ordered) if ticket is head)
        tokens = rules.max_cost if rules.cost_unit == "tokens" else FOREVER
        first, last = best_run(
            [ticket.length for ticket in ordered],
            [ticket.rows for ticket in ordered],
            position,
            max(limit, head.rows),
            tokens,
            self._run_span,
        )
        if last - first < len(ordered):
            draft.stopped = "budget" if len(ordered) > 1 and last - first < limit else ""
        self._add(draft, head)
        others = [ticket for ticket in ordered[first:last] if ticket is not head]
        others.sort(key=lambda ticket: ticket.due_ns)
        self._take_fitting(draft, iter(others), start_ns, limit, timed)

    def _run_span(self, rows: int, length: int) -> int:
        """What rows of this length take together; what the worth of a batch is judged by, so without a margin."""
        return self._latency.expected_ns(rows * length, length)

    # ---------------------------------------------------------------- early drop

    def _drop_hopeless(self, start_ns: int) -> None:
        """Take out what cannot be answered in time even alone."""
        least_ns = start_ns + (self._span(1) if not self._by_work else 0)
        for band in self.queue.bands:
            for flow in list(band.active):
                keys = flow.keys
                if keys[0] >= least_ns and not self._by_work:
                    continue
                count = self._hopeless_of(flow, start_ns) if self._by_work else bisect_left(keys, least_ns)
                if count:
                    self._drop(band, flow, count)

    def _hopeless_of(self, flow: Flow, start_ns: int) -> int:
        """How many of a flow's first tickets are too large for the time that they have left."""
        count = 0
        for ticket in flow.tickets:
            if ticket.due_ns >= start_ns + self._alone_span(ticket):
                break
            count += 1
        return count

    def _drop(self, band: Band, flow: Flow, count: int) -> None:
        """Give up a flow's first tickets."""
        dropped = self.queue.drop(band, flow, count)
        self._dropped += dropped
        self.losses.lost(dropped)

    def _cutoff(self, views: list[View], band: Band, start_ns: int, limit: int) -> tuple[int, int]:
        """The batch that serves most in time: its rows, and the earliest deadline that may be in it. Views lose what is dropped."""
        first_ns = min([keys[0] for _, keys, _ in views])
        full_ns = start_ns + self._span(limit)
        if first_ns >= full_ns:
            return limit, 0
        if self.queue.rows == self.queue.tickets:

            def count_from(key: int) -> int:
                return sum([len(keys) - bisect_left(keys, key) for _, keys, _ in views])

            size = largest_in_time(count_from, limit, start_ns, self._span)
            size = self.losses.guarded(size, views, start_ns, self._span)
            cutoff_ns = start_ns + self._span(size)
        else:
            tails = [ticket for _, _, tickets in views for ticket in tickets[-limit:]]
            latest = nlargest(limit, tails, key=lambda ticket: ticket.due_ns)
            size, cutoff_ns = cutoff_of_several([(ticket.due_ns, ticket.rows) for ticket in latest], limit, start_ns, self._span)
        if not size:  # by the estimate nothing fits, yet nothing is hopeless: the head goes
            return limit, 0
        if first_ns < cutoff_ns and self.losses.heavy and not self.queue.mixed:
            for flow in list(band.active):
                count = bisect_left(flow.keys, cutoff_ns)
                if count:
                    self._drop(band, flow, count)
            views[:] = [(flow, flow.keys, flow.tickets) for flow in band.active]
        return size, cutoff_ns

    def take_dropped(self) -> list[Ticket]:
        """See `Composer`."""
        dropped = self._dropped
        if dropped:
            self._dropped = []
        return dropped

    # ---------------------------------------------------------------- sizes that are wanted

    def _cut_to_preferred(self, draft: _Draft) -> str:
        """Keep the members up to the largest preferred size that they reach; "" if they reach none and more may come."""
        preferred = self._rules.preferred
        rows = best = kept = 0
        for index, ticket in enumerate(draft.members, start=1):
            rows += ticket.rows
            if rows in preferred:
                best, kept = rows, index
        if best:
            self._keep(draft, kept)
            return "preferred"
        return "shape" if rows >= self._rules.full_rows else ""

    def _cut_to_allowed(self, draft: _Draft) -> None:
        span = self._span if self._latency.known else None
        wanted = round_to_allowed(draft.rows, self._rules.allowed, span)
        rows = kept = 0
        for ticket in draft.members:
            if kept and rows + ticket.rows > wanted:
                break
            rows += ticket.rows
            kept += 1
        if kept < len(draft.members):
            self._keep(draft, kept)

    def _keep(self, draft: _Draft, count: int) -> None:
        """Keep the first `count` members."""
        members = draft.members[:count]
        draft.members, draft.rows, draft.cost, draft.tokens, draft.longest, draft.due_ns = [], 0, 0.0, 0, 0, 1 << 64
        for ticket in members:
            self._add(draft, ticket)

    # ---------------------------------------------------------------- taking out, and back

    def _batch(self, draft: _Draft, reason: str) -> Batch:
        """Take the members out of the queue and charge their flows."""
        members = draft.members
        for ticket in members:
            ticket.state = _STAGED
        if draft.runs is None or self.queue.mixed:  # mixed: views were selections
            self.queue.serve(members)
        else:
            self.queue.serve_runs(draft.runs)
        if self._rules.single or draft.rows >= self._rules.limit_rows:
            reason = "full"
        elif draft.stopped and reason != "preferred":
            reason = draft.stopped
        return Batch(members, draft.rows, draft.signature, reason)

    def regrow(self, batch: Batch, now_ns: int, draining: bool) -> bool:
        """See `Composer`."""
        members, reason = batch.members, batch.reason
        for ticket in members:
            ticket.state = _WAITING
        self.put_back(batch)
        batch.members, batch.rows = [], 0
        again = self._compose(now_ns, 0, draining, forced=True)
        if again is not None:
            batch.members, batch.rows, batch.signature = again.members, again.rows, again.signature
            batch.reason = reason if again.reason == "idle" else again.reason
        return batch.members != members

    def may_change(self, batch: Batch) -> bool:
        """See `Composer`."""
        return batch.rows < self._rules.limit_rows

    def put_back(self, batch: Batch) -> None:
        """See `Composer`."""
        self.queue.put_back(batch.members)

    # ---------------------------------------------------------------- learning

    def think(self, steps: int) -> bool:
        """See `Composer`."""
        return self._rules.adaptive and self.pacing.think(steps)

    def started(self, batch: Batch, now_ns: int) -> None:
        """See `Composer`."""
        self.pacing.started(now_ns)
        self.losses.served(batch.members)
        self._running[batch] = now_ns + self._latency.expected_ns(*self._work_of(batch))

    def completed(self, batch: Batch, taken_ns: int) -> None:
        """See `Composer`."""
        self._running.pop(batch, None)
        work, length = self._work_of(batch)
        self._latency.observe(work, length, taken_ns)
        if self._by_work:
            self._work_per_row += 0.1 * (work / max(1, batch.rows) - self._work_per_row)
            self._length_now = length
        self.service_ns = max(taken_ns, self.service_ns - (self.service_ns >> 5), 1)

    def _work_of(self, batch: Batch) -> tuple[float, int]:
        """Work and longest row of a batch."""
        if not self._by_work:
            return batch.rows, 0
        longest = max([ticket.length for ticket in batch.members], default=0)
        if self._rules.padded:
            return longest * batch.rows, longest
        if self._rules.ragged:
            return sum([ticket.rows * ticket.length for ticket in batch.members]), longest
        return sum([self._rules.cost_of(ticket) for ticket in batch.members]), 0
