"""Shadow replay: recent arrivals are run through each rule for starting in virtual time, and the best one is put in force.

Bursts want a window, smooth traffic wants headway, and nobody knows in advance. The comparison needs no scheduler: one queue, first
in first out, batches by the measured law of time. Work comes in steps, so that whoever runs it can do so a little at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from heapq import heapify, heapreplace
from typing import Final, NamedTuple

from shoal.core.rules import FOREVER
from shoal.core.starting import (
    AT_ONCE,
    Arrivals,
    StartRule,
    arms,
    cycle_ns,
    hold_ns,
    share_of_last,
)

_EVERY_ARRIVALS: Final = 2000
_LEAST_ARRIVALS: Final = 6000  # fewer say little about a P99, and may all lie in one burst
_CYCLES: Final = 50  # arrivals of at least so many cycles are replayed
_LATE_WEIGHT: Final = 30.0
_NEW_WEIGHT: Final = 0.25  # of scores that are smoothed over replays
_GAIN: Final = 0.02  # by which a rule must be better to be put in force
_WORK_PER_STEP: Final = 512  # in arrivals; half a millisecond or so
_WORK_PER_BATCH: Final = 16  # what a batch costs beside its arrivals


class Law(NamedTuple):
    """How long batches take: tau0 + alpha * rows nanoseconds, times one of these factors in turn; at most `limit` rows."""

    tau0_ns: float
    alpha_ns: float
    factors: Sequence[float]
    limit: int


def replay(
    times_ns: Sequence[int], rule: StartRule, executors: int, law: Law, objective_ns: int, rate_per_ns: float
) -> Generator[None, None, float]:
    """The score of one rule on these arrivals (one row each); lower is better. Yields now and then, between batches.

    30 · (1 - share answered in time) + ln P99 + ½ ln mean of the latencies. With an objective (below FOREVER) requests are given up
    as early drop does: the batch is the largest that can be answered in time.
    """
    cycle = cycle_ns(rate_per_ns, executors, law.tau0_ns, law.alpha_ns)
    share = rate_per_ns * cycle / executors
    factors = law.factors or (1.0,)
    span = [law.tau0_ns + law.alpha_ns * rows for rows in range(law.limit + 1)]
    free_ns = [float(times_ns[0])] * executors
    heapify(free_ns)
    latencies: list[float] = []
    count = len(times_ns)
    head = batches = work = 0
    last_ns = -math.inf
    while head < count:
        now_ns, tail = _start(times_ns, head, rule, free_ns, last_ns, cycle, share, span, objective_ns)
        size = min(tail - head, law.limit)
        if rule.slack is not None and executors > 1 and _idle(free_ns, now_ns) == 1:
            size = min(size, share_of_last(rule.slack, tail - head, executors, share))
        if objective_ns < FOREVER:
            head, size = _give_up(times_ns, head, tail, size, now_ns - objective_ns, span)
            if not size:
                continue
        done_ns = now_ns + span[size] * factors[batches % len(factors)]
        latencies += [done_ns - time_ns for time_ns in times_ns[head : head + size]]
        heapreplace(free_ns, done_ns)
        head += size
        last_ns = now_ns
        batches += 1
        work += size + _WORK_PER_BATCH
        if work >= _WORK_PER_STEP:
            work = 0
            yield
    return _score(latencies, count, objective_ns)


def _start(
    times_ns: Sequence[int],
    head: int,
    rule: StartRule,
    free_ns: list[float],
    last_ns: float,
    cycle: float,
    share: float,
    span: Sequence[float],
    objective_ns: int,
) -> tuple[float, int]:
    """When the next batch starts, and the index behind the last arrival that may be in it."""
    count = len(times_ns)
    limit = len(span) - 1
    now_ns = max(free_ns[0], float(times_ns[head]))
    tail = bisect_right(times_ns, now_ns, head)
    executors = len(free_ns)
    while tail - head < limit:
        start_ns = last_ns + hold_ns(rule, _idle(free_ns, now_ns), executors, cycle, share, tail - head)
        if rule.window:
            start_ns = times_ns[head] + rule.window * span[0]
        if objective_ns < FOREVER:
            start_ns = min(start_ns, times_ns[head] + objective_ns - span[tail - head + 1])
        if start_ns <= now_ns:
            break
        if rule.headway:
            start_ns = min([start_ns, *[time_ns for time_ns in free_ns if time_ns > now_ns]])
        if tail < count and times_ns[tail] <= start_ns:
            now_ns = float(times_ns[tail])
            tail += 1
        else:
            now_ns = start_ns
    return now_ns, tail


def _idle(free_ns: Sequence[float], now_ns: float) -> int:
    return sum([time_ns <= now_ns for time_ns in free_ns])


def _give_up(times_ns: Sequence[int], head: int, tail: int, limit: int, born_ns: float, span: Sequence[float]) -> tuple[int, int]:
    """First arrival in the batch and how many are, so that most are answered in time; `born_ns`: now less the objective."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) >> 1
        if times_ns[tail - middle] >= born_ns + span[middle]:
            low = middle
        else:
            high = middle - 1
    if not low:
        return tail, 0
    return bisect_left(times_ns, born_ns + span[low], head, tail), low


def _score(latencies: list[float], count: int, objective_ns: int) -> float:
    if not latencies:
        return _LATE_WEIGHT
    latencies.sort()
    in_time = bisect_right(latencies, objective_ns) / count
    p99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
    return _LATE_WEIGHT * (1.0 - in_time) + math.log(p99) + 0.5 * math.log(sum(latencies) / len(latencies))


class Chooser:
    """Which rule is in force, and the replays that decide it.

    Begins with starting at once: what holding back is worth on this traffic only a replay can tell.
    """

    __slots__ = ("_arms", "_executors", "_objective_ns", "_replayed", "_scores", "_work", "replays", "rule")

    def __init__(self, executors: int, objective_ns: int, *, trying: bool = True, rule: StartRule | None = None) -> None:
        self._executors = executors
        self._objective_ns = objective_ns
        self._arms = arms(executors, objective_ns < FOREVER) if trying else ()
        self.rule = rule or AT_ONCE
        self._scores: dict[str, float] = {}
        self._replayed = 0  # arrivals when the last replay began
        self._work: Generator[None, None, None] | None = None
        self.replays = 0

    def think(self, arrivals: Arrivals, law: Law, steps: int) -> bool:
        """Do so many steps of the replay under way, or of a new one if enough has come since; whether there is more to do now."""
        if self._work is None:
            if not self._due(arrivals, law):
                return False
            self._replayed = arrivals.count
            self._work = self._try_all(arrivals, law)
        for _ in range(steps):
            if next(self._work, self) is self:
                self._work = None
                return False
        return True

    def _due(self, arrivals: Arrivals, law: Law) -> bool:
        enough = arrivals.count >= _LEAST_ARRIVALS and arrivals.count - self._replayed >= _EVERY_ARRIVALS
        return enough and bool(self._arms) and law.tau0_ns > 0.0 and arrivals.rate_per_ns > 0.0

    def _try_all(self, arrivals: Arrivals, law: Law) -> Generator[None, None, None]:
        cycle = cycle_ns(arrivals.rate_per_ns, self._executors, law.tau0_ns, law.alpha_ns)
        wanted = max(_LEAST_ARRIVALS, int(_CYCLES * arrivals.rate_per_ns * cycle))
        times_ns = list(arrivals.times_ns)[-wanted:]
        rows = arrivals.rows_each
        by_request = law._replace(alpha_ns=law.alpha_ns * rows, limit=max(1, int(law.limit / rows)))
        rate = arrivals.rate_per_ns / rows
        scores = self._scores
        for arm in self._arms:
            score = yield from replay(times_ns, arm, self._executors, by_request, self._objective_ns, rate)
            old = scores.get(arm.name)
            weight = max(_NEW_WEIGHT, 1.0 / (self.replays + 1))
            scores[arm.name] = score if old is None else old + weight * (score - old)
            yield
        best = min(self._arms, key=lambda arm: scores[arm.name])
        if scores[best.name] < scores.get(self.rule.name, math.inf) - _GAIN:
            self.rule = best
        self.replays += 1
