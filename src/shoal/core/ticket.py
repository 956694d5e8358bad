"""The ticket: one accepted request as the scheduler sees it.

A ticket knows how much it weighs and how long it may wait; it does not know what it carries (`payload`) or who is told of its end
(`on_end`). Only the scheduler changes its state. Nothing here reads a clock or does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Any

from shoal.core.rules import FOREVER


class TicketState(IntEnum):
    """Where a ticket is. It moves down this list only; everything from ANSWERED on is an ending, and there is exactly one."""

    NEW = 0
    RESERVED = 1  # room in the queue is held while the body is still being read
    WAITING = 2
    STAGED = 3  # in the batch that starts next; may still be taken out
    RUNNING = 4
    ANSWERED = 5
    REFUSED = 6
    EXPIRED = 7
    CANCELLED = 8
    FAILED = 9
    DROPPED = 10  # given up while it waited, because it could not be answered in time any more


class Ticket:
    """One request between acceptance and its single ending.

    Written by the owner before `reserve`/`submit`: `rows` (at least 1), `payload_bytes`, `signature` (tickets batch together only
    when equal), `level` (1 is highest), `tenant`, `deadline_ns` (absolute, or None), `payload` (opaque), `on_end` (called
    once by the engine with the ticket, never by the scheduler), `owner` (opaque, for `on_end`), `length` (of its longest row, where
    rows of different length share a batch; else 0), `cost` (in the unit of `max_batch_cost` where a function says it; 0: its rows).

    Written by the scheduler: `state`, `accepted_ns`, `expiry_ns` (when it really expires: the smaller of its own deadline and the
    queue's timeout), `due_ns` (what deadline order goes by), `lane` (its place in the wait queue), `parts` (the pieces of a
    ticket larger than one batch), `parent` and `start_row` (of such a piece: which rows of the parent's payload it stands for).

    Written by the engine at the end: `answer` with `answer_row` (first row in the batch's outputs), or `error`.
    """

    # Seldom other than this. Kept out of every ticket's memory and construction, which are on the hot path.
    length: int = 0
    cost: float = 0
    parts: list[Ticket] | None = None
    parent: Ticket | None = None
    start_row: int = 0
    error: Exception | None = None

    __slots__ = (
        "__dict__",
        "accepted_ns",
        "answer",
        "answer_row",
        "deadline_ns",
        "due_ns",
        "expiry_ns",
        "lane",
        "level",
        "on_end",
        "owner",
        "payload",
        "payload_bytes",
        "rows",
        "signature",
        "state",
        "tenant",
    )

    def __init__(
        self,
        rows: int = 1,
        payload_bytes: int = 0,
        signature: Hashable = None,
        payload: Any = None,
        on_end: Callable[[Ticket], None] | None = None,
        deadline_ns: int | None = None,
        level: int = 0,
        tenant: Hashable = None,
        owner: Any = None,
    ) -> None:
        self.rows = rows
        self.payload_bytes = payload_bytes
        self.signature = signature
        self.payload = payload
        self.on_end = on_end
        self.deadline_ns = deadline_ns
        self.level = level
        self.tenant = tenant
        self.owner = owner
        self.state = TicketState.NEW
        self.accepted_ns = 0
        self.expiry_ns = FOREVER
        self.due_ns = FOREVER
        self.lane = 0
        self.answer: Any = None
        self.answer_row = 0

    def part_from_parent(self) -> None:
        """A piece has ended: it lets go of its parent and of the payload, or a circle of references would keep both alive."""
        self.parent = None
        self.payload = None
