"""What a scheduler looks like at one moment, as plain frozen data: for metrics, pages and tests. Reads only, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    released. `refused` counts by bound. `oldest_wait_ns` is 0 where nothing waits. `service_ns` is a cautious estimate of how
    long a batch takes, 0 before the first.
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
    refused: Mapping[str, int]
    batches: Mapping[str, int]
