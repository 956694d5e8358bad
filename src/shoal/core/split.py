"""Tickets larger than one batch: how they are cut, and what is still to come of each.

Pieces are tickets of their own in the queue and in batches. Their parent is what bounds, deadlines and endings are about. Nothing
here touches payloads: which rows a piece stands for is `start_row` and `rows`; cutting and joining arrays is the engine's.
"""

from __future__ import annotations

from shoal.core.rules import FOREVER
from shoal.core.ticket import Ticket, TicketState


class Split:
    """What is left of a cut ticket: pieces that have not started, and pieces that have not come back."""

    __slots__ = ("outstanding", "unstarted")

    def __init__(self, pieces: int) -> None:
        self.unstarted = pieces
        self.outstanding = pieces


def cut(ticket: Ticket, limit_rows: int) -> list[Ticket]:
    """Pieces of at most `limit_rows` rows, in order: all full but perhaps the last, which may share its batch with others.

    A piece has the parent's signature, level, lane, acceptance time and payload, weighs no bytes of its own (the parent's payload
    is one object and is let go when the last piece starts), and has no expiry of its own: the parent expires, once.
    """
    pieces: list[Ticket] = []
    for start_row in range(0, ticket.rows, limit_rows):
        piece = Ticket(
            rows=min(limit_rows, ticket.rows - start_row),
            signature=ticket.signature,
            payload=ticket.payload,
            level=ticket.level,
            tenant=ticket.tenant,
        )
        piece.parent = ticket
        piece.start_row = start_row
        piece.accepted_ns = ticket.accepted_ns
        piece.expiry_ns = FOREVER
        piece.due_ns = ticket.due_ns
        if ticket.length:
            piece.length = ticket.length
        if ticket.cost:
            piece.cost = ticket.cost * piece.rows / ticket.rows
        piece.lane = ticket.lane
        piece.state = TicketState.WAITING
        pieces.append(piece)
    return pieces
