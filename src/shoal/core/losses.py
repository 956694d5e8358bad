"""Who gets answered in time and who does not, lately: what early drop goes by when several kinds of requests share a queue.

Counts only; which tickets are given up is the composer's decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from shoal.core.ranked_queue import Flow
from shoal.core.selection import largest_in_time
from shoal.core.ticket import Ticket

_SMOOTHING: Final = 1 / 256  # of the shares, for each ticket
_HEAVY: Final = 0.05
_BEHIND: Final = 0.05
_WORTH_COUNTING: Final = 1e-4  # while less than this is lost nobody is behind
_MEMORY: Final = 4096  # tickets after which counts are halved


def _weight(count: int) -> float:
    """Of `count` equal values in a row, in a mean smoothed by each."""
    return 1.0 - (1.0 - _SMOOTHING) ** count


View = tuple[Flow, Sequence[int], Sequence[Ticket]]


class _Class:
    """What became of the tickets of one class: how many there were lately, and the share of them that was given up."""

    __slots__ = ("lost_share", "seen")

    def __init__(self) -> None:
        self.seen = 0.0
        self.lost_share = 0.0


class Losses:
    """Shares of tickets that were given up, overall and by class.

    Tickets are of one class when they are of one tenant (where tenants are told apart) and their objectives lie within a factor of
    about 1.4.
    """

    __slots__ = ("_by_tenant", "_classes", "_seen", "share")

    def __init__(self, by_tenant: bool) -> None:
        self._by_tenant = by_tenant
        self._classes: dict[Hashable, _Class] = {}
        self._seen = 0.0
        self.share = 0.0

    @property
    def heavy(self) -> bool:
        """Whether so much is lost that what is passed over is not worth keeping."""
        return self.share >= _HEAVY

    def _class_of(self, ticket: Ticket) -> Hashable:
        objective_ns = ticket.due_ns - ticket.accepted_ns
        kind = (objective_ns * objective_ns).bit_length()
        return (ticket.tenant, kind) if self._by_tenant else kind

    def served(self, tickets: Sequence[Ticket]) -> None:
        """These have started, in time."""
        if self.share >= _WORTH_COUNTING:
            self._count(tickets, 0.0)

    def lost(self, tickets: Sequence[Ticket]) -> None:
        """These were given up."""
        self._count(tickets, 1.0)

    def _count(self, tickets: Sequence[Ticket], lost: float) -> None:
        if self._seen >= _MEMORY:
            self._age()
        classes = self._classes
        self._seen += len(tickets)
        self.share += _weight(len(tickets)) * (lost - self.share)
        times = [ticket.due_ns - ticket.accepted_ns for ticket in tickets]
        kinds: Iterable[Hashable] = [(time_ns * time_ns).bit_length() for time_ns in times]
        if self._by_tenant:
            kinds = zip([ticket.tenant for ticket in tickets], kinds, strict=True)
        for kind, count in Counter(kinds).items():
            figures = classes.get(kind)
            if figures is None:
                figures = classes[kind] = _Class()
            figures.seen += count
            figures.lost_share += _weight(count) * (lost - figures.lost_share)

    def _age(self) -> None:
        """Old counts lose half of their weight; classes of which nothing came for long are forgotten."""
        self._seen /= 2
        for kind, figures in list(self._classes.items()):
            figures.seen /= 2
            if figures.seen < 0.5:
                del self._classes[kind]

    def guarded(self, size: int, views: Sequence[View], start_ns: int, span: Callable[[int], int]) -> int:
        """The rows of a batch that was to have `size`, so that no class is starved by those with more time.

        The largest batch serves most, and passes over whoever cannot wait for the end of it. A class that loses 5 points more
        than the luckiest says how long this one may take: the largest batch of which its own tickets can in time fill the share
        that they have in the traffic.
        """
        classes = self._classes
        if len(classes) < 2:
            return size
        bound = min([figures.lost_share for figures in classes.values()]) + _BEHIND
        finish_ns = start_ns + span(size)
        worst: Hashable = None
        worst_share = bound
        for _, keys, tickets in views:
            for ticket in tickets[: bisect_left(keys, finish_ns)]:
                kind = self._class_of(ticket)
                figures = classes.get(kind)
                if figures is not None and figures.lost_share > worst_share:
                    worst, worst_share = kind, figures.lost_share
        if worst is None:
            return size
        own = sorted([ticket.due_ns for _, _, tickets in views for ticket in tickets if self._class_of(ticket) == worst])
        part = classes[worst].seen / self._seen
        return largest_in_time(lambda key: int((len(own) - bisect_left(own, key)) / part), size, start_ns, span) or size
