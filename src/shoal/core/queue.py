"""The wait queue: first in, first out inside a level, strict between levels, O(1) to join, to leave from anywhere, and to look at.

It holds WAITING tickets and nothing else; it decides nothing and knows no bounds. Tickets that end while they wait are left where
they are and skipped later ("dead"); they never outnumber the living by more than a constant, so memory follows what really waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Final

from shoal.core.batch import Batch
from shoal.core.rules import FOREVER
from shoal.core.ticket import Ticket, TicketState

_WAITING: Final = TicketState.WAITING
_STAGED: Final = TicketState.STAGED
_DEAD_ALLOWED: Final = 64  # dead tickets in the lanes beyond the living before they are swept out


class WaitQueue:
    """Tickets in the order in which they are to run.

    One lane per level, highest first; with `delayed_lanes` each level has a second lane behind its first, for tickets whose timeout
    has passed and which give way to all others of the same or a higher level. `Ticket.lane` says which lane a ticket is in.

    Invariants: the first ticket of every lane is alive; `rows` and `tickets` count the living; while `mixed` is False every
    living ticket has the signature `signature`.
    """

    __slots__ = ("dead", "lanes", "mixed", "rows", "signature", "stride", "tickets")

    def __init__(self, levels: int, delayed_lanes: bool) -> None:
        self.stride = 2 if delayed_lanes else 1
        self.lanes: list[deque[Ticket]] = [deque() for _ in range(levels * self.stride)]
        self.tickets = 0
        self.rows = 0
        self.dead = 0
        self.signature: Hashable = None
        self.mixed = False

    def put(self, ticket: Ticket) -> None:
        """Append a WAITING ticket to its lane (`ticket.lane`)."""
        if self.tickets:
            if ticket.signature is not self.signature and ticket.signature != self.signature:
                self.mixed = True
        else:
            self.signature = ticket.signature
            self.mixed = False
        self.tickets += 1
        self.rows += ticket.rows
        self.lanes[ticket.lane].append(ticket)

    def put_back(self, members: list[Ticket], rows: int) -> None:
        """Return tickets that were taken, in the order in which they were taken, to the head of their lanes."""
        if not members:
            return
        signature = members[0].signature
        if not self.tickets:
            self.signature = signature
            self.mixed = False
        elif signature is not self.signature and signature != self.signature:
            self.mixed = True
        self.tickets += len(members)
        self.rows += rows
        lanes = self.lanes
        if len(lanes) == 1:
            lanes[0].extendleft(reversed(members))
        else:
            for ticket in reversed(members):
                lanes[ticket.lane].appendleft(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Let go of a ticket whose state has just been changed from WAITING to something else."""
        self.tickets -= 1
        self.rows -= ticket.rows
        lane = self.lanes[ticket.lane]
        if lane[0] is ticket:
            lane.popleft()
            while lane and lane[0].state is not _WAITING:
                lane.popleft()
                self.dead -= 1
        else:
            self.dead += 1
            if self.dead > self.tickets + _DEAD_ALLOWED:
                self._sweep()

    def _sweep(self) -> None:
        for index, lane in enumerate(self.lanes):
            self.lanes[index] = deque(ticket for ticket in lane if ticket.state is _WAITING)
        self.dead = 0

    def to_delayed(self, ticket: Ticket) -> None:
        """Move a WAITING ticket behind all others of its level. Only with `delayed_lanes`, and once per ticket."""
        lane = self.lanes[ticket.lane]
        lane.remove(ticket)
        while lane and lane[0].state is not _WAITING:
            lane.popleft()
            self.dead -= 1
        ticket.lane += 1
        self.lanes[ticket.lane].append(ticket)

    def is_delayed(self, ticket: Ticket) -> bool:
        """Whether a WAITING ticket was moved behind the others."""
        return self.stride == 2 and ticket.lane % 2 == 1

    def has_delayed(self) -> bool:
        """Whether a ticket waits that has been moved behind the others."""
        return self.stride == 2 and any(self.lanes[1::2])

    def head(self) -> Ticket | None:
        """The ticket that is first in order, or None."""
        for lane in self.lanes:
            if lane:
                return lane[0]
        return None

    def oldest_ns(self) -> int:
        """When the longest waiting ticket was accepted; FOREVER if none waits. Delayed tickets do not count here."""
        oldest = FOREVER
        for lane in self.lanes[:: self.stride]:
            if lane and lane[0].accepted_ns < oldest:
                oldest = lane[0].accepted_ns
        return oldest

    def longest_waiting_ns(self) -> int:
        """When the longest waiting ticket was accepted, delayed or not; FOREVER if none waits."""
        return min([lane[0].accepted_ns for lane in self.lanes if lane], default=FOREVER)

    def faults(self) -> list[str]:
        """Every law of the queue's own that does not hold. O(waiting)."""
        found: list[str] = []
        waiting = list(self)
        if self.tickets != len(waiting) or self.rows != sum(ticket.rows for ticket in waiting):
            found.append("the queue miscounts")
        if not self.mixed and any(ticket.signature != self.signature for ticket in waiting):
            found.append("the queue is mixed and does not know it")
        if self.dead != sum(map(len, self.lanes)) - len(waiting):
            found.append("the queue miscounts its dead")
        if self.dead > self.tickets + _DEAD_ALLOWED + len(self.lanes) // self.stride:
            found.append("dead tickets pile up in the queue")
        if any(lane and lane[0].state is not _WAITING for lane in self.lanes):
            found.append("a dead ticket heads a lane")
        for lane in self.lanes[:: self.stride]:
            times = [ticket.accepted_ns for ticket in lane]
            if times != sorted(times):
                found.append("a lane is out of order")
        return found

    def is_mixed(self, limit_rows: int) -> bool:
        """Whether another signature stands within the first `limit_rows` rows, or more rows than those wait.

        Costs a walk over at most that many tickets, and only while signatures were mixed since the queue was last uniform.
        """
        if not self.mixed:
            return False
        rows = 0
        signature: Hashable = None
        first = True
        for ticket in self:
            if first:
                signature = ticket.signature
                first = False
            elif ticket.signature != signature:
                return True
            rows += ticket.rows
            if rows > limit_rows:
                return True
        self.signature = signature
        self.mixed = False
        return False

    def by_level(self) -> list[tuple[int, int]]:
        """Tickets and rows of each level, highest first."""
        if len(self.lanes) == 1:
            return [(self.tickets, self.rows)]
        figures: list[tuple[int, int]] = []
        for first in range(0, len(self.lanes), self.stride):
            level = [ticket.rows for lane in self.lanes[first : first + self.stride] for ticket in lane if ticket.state is _WAITING]
            figures.append((len(level), sum(level)))
        return figures

    def __iter__(self) -> Iterator[Ticket]:
        """The living tickets in order."""
        for lane in self.lanes:
            for ticket in lane:
                if ticket.state is _WAITING:
                    yield ticket

    def take(self, limit_rows: int, batch: Batch) -> bool:
        """Move the longest run from the head with one signature and at most `limit_rows` rows into `batch`, as STAGED members.

        The head always fits an empty batch; a batch with members is continued from where it stands. Returns whether the run was
        stopped by a ticket that differs or does not fit.
        """
        members = batch.members
        if not members and not self.mixed and not self.dead and len(self.lanes) == 1 and 0 < self.rows <= limit_rows:
            members.extend(self.lanes[0])  # everything goes: no need to look at each ticket's size and signature
            self.lanes[0].clear()
            for ticket in members:
                ticket.state = _STAGED
            batch.rows, batch.signature = self.rows, self.signature
            self.tickets = self.rows = 0
            return False
        take = members.append
        taken = -len(members)
        rows = before = batch.rows
        signature = batch.signature
        stopped = False
        waiting, staged = _WAITING, _STAGED
        for lane in self.lanes:
            popleft = lane.popleft
            while lane:
                ticket = lane[0]
                if ticket.state is not waiting:
                    popleft()
                    self.dead -= 1
                    continue
                if rows:
                    if rows + ticket.rows > limit_rows or (ticket.signature is not signature and ticket.signature != signature):
                        stopped = True
                        break
                else:
                    signature = ticket.signature
                rows += ticket.rows
                ticket.state = staged
                take(popleft())
            if stopped:
                break
        batch.rows = rows
        batch.signature = signature
        self.tickets -= taken + len(members)
        self.rows -= rows - before
        return stopped

    def take_signature(self, signature: Hashable, limit_rows: int, batch: Batch) -> bool:
        """Move, in order, the tickets of one signature that fit into `batch`, passing over others. Returns as `take` does.

        Order inside the signature is kept: nothing behind the first that does not fit is taken.
        """
        members = batch.members
        taken = -len(members)
        rows = before = batch.rows
        stopped = False
        for lane in self.lanes:
            passed: list[Ticket] = []
            while lane and rows < limit_rows:
                ticket = lane.popleft()
                if ticket.state is not _WAITING:
                    self.dead -= 1
                elif ticket.signature is not signature and ticket.signature != signature:
                    passed.append(ticket)
                elif rows and rows + ticket.rows > limit_rows:
                    passed.append(ticket)
                    stopped = True
                    break
                else:
                    rows += ticket.rows
                    ticket.state = _STAGED
                    members.append(ticket)
            lane.extendleft(reversed(passed))
            while lane and lane[0].state is not _WAITING:
                lane.popleft()
                self.dead -= 1
            if stopped or rows >= limit_rows:
                break
        batch.rows = rows
        batch.signature = signature
        self.tickets -= taken + len(members)
        self.rows -= rows - before
        return stopped
