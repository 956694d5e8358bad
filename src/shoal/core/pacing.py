"""When a batch may start in adaptive mode, and how much the last idle executor may take.

Puts the rule in force (`starting`, `replay`), the arrivals and the model of time together. Reads the queue, changes nothing in it.
"""

from __future__ import annotations

from typing import Final

from shoal.core.latency import LatencyModel
from shoal.core.ranked_queue import RankedQueue
from shoal.core.replay import Chooser, Law
from shoal.core.rules import FOREVER, Rules
from shoal.core.starting import AT_ONCE, HEADWAY, Arrivals, cycle_ns, hold_ns, share_of_last

_MOST_REPLAYED_ROWS: Final = 4096


class Pacing:
    """The starting times of one model's batches."""

    __slots__ = ("_executors", "_last_ns", "_latency", "_limit", "_longest_ns", "arrivals", "chooser")

    def __init__(self, rules: Rules, latency: LatencyModel, executors: int) -> None:
        self._latency = latency
        self._executors = executors
        self._limit = rules.limit_rows
        self._longest_ns = rules.max_delay_ns or FOREVER
        self._last_ns = -FOREVER
        self.arrivals = Arrivals()
        rule = {"replay": None, "headway": HEADWAY, "now": AT_ONCE}[rules.adaptive_start]
        self.chooser = Chooser(executors, rules.objective_ns, trying=rules.adaptive_start == "replay", rule=rule)

    def _cycle(self) -> tuple[float, float]:
        """An executor's cycle in nanoseconds, and the rows that come in its share of it."""
        latency, rate_per_ns = self._latency, self.arrivals.rate_per_ns
        cycle = cycle_ns(rate_per_ns, self._executors, latency.tau0_ns, latency.alpha_ns)
        return cycle, rate_per_ns * cycle / self._executors

    def may_start(self, now_ns: int, idle: int, queue: RankedQueue) -> str:
        """Why a batch may start now, or "" while it is held back. `idle` 0: a batch to be staged, which starts behind another."""
        arrivals = self.arrivals
        arrivals.update(now_ns, self._latency.expected_ns(1))
        if queue.rows >= self._limit or not idle:
            return "idle"
        due_ns = self.wakeup_ns(idle, queue)
        if due_ns > now_ns:
            return ""
        return "idle" if due_ns <= queue.oldest_ns() else "delay"

    def wakeup_ns(self, idle: int, queue: RankedQueue) -> int:
        """When `may_start` will say yes if nothing else happens."""
        latency = self._latency
        rule = self.chooser.rule
        if not idle or rule is AT_ONCE or not latency.known or queue.rows >= self._limit:
            return 0
        oldest_ns = queue.oldest_ns()
        start_ns = 0
        if rule.window:
            start_ns = oldest_ns + int(rule.window * latency.tau0_ns)
        elif rule.headway:
            start_ns = self._last_ns + int(hold_ns(rule, idle, self._executors, *self._cycle(), queue.rows))
        start_ns = min(start_ns, oldest_ns + self._longest_ns)
        due_ns = queue.first_due_ns()
        if due_ns < FOREVER:
            start_ns = min(start_ns, due_ns - latency.upper_ns(queue.rows + 1))
        return start_ns

    def take_limit(self, now_ns: int, idle: int, waiting_rows: int) -> int:
        """How many rows a batch may take."""
        rule = self.chooser.rule
        limit = self._limit
        if rule.slack is None or idle != 1 or self._executors < 2 or not self._latency.known:
            return limit
        return min(limit, share_of_last(rule.slack, waiting_rows, self._executors, self._cycle()[1]))

    def started(self, now_ns: int) -> None:
        """A batch has started."""
        self._last_ns = now_ns

    def think(self, steps: int) -> bool:
        """Some of the work of choosing the rule for starting; whether there is more to do now. Never on the hot path."""
        latency = self._latency
        law = Law(latency.tau0_ns, latency.alpha_ns, tuple(latency.ratios), min(self._limit, _MOST_REPLAYED_ROWS))
        return self.chooser.think(self.arrivals, law, steps)
