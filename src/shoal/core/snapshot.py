"""What a scheduler looks like at one moment, as plain frozen data: for metrics, pages and tests. Reads only, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.rules import FOREVER

if TYPE_CHECKING:
    from shoal.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class LevelSnapshot:
    """What waits on one priority level (STAGED tickets not included); pieces of cut tickets count one by one in `tickets`."""

    level: int
    tickets: int
    rows: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scheduler at one time.

    `held_*` is what the bounds count: reserved + waiting + staged. `waiting_*` includes staged. A cut ticket counts once in
    requests: as waiting until its last piece has started.
    `accepted` counts tickets for which room was held (by `reserve` or `submit`); of these `released` were refused when their
    body turned out larger than announced. accepted = reserved + waiting + running + answered + failed + expired + cancelled +
    dropped + released. `refused` counts by bound. `oldest_wait_ns` is 0 where nothing waits. `service_ns` is a cautious estimate of
    how long a batch takes, 0 before the first.
    """

    now_ns: int
    draining: bool
    executors: int
    held_requests: int
    held_rows: int
    held_bytes: int
    reserved_requests: int
    reserved_rows: int
    reserved_bytes: int
    waiting_requests: int
    waiting_rows: int
    waiting_bytes: int
    staged_requests: int
    staged_rows: int
    running_batches: int
    running_requests: int
    running_rows: int
    oldest_wait_ns: int
    service_ns: int
    levels: tuple[LevelSnapshot, ...]
    accepted: int
    released: int
    answered: int
    failed: int
    expired: int
    cancelled: int
    dropped: int
    refused: Mapping[str, int]
    batches: Mapping[str, int]


def take_snapshot(scheduler: Scheduler, now_ns: int) -> Snapshot:
    """The state of a scheduler at `now_ns`. O(waiting) with several levels, O(1) with one."""
    s = scheduler
    queue = s._queue
    staged = s._staged
    oldest_ns = min((ticket.accepted_ns for ticket in staged.members), default=FOREVER) if staged else FOREVER
    oldest_ns = min(oldest_ns, queue.longest_waiting_ns())
    return Snapshot(
        now_ns=now_ns,
        draining=s._draining,
        executors=s._executors,
        held_requests=s._held_requests,
        held_rows=s._held_rows,
        held_bytes=s._held_bytes,
        reserved_requests=len(s._reserved),
        reserved_rows=s._reserved_rows,
        reserved_bytes=s._reserved_bytes,
        waiting_requests=s.waiting_requests,
        waiting_rows=s.waiting_rows,
        waiting_bytes=s._held_bytes - s._reserved_bytes,
        staged_requests=sum(ticket.parent is None for ticket in staged.members) if staged else 0,
        staged_rows=staged.rows if staged else 0,
        running_batches=len(s._running),
        running_requests=s._running_requests,
        running_rows=s._running_rows,
        oldest_wait_ns=0 if oldest_ns == FOREVER else now_ns - oldest_ns,
        service_ns=s._composer.service_ns,
        levels=tuple(LevelSnapshot(level, *figures) for level, figures in enumerate(queue.by_level(), start=1)),
        accepted=s._admitted,
        released=s._released,
        answered=s._answered,
        failed=s._failed,
        expired=s._expired,
        cancelled=s._cancelled,
        dropped=s._dropped,
        refused=dict(s._refused),
        batches=dict(s._batches),
    )
