"""The seam between the scheduler, which keeps the books, and whatever decides what runs next and when.

A composer owns the order of the waiting tickets. It takes members out of its queue into batches and says when to ask again; it
knows nothing of bounds, executors' names, endings or expiry lists. Interfaces only; `fixed` and `ranked` are the two that exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from shoal.core.batch import Batch
from shoal.core.ticket import Ticket


class Queue(Protocol):
    """WAITING tickets, and nothing else."""

    tickets: int
    rows: int

    def put(self, ticket: Ticket) -> None:
        """Take in a WAITING ticket whose `lane`, `accepted_ns` and `due_ns` are set."""
        ...

    def forget(self, ticket: Ticket) -> None:
        """Let go of a ticket whose state has just been changed from WAITING to something else."""
        ...

    def to_delayed(self, ticket: Ticket) -> None:
        """Move a WAITING ticket behind all others of its level."""
        ...

    def is_delayed(self, ticket: Ticket) -> bool:
        """Whether a WAITING ticket was moved behind the others."""
        ...

    def longest_waiting_ns(self) -> int:
        """When the longest waiting ticket was accepted; FOREVER if none waits."""
        ...

    def by_level(self) -> list[tuple[int, int]]:
        """Tickets and rows of each level, highest first."""
        ...

    def faults(self) -> list[str]:
        """Every law of the queue's own that does not hold. O(waiting)."""
        ...

    def __iter__(self) -> Iterator[Ticket]:
        """The waiting tickets, in the order in which they would run as things stand."""
        ...


class Composer(Protocol):
    """Order, batch limits and starting times of one model."""

    service_ns: int
    """A recent batch's duration, on the safe side; 0: nothing has run yet."""

    @property
    def queue(self) -> Queue:
        """What waits."""
        ...

    def compose(self, now_ns: int, idle: int, draining: bool) -> Batch | None:
        """Take the batch that may start now out of the queue, its members STAGED; None where waiting may still pay.

        Something waits when this is called. `idle` executors are free, this batch's own included; 0: the batch is to be staged and
        starts when the first of them becomes free.
        """
        ...

    def regrow(self, batch: Batch, now_ns: int, draining: bool) -> bool:
        """More has come since this batch was staged: let it grow or be overtaken. Whether its members changed.

        Only where tickets can be dropped may none be left.
        """
        ...

    def may_change(self, batch: Batch) -> bool:
        """Whether what waits could change this staged batch. Cheap, and True when in doubt."""
        ...

    def put_back(self, batch: Batch) -> None:
        """The members of a staged batch wait again, in their old places; they are WAITING already."""
        ...

    def take_dropped(self) -> list[Ticket]:
        """The tickets that were taken out of the queue, as DROPPED, because they cannot be answered in time; each once."""
        ...

    def expired(self, tickets: list[Ticket]) -> None:
        """These have passed their deadlines while they waited, and are gone."""
        ...

    def wakeup_ns(self, idle: int, draining: bool) -> int:
        """When `compose` will say yes if nothing else happens; in the past if it says so already. Something waits."""
        ...

    def think(self, steps: int) -> bool:
        """Some of the work that is not urgent (a millisecond or less for each step); whether there is more to do now."""
        ...

    def started(self, batch: Batch, now_ns: int) -> None:
        """A batch has started."""
        ...

    def completed(self, batch: Batch, taken_ns: int) -> None:
        """A batch has ended, `taken_ns` after it started; 0 where that says nothing of other batches."""
        ...
