"""Expiry timers: which waiting ticket passes its deadline next, and which have passed it.

Knows tickets only by `expiry_ns` and `state`; changes neither. Entries of tickets that have started or ended are dropped when
they come to the front, and swept out before they can outnumber the living by more than a constant factor.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Final

from shoal.core.rules import FOREVER
from shoal.core.ticket import Ticket, TicketState

_WAITING: Final = TicketState.WAITING
_STAGED: Final = TicketState.STAGED
_SLACK: Final = 64


class ExpiryTimers:
    """A line for expiries that come in rising order (one timeout for all: the usual case, O(1)) and a heap for the rest (O(log n)).

    At most 2 n + 64 entries are kept, n being the largest number of living tickets since the last sweep.
    """

    __slots__ = ("_adds_left", "_heap", "_line", "_sequence")

    def __init__(self) -> None:
        self._line: deque[Ticket] = deque()
        self._heap: list[tuple[int, int, Ticket]] = []
        self._sequence = 0
        self._adds_left = _SLACK

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def add(self, ticket: Ticket) -> None:
        """Watch a ticket until it starts or ends; its `expiry_ns` must not change meanwhile."""
        if self._adds_left <= 0:
            self._sweep()
        self._adds_left -= 1
        expiry_ns = ticket.expiry_ns
        line = self._line
        if not line or expiry_ns >= line[-1].expiry_ns:
            line.append(ticket)
        else:
            self._sequence += 1
            heappush(self._heap, (expiry_ns, self._sequence, ticket))

    def _sweep(self) -> None:
        alive = (_WAITING, _STAGED)
        self._line = deque(ticket for ticket in self._line if ticket.state in alive)
        self._heap = [entry for entry in self._heap if entry[2].state in alive]
        heapify(self._heap)
        self._adds_left = len(self) + _SLACK

    def clear(self) -> None:
        """Forget everything; for when no ticket is alive."""
        self._line.clear()
        self._heap.clear()

    def next_ns(self) -> int:
        """When the next living ticket expires; FOREVER if none does."""
        line, heap = self._line, self._heap
        while line:
            state = line[0].state
            if state is _WAITING or state is _STAGED:
                break
            line.popleft()
        if not heap:
            return line[0].expiry_ns if line else FOREVER
        while heap:
            state = heap[0][2].state
            if state is _WAITING or state is _STAGED:
                break
            heappop(heap)
        first = heap[0][0] if heap else FOREVER
        return min(first, line[0].expiry_ns) if line else first

    def pop_due(self, now_ns: int) -> list[Ticket]:
        """Living tickets whose expiry is at or before `now_ns`, earliest first; they are no longer watched."""
        due: list[Ticket] = []
        line, heap = self._line, self._heap
        while (first_ns := self.next_ns()) <= now_ns:
            due.append(line.popleft() if line and line[0].expiry_ns == first_ns else heappop(heap)[2])
        return due
