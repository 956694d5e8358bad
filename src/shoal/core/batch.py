"""A batch: tickets that run together. It goes from open to closed once, and never back."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Final

from shoal.core.ticket import Ticket

REASONS: Final = ("full", "budget", "delay", "idle", "preferred", "shape", "drain", "deadline")


class BatchState(IntEnum):
    """A STAGED batch may grow or lose members; a RUNNING one is fixed; a DONE one is forgotten by the scheduler."""

    STAGED = 0
    RUNNING = 1
    DONE = 2


class Batch:
    """Members in order, their total rows, why it was sent, and when it was started.

    `reason` is one of REASONS: the row limit is reached (`full`), or another budget is (`budget`); the oldest waited `max_delay`
    (`delay`); no delay is set and a slot was free (`idle`); a `preferred` size was reached; it could not grow, because the next in
    order differs or does not fit (`shape`); the queue is being flushed (`drain`); waiting longer would have missed a deadline
    (`deadline`).
    """

    __slots__ = ("cut", "members", "reason", "rows", "signature", "started_ns", "state")

    def __init__(self, members: list[Ticket], rows: int, signature: Hashable, reason: str) -> None:
        self.members = members
        self.rows = rows
        self.signature = signature
        self.reason = reason
        self.state = BatchState.STAGED
        self.started_ns = 0
        self.cut = 0  # how many members are pieces of larger tickets
