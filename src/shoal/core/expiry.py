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

    What is out of order is put on a pile first, and into the heap only when the pile's earliest may be due next: most tickets
    start before that, and never cost a place in the heap. At most 2 n + 64 entries are kept, n being the largest number of living
    tickets since the last sweep.
    """

    __slots__ = ("_adds_left", "_heap", "_line", "_pile", "_pile_ns", "_sequence")

    def __init__(self) -> None:
        self._line: deque[Ticket] = deque()
        self._heap: list[tuple[int, int, Ticket]] = []
        self._pile: list[Ticket] = []
        self._pile_ns = FOREVER  # not after the earliest expiry on the pile
        self._sequence = 0
        self._adds_left = _SLACK

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) + len(self._pile)

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
            self._pile.append(ticket)
            if expiry_ns < self._pile_ns:
                self._pile_ns = expiry_ns

    def _sweep(self) -> None:
        alive = (_WAITING, _STAGED)
        self._line = deque(ticket for ticket in self._line if ticket.state in alive)
        self._heap = [entry for entry in self._heap if entry[2].state in alive]
        heapify(self._heap)
        self._pile = [ticket for ticket in self._pile if ticket.state in alive]
        self._adds_left = len(self) + _SLACK

    def clear(self) -> None:
        """Forget everything; for when no ticket is alive."""
        self._line.clear()
        self._heap.clear()
        self._pile.clear()
        self._pile_ns = FOREVER

    def _clear_pile(self) -> None:
        """The living ones of the pile go into the heap."""
        for ticket in self._pile:
            state = ticket.state
            if state is _WAITING or state is _STAGED:
                self._sequence += 1
                heappush(self._heap, (ticket.expiry_ns, self._sequence, ticket))
        self._pile.clear()
        self._pile_ns = FOREVER

    def next_ns(self) -> int:
        """When the next living ticket expires; FOREVER if none does."""
        line, heap = self._line, self._heap
        while line:
            state = line[0].state
            if state is _WAITING or state is _STAGED:
                break
            line.popleft()
        while heap:
            state = heap[0][2].state
            if state is _WAITING or state is _STAGED:
                break
            heappop(heap)
        first = line[0].expiry_ns if line else FOREVER
        if heap and heap[0][0] < first:
            first = heap[0][0]
        if self._pile_ns < first:
            self._clear_pile()
            if heap and heap[0][0] < first:
                first = heap[0][0]
        return first

    def pop_due(self, now_ns: int) -> list[Ticket]:
        """Living tickets whose expiry is at or before `now_ns`, earliest first; they are no longer watched."""
        due: list[Ticket] = []
        line, heap = self._line, self._heap
        while (first_ns := self.next_ns()) <= now_ns:
            due.append(line.popleft() if line and line[0].expiry_ns == first_ns else heappop(heap)[2])
        return due
