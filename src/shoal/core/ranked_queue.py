"""The wait queue of the ranked composer: levels with ageing, tenants inside a level, deadlines inside a tenant.

Keeps order and adds up; decides nothing about batches. A *band* holds one level's tickets, one *flow* in it one tenant's, sorted by
`due_ns`. Between the flows of a band goes start-time fair queueing: each flow has a virtual start tag; the lowest is served and
moves on by what was served over the flow's weight; a flow that was idle begins at the tag that is being served, so nobody saves up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from shoal.core.rules import FOREVER, Rules
from shoal.core.starting import Arrivals
from shoal.core.ticket import Ticket, TicketState

_WAITING: Final = TicketState.WAITING
_STAGED: Final = TicketState.STAGED
_DROPPED: Final = TicketState.DROPPED
_SLACK: Final = 64  # dead entries that are put up with before they are swept out
_OTHERS: Final = object()  # the flow that tenants beyond the bound share
_DELAYED: Final = 1 << 63  # added to what a delayed ticket is sorted by: behind all others of its flow


class Flow:
    """One tenant's tickets in one band, by rising key; `keys[i]` is the `due_ns` of `tickets[i]`, equal ones in order of arrival.

    `start` is the virtual start tag of the first; `share` is one over the tenant's weight.
    """

    __slots__ = ("keys", "share", "start", "tenant", "tickets")

    def __init__(self, tenant: Hashable, share: float) -> None:
        self.tenant = tenant
        self.share = share
        self.start = 0.0
        self.keys: list[int] = []
        self.tickets: list[Ticket] = []


class Band:
    """One level's tickets. `active` are the flows that are not empty.

    `virtual` is the tag of what was served last, `furthest` the largest tag of all: where everybody begins once nothing waits.
    """

    __slots__ = ("active", "flows", "furthest", "virtual")

    def __init__(self) -> None:
        self.flows: dict[Hashable, Flow] = {}
        self.active: list[Flow] = []
        self.virtual = 0.0
        self.furthest = 0.0


Run = tuple[Band, Flow, int, int]
"""Neighbours in a flow: the index of the first, and how many."""


class RankedQueue:
    """Bands in order: first the tickets that have waited too long altogether, then level 1, 2, …

    `ticket.lane` is the band that it stands in, counted from -1. With ageing a ticket moves up one band each `aging_ns` that it has
    waited; `promote` does that, and has to be called before the order is looked at.

    While `mixed` is False every waiting ticket has the signature `signature`.
    """

    __slots__ = (
        "_aging_ns",
        "_by_deadline",
        "_climbs",
        "_fair",
        "_juniors",
        "_rules",
        "_seniors",
        "_sequence",
        "_unseen",
        "_unwatched",
        "arrivals",
        "bands",
        "mixed",
        "rows",
        "signature",
        "tickets",
    )

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._fair = rules.fair
        self._by_deadline = rules.by_deadline
        self._aging_ns = rules.aging_ns
        self.bands = [Band() for _ in range(rules.levels + 1)]
        self.tickets = 0
        self.rows = 0
        self.signature: Hashable = None
        self.mixed = False
        self.arrivals: Arrivals | None = None
        """Where what comes is written down, if anybody wants to know."""
        self._seniors: deque[Ticket] = deque()  # by time of acceptance; some have left
        self._juniors: list[deque[Ticket]] = [deque() for _ in range(rules.levels)]  # not moved up yet, by time of acceptance
        self._climbs: list[tuple[int, int, Ticket]] = []  # a heap: when the others move up again; some have left, or moved
        self._sequence = 0
        # Staged tickets that were taken for gone, and must be written down again if they come back: no senior, not watched.
        self._unseen: set[Ticket] = set()
        self._unwatched: set[Ticket] = set()

    # ---------------------------------------------------------------- in and out

    def put(self, ticket: Ticket) -> None:
        """Take in a WAITING ticket whose `lane`, `accepted_ns` and `due_ns` are set."""
        if not self._by_deadline:
            ticket.due_ns = ticket.accepted_ns
        if self.tickets:
            if ticket.signature is not self.signature and ticket.signature != self.signature:
                self.mixed = True
        else:
            self.signature = ticket.signature
            self.mixed = False
        arrivals = self.arrivals
        if arrivals is not None:
            arrivals.add(ticket.accepted_ns, ticket.rows)
        self._seniors.append(ticket)
        if self._aging_ns != FOREVER:
            self._juniors[ticket.lane].append(ticket)
        self._insert(ticket)

    def _insert(self, ticket: Ticket) -> Flow:
        band = self.bands[ticket.lane + 1]
        tenant = ticket.tenant if self._fair else None
        flow = band.flows.get(tenant)
        if flow is None:
            flow = self._open_flow(band, tenant)
        keys = flow.keys
        key = ticket.due_ns
        if not keys:
            if flow.start < band.virtual:
                flow.start = band.virtual
            band.active.append(flow)
            keys.append(key)
            flow.tickets.append(ticket)
        elif key >= keys[-1]:
            keys.append(key)
            flow.tickets.append(ticket)
        else:
            index = bisect_right(keys, key)
            keys.insert(index, key)
            flow.tickets.insert(index, ticket)
        self.tickets += 1
        self.rows += ticket.rows
        return flow

    def _open_flow(self, band: Band, tenant: Hashable) -> Flow:
        """A flow for a tenant that has none in this band; beyond the bound the one for all others."""
        weights = self._rules.weights
        flows = band.flows
        if tenant not in weights and len(flows) >= self._rules.max_tenants:
            for name in [name for name, flow in flows.items() if not flow.keys and flow.start <= band.virtual]:
                del flows[name]  # has no ticket and no debt: as good as new when it comes again
            if len(flows) >= self._rules.max_tenants:
                tenant = _OTHERS
        flow = flows.get(tenant)
        if flow is None:
            weight = weights.get(tenant, 1.0) if isinstance(tenant, str) else 1.0
            flow = flows[tenant] = Flow(tenant, 1.0 / weight)
        return flow

    def _find(self, ticket: Ticket) -> tuple[Band, Flow, int]:
        band = self.bands[ticket.lane + 1]
        flow = band.flows.get(ticket.tenant if self._fair else None)
        for candidate in (flow, band.flows.get(_OTHERS)):
            if candidate is None:
                continue
            first = bisect_left(candidate.keys, ticket.due_ns)
            try:
                return band, candidate, candidate.tickets.index(ticket, first)
            except ValueError:
                continue
        raise AssertionError("a waiting ticket is not in its flow")

    def forget(self, ticket: Ticket) -> None:
        """Take a ticket out for good, wherever it stands."""
        self._take_out(ticket)
        self._trim()

    def _take_out(self, ticket: Ticket) -> None:
        band, flow, index = self._find(ticket)
        del flow.keys[index], flow.tickets[index]
        self._left(band, flow, 1, ticket.rows)

    def _left(self, band: Band, flow: Flow, tickets: int, rows: int) -> None:
        """Count tickets that have just been taken out of a flow's lists."""
        self.tickets -= tickets
        self.rows -= rows
        if not flow.keys:
            band.active.remove(flow)
            if not band.active:  # a new round begins: no debts, no lead
                band.virtual = band.furthest

    def _trim(self) -> None:
        """Let go of tickets that have left, before they outnumber those that wait by more than a factor."""
        most = 2 * self.tickets + _SLACK
        if len(self._seniors) > most:
            self._seniors = deque([ticket for ticket in self._seniors if ticket.state is _WAITING or ticket.state is _STAGED])
        if self._aging_ns == FOREVER:
            return
        for lane, juniors in enumerate(self._juniors):
            if len(juniors) > most:
                self._juniors[lane] = deque([ticket for ticket in juniors if ticket.state is _WAITING or ticket.state is _STAGED])
        if len(self._climbs) > most:
            self._climbs = [entry for entry in self._climbs if entry[2].state in (_WAITING, _STAGED)]
            heapify(self._climbs)

    def drop(self, band: Band, flow: Flow, count: int) -> list[Ticket]:
        """Take a flow's first tickets out for good, and return them."""
        dropped = flow.tickets[:count]
        del flow.tickets[:count], flow.keys[:count]
        for ticket in dropped:
            ticket.state = _DROPPED
        self._left(band, flow, count, sum([ticket.rows for ticket in dropped]))
        self._trim()
        return dropped

    def serve_runs(self, runs: Sequence[Run]) -> None:
        """Take out runs of tickets of one row each, which are to run (STAGED), and charge their tenants."""
        self._unseen.clear()
        self._unwatched.clear()
        for band, flow, first, count in runs:
            last = first + count
            del flow.keys[first:last], flow.tickets[first:last]
            start = flow.start = flow.start + count * flow.share
            if start > band.furthest:
                band.furthest = start
            if start - flow.share > band.virtual:
                band.virtual = start - flow.share
            self._left(band, flow, count, count)
        self._trim()

    def serve(self, members: Sequence[Ticket]) -> None:
        """Take out tickets that are to run (STAGED), and charge their tenants; each tenant's are given in the order of its flow."""
        self._unseen.clear()
        self._unwatched.clear()
        bands = self.bands
        groups: dict[Flow, list[Ticket]] = {}
        if not self._fair and members[0].lane == members[-1].lane:  # levels come in order, so all are of one
            groups[bands[members[0].lane + 1].active[0]] = list(members)
        else:
            for ticket in members:
                flows = bands[ticket.lane + 1].flows
                flow = flows.get(ticket.tenant if self._fair else None)
                if flow is None or not flow.keys or flow.keys[0] > ticket.due_ns or flow.tickets[0].tenant != ticket.tenant:
                    flow = self._find(ticket)[1]
                group = groups.get(flow)
                if group is None:
                    groups[flow] = [ticket]
                else:
                    group.append(ticket)
        for flow, group in groups.items():
            self._serve_flow(bands[group[0].lane + 1], flow, group)
        self._trim()

    def _serve_flow(self, band: Band, flow: Flow, group: list[Ticket]) -> None:
        keys, tickets = flow.keys, flow.tickets
        count = len(group)
        first = 0 if tickets[0] is group[0] else tickets.index(group[0], bisect_left(keys, group[0].due_ns))
        if tickets[first : first + count] == group:
            del keys[first : first + count], tickets[first : first + count]
        else:
            for ticket in group:
                index = tickets.index(ticket, bisect_left(keys, ticket.due_ns))
                del keys[index], tickets[index]
        cost_of = self._rules.cost_of
        last = cost_of(group[-1])
        total = sum([cost_of(ticket) for ticket in group])
        flow.start += total * flow.share
        band.furthest = max(band.furthest, flow.start)
        band.virtual = max(band.virtual, flow.start - last * flow.share)
        self._left(band, flow, count, sum([ticket.rows for ticket in group]))

    def put_back(self, members: Sequence[Ticket]) -> None:
        """Tickets that were served but have not run wait again, in their old places, and are charged for no longer."""
        if not self.tickets:
            self.signature = members[0].signature
            self.mixed = False
        elif members[0].signature != self.signature:
            self.mixed = True
        for ticket in sorted(self._unseen.intersection(members), key=lambda member: member.accepted_ns, reverse=True):
            self._seniors.appendleft(ticket)
        self._unseen.clear()
        for ticket in members:
            if ticket in self._unwatched:
                self._watch(ticket)
            flow = self._insert(ticket)
            flow.start -= self._rules.cost_of(ticket) * flow.share
        self._unwatched.clear()

    def to_delayed(self, ticket: Ticket) -> None:
        """Move a WAITING ticket behind all others of its tenant and level. Once per ticket."""
        self._take_out(ticket)
        ticket.due_ns += _DELAYED
        self._reinsert(ticket)

    def is_delayed(self, ticket: Ticket) -> bool:
        """Whether a WAITING ticket was moved behind the others."""
        return ticket.due_ns >= _DELAYED

    def _reinsert(self, ticket: Ticket) -> None:
        if not self.tickets:
            self.signature = ticket.signature
            self.mixed = False
        self._insert(ticket)

    # ---------------------------------------------------------------- ageing

    def _climb_ns(self, ticket: Ticket) -> int:
        """When a ticket moves up from where it stands."""
        level = ticket.level or self._rules.default_level
        return ticket.accepted_ns + (level - ticket.lane) * self._aging_ns

    def _watch(self, ticket: Ticket) -> None:
        if ticket.lane < 0:
            return
        self._sequence += 1
        heappush(self._climbs, (self._climb_ns(ticket), self._sequence, ticket))

    def promote(self, now_ns: int) -> None:
        """Move up whatever has waited long enough."""
        accepted_ns = now_ns - self._aging_ns
        for juniors in self._juniors:
            while juniors and juniors[0].accepted_ns <= accepted_ns:
                self._climb(juniors.popleft())
        while self._climbs and self._climbs[0][0] <= now_ns:
            self._climb(heappop(self._climbs)[2])

    def _climb(self, ticket: Ticket) -> None:
        if ticket.state is not _WAITING:
            if ticket.state is _STAGED:
                self._unwatched.add(ticket)
            return
        self._take_out(ticket)
        ticket.lane -= 1
        self._reinsert(ticket)
        self._watch(ticket)

    # ---------------------------------------------------------------- looking

    def oldest_ns(self) -> int:
        """When the longest waiting ticket was accepted; FOREVER if none waits."""
        if not self.tickets:
            return FOREVER
        seniors = self._seniors
        while seniors[0].state is not _WAITING:
            ticket = seniors.popleft()
            if ticket.state is _STAGED:
                self._unseen.add(ticket)
        return seniors[0].accepted_ns

    longest_waiting_ns = oldest_ns

    def first_due_ns(self) -> int:
        """The earliest deadline of all; FOREVER or more without one."""
        return min([flow.keys[0] for band in self.bands for flow in band.active], default=FOREVER)

    def by_level(self) -> list[tuple[int, int]]:
        """Tickets and rows of each level, highest first; those that have waited too long altogether count with the first."""
        waiting = [[ticket.rows for flow in band.active for ticket in flow.tickets] for band in self.bands]
        figures = [(len(rows), sum(rows)) for rows in waiting]
        return [(figures[0][0] + figures[1][0], figures[0][1] + figures[1][1]), *figures[2:]]

    def __iter__(self) -> Iterator[Ticket]:
        """The waiting tickets, in the order in which they would be served as things stand."""
        for band in self.bands:
            yield from in_order(band, [(flow, flow.tickets, 0) for flow in band.active], self._rules)

    def faults(self) -> list[str]:
        """Every law of the queue's own that does not hold. O(waiting)."""
        found: list[str] = []
        seniors = {id(ticket) for ticket in self._seniors}
        for lane, band in enumerate(self.bands, start=-1):
            flows = [flow for flow in band.flows.values() if flow.keys]
            if {id(flow) for flow in flows} != {id(flow) for flow in band.active} or len(flows) != len(band.active):
                found.append("the active flows are not those with tickets")
            tickets = [ticket for flow in flows for ticket in flow.tickets]
            if any(flow.keys != [ticket.due_ns for ticket in flow.tickets] or flow.keys != sorted(flow.keys) for flow in flows):
                found.append("a flow is out of order")
            if any(ticket.lane != lane or ticket.state is not _WAITING for ticket in tickets):
                found.append("a ticket stands in the wrong band")
            if not seniors.issuperset(map(id, tickets)):
                found.append("a waiting ticket's age is not watched")
            named = [flow for flow in band.flows.values() if flow.tenant not in self._rules.weights]
            if len(named) > self._rules.max_tenants + 1:
                found.append("more tenants than the bound")
        times = [ticket.accepted_ns for ticket in self._seniors]
        if times != sorted(times):
            found.append("the seniors are out of order")
        waiting = list(self)
        if self.tickets != len(waiting) or self.rows != sum(ticket.rows for ticket in waiting):
            found.append("the queue miscounts")
        if not self.mixed and any(ticket.signature != self.signature for ticket in self):
            found.append("the queue is mixed and does not know it")
        watched = [ticket for juniors in self._juniors for ticket in juniors] + [entry[2] for entry in self._climbs]
        if self._aging_ns != FOREVER and sorted(id(ticket) for ticket in watched if ticket.state is _WAITING) != sorted(
            id(ticket) for ticket in self if ticket.lane >= 0
        ):
            found.append("a ticket's next climb is not watched, or twice")
        staged = sum(ticket.state is _STAGED for ticket in self._seniors)
        most = 2 * (self.tickets + staged) + _SLACK
        if max(len(self._seniors), len(self._climbs), *map(len, self._juniors)) > most:
            found.append("dead tickets pile up in the queue")
        return found


def first_rows(entries: Sequence[tuple[Flow, Sequence[Ticket], int]], room: int) -> list[int]:
    """How many of each entry are among the first `room` that `in_order` yields, where every ticket is one row and costs 1."""
    left = [len(tickets) - first for _, tickets, first in entries]
    if len(entries) == 1:
        return [min(left[0], room)]
    shares = [flow.share for flow, _, _ in entries]
    counts = [0] * len(entries)
    heap = [(flow.start, place) for place, (flow, _, _) in enumerate(entries) if left[place]]
    heapify(heap)
    while heap and room:
        start, place = heap[0]
        room -= 1
        counts[place] += 1
        if counts[place] < left[place]:
            heapreplace(heap, (start + shares[place], place))
        else:
            heappop(heap)
    return counts


def in_order(band: Band, views: Sequence[tuple[Flow, Sequence[Ticket], int]], rules: Rules) -> Iterator[Ticket]:
    """Tickets of a band by start-time fair queueing, without serving them: `views` give each flow's tickets, and the first to take.

    A flow of which a view shows only some tickets is served as if it had no others.
    """
    heap = [
        (flow.start, position, flow.share, tickets, index)
        for position, (flow, tickets, index) in enumerate(views)
        if index < len(tickets)
    ]
    if len(heap) == 1:
        _, _, _, tickets, index = heap[0]
        yield from tickets[index:]
        return
    heapify(heap)
    cost_of = rules.cost_of
    while heap:
        start, position, share, tickets, index = heap[0]
        ticket = tickets[index]
        yield ticket
        index += 1
        if index < len(tickets):
            heapreplace(heap, (start + cost_of(ticket) * share, position, share, tickets, index))
        else:
            heappop(heap)
