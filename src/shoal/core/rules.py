"""Settings turned into what the hot path compares: plain integers in nanoseconds, rows and bytes.

Conversion only, done once per scheduler; no decision is taken here. `FOREVER` stands for "no bound" and "no expiry", so that the
hot path compares integers without asking for None.
"""

from __future__ import annotations

from typing import Final

from shoal.config.settings import BatchingSettings, QueueSettings

FOREVER: Final = 1 << 62
"""Larger than any time in nanoseconds, any count of rows and any count of bytes that can occur."""

_NS_PER_MS: Final = 1_000_000


def ms_to_ns(milliseconds: float) -> int:
    """Milliseconds to whole nanoseconds, rounded to nearest."""
    return round(milliseconds * _NS_PER_MS)


class Rules:
    """The settings of one model's scheduler.

    `limit_rows` is the most rows in one batch; `single` means that every request runs alone, whatever its rows (a
    `max_batch_size` of 0). `full_rows` is the size from which a batch cannot grow: the largest preferred size, or the limit where
    none is preferred (Triton's rule). `preferred` is empty where it cannot matter.
    """

    __slots__ = (
        "default_level",
        "default_timeout_ns",
        "delay_expired",
        "full_rows",
        "levels",
        "limit_rows",
        "max_bytes",
        "max_delay_ns",
        "max_requests",
        "max_rows",
        "override_timeout",
        "preferred",
        "preferred_min_rows",
        "reorder",
        "single",
        "split",
    )

    def __init__(self, batching: BatchingSettings, queue: QueueSettings) -> None:
        self.single = batching.max_batch_size <= 0
        self.limit_rows = FOREVER if self.single else batching.max_batch_size
        self.max_delay_ns = max(0, ms_to_ns(batching.max_delay_ms))
        sizes = frozenset(size for size in batching.preferred_batch_sizes if 0 < size <= self.limit_rows)
        self.preferred = frozenset() if self.single or self.max_delay_ns == 0 else sizes
        self.preferred_min_rows = min(self.preferred, default=FOREVER)
        self.full_rows = 1 if self.single else max(self.preferred, default=self.limit_rows)
        self.reorder = batching.reorder and not self.single
        self.split = batching.oversize == "split"
        self.max_requests = FOREVER if queue.max_queue_requests is None else queue.max_queue_requests
        self.max_rows = FOREVER if queue.max_queue_rows is None else queue.max_queue_rows
        self.max_bytes = FOREVER if queue.max_queue_bytes is None else queue.max_queue_bytes
        self.default_timeout_ns = FOREVER if queue.default_timeout_ms is None else ms_to_ns(queue.default_timeout_ms)
        self.override_timeout = queue.allow_timeout_override
        self.delay_expired = queue.timeout_action == "delay"
        self.levels = max(1, queue.priority_levels)
        self.default_level = queue.default_priority
