"""Rules for starting a batch that is not full: at once, after a window, or at a distance from the last start.

A rule is a value; what it says depends on its arguments alone. Which rule is in force is `replay`'s choice, and what else bounds a
start (a full batch, a deadline) is the caller's.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

_MOST_LOAD: Final = 0.93  # a cycle is reckoned for at most this load, or it would never end
_BACKLOG_CAPS: Final = 3  # more than so many caps waiting is a real backlog
_KEPT_ARRIVALS: Final = 8192
_EPOCH_ARRIVALS: Final = 16
_EPOCH_BATCHES: Final = 16  # in times of a batch of one row
_RATE_SMOOTHING: Final = 0.05


class StartRule(NamedTuple):
    """When a batch that is not full may start.

    `window`: when its oldest member has waited so many times tau0. `headway`: when so many shares of an executor's cycle have
    passed since the last start; the longer, the fewer executors are idle, and the shorter, the more waits. `slack`: unless None,
    the last idle executor takes no more than its share and so many standard deviations (of a Poisson stream) of it. `shrink`: the
    power with which a hold shrinks where more than a share waits.
    """

    name: str
    window: float = 0.0
    headway: float = 0.0
    slack: float | None = None
    shrink: float = 3.0


AT_ONCE: Final = StartRule("now")
HEADWAY: Final = StartRule("headway", headway=1.6, slack=0.7)
_WINDOWS: Final = (StartRule("window 1/4", 0.25), StartRule("window 1/2", 0.5), StartRule("window 1", 1.0))
_ARMS_OF_ONE: Final = (AT_ONCE, *_WINDOWS)
_ARMS_OF_SEVERAL: Final = (AT_ONCE, HEADWAY, StartRule("headway without cap", headway=1.6), *_WINDOWS)
_ARMS_WITH_OBJECTIVE: Final = (StartRule("headway, small share", headway=1.5, slack=0.3, shrink=5.0), StartRule("window 2", 2.0))


def arms(executors: int, objective: bool) -> tuple[StartRule, ...]:
    """The rules that are worth trying. With an objective late starts in even shares may pay."""
    if executors < 2:
        return _ARMS_OF_ONE
    return _ARMS_OF_SEVERAL + _ARMS_WITH_OBJECTIVE if objective else _ARMS_OF_SEVERAL


def cycle_ns(rate_per_ns: float, executors: int, tau0_ns: float, alpha_ns: float) -> float:
    """How long one executor's batches are apart in the fluid limit: tau0 / (1 - load)."""
    load = min(rate_per_ns * alpha_ns / executors, _MOST_LOAD)
    return tau0_ns / (1.0 - load)


def hold_ns(rule: StartRule, idle: int, executors: int, cycle: float, share: float, waiting: int) -> float:
    """How long after the last start the next may come, by the rule's headway; `idle` executors are free.

    `share` is how many rows come in an executor's share of a cycle. Where more wait the hold shrinks with a power of it, or a few
    slow batches would leave a backlog that starts at a fixed distance never work off.
    """
    if not rule.headway or executors < 2:
        return 0.0
    hold = rule.headway * cycle / executors * (executors - idle) / (executors - 1)
    return hold * (share / waiting) ** rule.shrink if waiting > share else hold


def share_of_last(slack: float, waiting: int, executors: int, share: float) -> int:
    """How many rows the last idle executor may take: somewhat more than its share; of a real backlog, one executor's part."""
    cap = max(1.1 * share, share + slack * math.sqrt(share) + 2.0)
    if waiting > _BACKLOG_CAPS * cap:
        cap = max(cap, waiting / executors)  # all of it at once would be one long batch that the others cannot follow evenly
    return int(cap)


class Arrivals:
    """What came lately: the times of the last few thousand requests, the smoothed rate in rows per nanosecond, rows per request."""

    __slots__ = (
        "_epoch_count",
        "_epoch_ns",
        "_epoch_rows",
        "_epochs",
        "_rows_ever",
        "count",
        "rate_per_ns",
        "rows_each",
        "times_ns",
    )

    def __init__(self) -> None:
        self.times_ns: deque[int] = deque(maxlen=_KEPT_ARRIVALS)
        self.count = 0  # since the beginning
        self.rate_per_ns = 0.0
        self.rows_each = 1.0
        self._epochs = 0
        self._rows_ever = 0
        self._epoch_ns = 0
        self._epoch_count = 0
        self._epoch_rows = 0

    def add(self, now_ns: int, rows: int) -> None:
        """One request."""
        self.times_ns.append(now_ns)
        self.count += 1
        self._rows_ever += rows

    def update(self, now_ns: int, single_ns: int) -> None:
        """Bring the rate up to date; `single_ns` is the time of a batch of one row."""
        if self.count - self._epoch_count < _EPOCH_ARRIVALS or now_ns - self._epoch_ns < _EPOCH_BATCHES * single_ns:
            return
        if self._epochs:
            rows = self._rows_ever - self._epoch_rows
            weight = max(_RATE_SMOOTHING, 1.0 / self._epochs)
            self.rate_per_ns += weight * (rows / (now_ns - self._epoch_ns) - self.rate_per_ns)
            self.rows_each += weight * (rows / (self.count - self._epoch_count) - self.rows_each)
        self._epochs += 1
        self._epoch_ns = now_ns
        self._epoch_count = self.count
        self._epoch_rows = self._rows_ever
