"""Who gets answered in time and who does not, lately: what early drop goes by when several kinds of requests share a queue.

Counts only; which tickets are given up is the composer's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from shoal.core.ticket import Ticket

_SMOOTHING: Final = 1 / 512  # of the shares, for each ticket
_HEAVY: Final = 0.05
_BEHIND: Final = 0.05


class Losses:
    """Shares of tickets that were dropped, overall and by class; tickets are of one class when their objectives are alike."""

    __slots__ = ("_classes", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self._classes: dict[int, float] = {}

    @property
    def heavy(self) -> bool:
        """Whether so much is lost that what is passed over is not worth keeping."""
        return self.share >= _HEAVY

    def served(self, tickets: Iterable[Ticket]) -> None:
        """These have started, in time."""
        self._count(tickets, 0.0)

    def lost(self, tickets: Iterable[Ticket]) -> None:
        """These were given up."""
        self._count(tickets, 1.0)

    def _count(self, tickets: Iterable[Ticket], lost: float) -> None:
        classes = self._classes
        for ticket in tickets:
            kind = (ticket.due_ns - ticket.accepted_ns).bit_length()
            share = classes.get(kind, 0.0)
            classes[kind] = share + _SMOOTHING * (lost - share)
            self.share += _SMOOTHING * (lost - self.share)

    def guarded(self, size: int, views: Sequence[Any], start_ns: int, span: Callable[[int], int]) -> int:
        """The size of the batch, made smaller where a class that is behind would be passed over."""
        return size
