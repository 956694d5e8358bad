"""The scheduler of one model: a pure machine from (event, time) to decisions. See the class for the contract."""

from __future__ import annotations

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.decisions import Decision, Refuse
from shoal.core.ticket import Ticket


class Scheduler:
    """CONTRACT (fixed; the body is to be written).

    All times are integer nanoseconds of one monotonic clock that the caller owns. No method blocks, raises for a full queue, or calls
    anything of the caller's. Every ticket that was accepted ends exactly once: by `complete` (ANSWERED/FAILED, set by the engine
    through `complete`), `Expire` (EXPIRED) or `cancel` (CANCELLED).
    """

    def __init__(self, batching: BatchingSettings, queue: QueueSettings, *, executors: int = 1, stage: bool = False) -> None: ...

    def reserve(self, ticket: Ticket, now_ns: int) -> Refuse | None:
        """Hold room for a ticket whose body is not read yet (its `rows` are at least 1 and `payload_bytes` what was announced)."""

    def submit(self, ticket: Ticket, now_ns: int) -> Refuse | None:
        """Queue a NEW or RESERVED ticket; bounds are exact. A refused ticket is REFUSED and its reservation released."""

    def cancel(self, ticket: Ticket, now_ns: int) -> bool:
        """End a ticket early. True if it left (RESERVED, WAITING or STAGED; now CANCELLED); a RUNNING one goes on: False.

        Cancelling a RUNNING ticket marks nothing; the engine discards its rows. Calling it on an ended ticket is False.
        """

    def poll(self, now_ns: int) -> list[Decision]:
        """Everything that is due at `now_ns`: expiries first, then batches to start, then the batch to stage."""

    def recall(self, batch: Batch) -> None:
        """The driver took a STAGED batch back before it started: its members wait again, in their old places."""

    def start(self, batch: Batch, now_ns: int) -> None:
        """The driver saw a STAGED batch start on an executor that became free: it is RUNNING from here on."""

    def complete(self, batch: Batch, now_ns: int) -> None:
        """A RUNNING batch ended; its executor is free. Members' states are set by the caller (ANSWERED or FAILED)."""

    def drain(self, now_ns: int) -> None:
        """Refuse whatever comes; send what waits without waiting for windows."""

    def next_wakeup_ns(self) -> int | None:
        """When `poll` must be called again if nothing else happens; None: not at all."""
