"""Who sends what: tenants, levels, lengths and fan-outs for the simulator, seeded, as arrays. When it comes is for `arrivals`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.sim.arrivals import IntArray, poisson


def choices(shares: Sequence[float], count: int, seed: int) -> IntArray:
    """Which of so many kinds each request is of, drawn with these relative shares: indices from 0."""
    weights = np.asarray(shares, dtype=np.float64)
    drawn: IntArray = np.random.default_rng(seed).choice(len(weights), size=count, p=weights / weights.sum()).astype(np.int64)
    return drawn


def lognormal_lengths(median: float, sigma: float, lowest: int, highest: int, count: int, seed: int) -> IntArray:
    """Lengths of texts: log-normal, rounded, and clipped to lowest…highest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    lengths: IntArray = np.clip(np.rint(drawn), lowest, highest).astype(np.int64)
    return lengths


def uniform_lengths(lowest: int, highest: int, count: int, seed: int) -> IntArray:
    """Every length from lowest to highest equally often."""
    return np.random.default_rng(seed).integers(lowest, highest, size=count, endpoint=True, dtype=np.int64)


def fan_out(rate_per_s: float, count: int, width: int, seed: int) -> IntArray:
    """Independent users each of whom sends `width` requests at the same instant; `rate_per_s` counts requests."""
    users = -(-count // width)
    return np.repeat(poisson(rate_per_s / width, users, seed), width)[:count]
