"""A batch: tickets that run together. It goes from open to closed once, and never back."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from shoal.core.ticket import Ticket


class BatchState(IntEnum):
    """A STAGED batch may grow or lose members; a RUNNING one is fixed; a DONE one is forgotten by the scheduler."""

    STAGED = 0
    RUNNING = 1
    DONE = 2


class Batch:
    """Members in order, their total rows, why it was sent (`full`, `delay`, `idle`, `preferred`, `shape`, `drain`), and when."""

    __slots__ = ("members", "reason", "rows", "signature", "started_ns", "state")

    def __init__(self, members: list[Ticket], rows: int, signature: Hashable, reason: str) -> None:
        self.members = members
        self.rows = rows
        self.signature = signature
        self.reason = reason
        self.state = BatchState.STAGED
        self.started_ns = 0
