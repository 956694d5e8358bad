"""When a batch may start in adaptive mode."""

from __future__ import annotations

from shoal.core.latency import LatencyModel
from shoal.core.ranked_queue import RankedQueue
from shoal.core.rules import Rules


class Pacing:
    """Starts at once."""

    def __init__(self, rules: Rules, latency: LatencyModel, executors: int) -> None:
        self._rules = rules

    def may_start(self, now_ns: int, idle: int, queue: RankedQueue) -> str:
        """Why a batch may start, or ""."""
        return "idle"

    def take_limit(self, now_ns: int, idle: int, waiting_rows: int) -> int:
        """How many rows it may take at most."""
        return self._rules.limit_rows

    def wakeup_ns(self, idle: int, queue: RankedQueue) -> int:
        """When `may_start` will say yes."""
        return 0

    def started(self, now_ns: int) -> None:
        """A batch has started."""
