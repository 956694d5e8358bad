"""What the scheduler decides, as plain data. The driver acts on it; the scheduler itself does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.batch import Batch
from shoal.core.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start this batch now: an executor is reserved for it and its members are RUNNING."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Stage:
    """Offer this batch to the next executor that becomes free; it may be recalled until it starts."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Expire:
    """These tickets have passed their deadline; they have left the queue and will never run."""

    tickets: list[Ticket]


@dataclass(frozen=True, slots=True)
class Drop:
    """These tickets cannot be answered in time any more; they have left the queue (DROPPED) and will never run.

    Those with an `expiry_ns` had a deadline of their own; the others missed the objective of the queue.
    """

    tickets: list[Ticket]


class Refuse(NamedTuple):
    """A ticket was not accepted.

    `reason` is a word of the error table (`queue_full`, `too_large`, `draining`, `bad_request`); `bound` names the limit that was
    reached (`requests`, `rows`, `bytes`, `batch`) or the field at fault (`priority`, `rows`); `draining` has none and repeats the
    word. `limit` is its value and `used` what was taken when the ticket came, or what the ticket asked for where that alone was
    too much. A request that would not fit into an empty queue is `too_large`, not `queue_full`: no retry can help it.
    """

    reason: str
    bound: str
    limit: int
    used: int


Decision = Dispatch | Stage | Expire | Drop
