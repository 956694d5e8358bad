"""When requests come and how many rows they bring: seeded, as arrays, before the simulation starts. No scheduler in here.

All functions return arrival times in integer nanoseconds from 0, in order (int64, shape [count]). The same seed gives the same
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_NS_PER_S: Final = 1e9


def _whole(times_ns: np.ndarray[Any, Any]) -> IntArray:
    rounded: IntArray = np.rint(times_ns).astype(np.int64)
    return rounded


def poisson(rate_per_s: float, count: int, seed: int) -> IntArray:
    """Independent users: exponential gaps of mean 1/rate."""
    gaps_ns = np.random.default_rng(seed).exponential(_NS_PER_S / rate_per_s, count)
    return _whole(np.cumsum(gaps_ns))


def constant(rate_per_s: float, count: int) -> IntArray:
    """One request every 1/rate, beginning after the first gap."""
    return _whole(np.arange(1, count + 1) * (_NS_PER_S / rate_per_s))


def on_off(rate_per_s: float, count: int, seed: int, on_ms: float = 100.0, off_ms: float = 100.0) -> IntArray:
    """Bursts: Poisson while on, silence while off, in fixed turns; `rate_per_s` is the average over both.

    Raises ValueError for phases that cannot be: `on_ms` must be positive, `off_ms` not negative.
    """
    if on_ms <= 0 or off_ms < 0:
        raise ValueError("on_ms must be positive and off_ms not negative")
    on_ns, off_ns = on_ms * 1e6, off_ms * 1e6
    busy_ns = np.cumsum(np.random.default_rng(seed).exponential(_NS_PER_S / rate_per_s * on_ns / (on_ns + off_ns), count))
    return _whole(busy_ns + np.floor(busy_ns / on_ns) * off_ns)


def replay(times_ns: Sequence[int]) -> IntArray:
    """Recorded times, moved so that the first is at 0. Raises ValueError if they are not in order."""
    times = np.asarray(times_ns, dtype=np.int64)
    if times.size and bool(np.any(np.diff(times) < 0)):
        raise ValueError("arrival times must not decrease")
    return times - times[0] if times.size else times


def constant_rows(count: int, rows: int = 1) -> IntArray:
    """Every request brings the same number of rows."""
    return np.full(count, rows, dtype=np.int64)


def uniform_rows(count: int, lowest: int, highest: int, seed: int) -> IntArray:
    """Rows drawn evenly from lowest to highest, both included."""
    return np.random.default_rng(seed).integers(lowest, highest, size=count, endpoint=True, dtype=np.int64)
