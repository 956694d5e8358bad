"""How long a batch takes in the simulator. Models of time only; nothing runs here."""

# ruff: noqa: RUF002 - the symbols of the formula are Greek
from __future__ import annotations

import random


class ServiceTime:
    """l = τ0 + α · work nanoseconds for a batch, with the departures that real models show.

    `work` is the rows of the batch, or its padded tokens where rows have lengths. `step_rows`: a staircase, the work is rounded up
    to a multiple of it. `noise`: the standard deviation of the logarithm of a log-normal factor of median 1. `slow_share` of the
    batches take `slow_factor` times as long. Both are drawn from a generator of their own with `seed`, so that the arrivals stay
    the same.
    """

    def __init__(
        self,
        tau0_ns: float,
        alpha_ns: float,
        *,
        step_rows: int = 1,
        noise: float = 0.0,
        slow_share: float = 0.0,
        slow_factor: float = 3.0,
        seed: int = 0,
    ) -> None:
        if tau0_ns < 0 or alpha_ns < 0 or step_rows < 1 or noise < 0:
            raise ValueError("times and noise must not be negative, and step_rows at least 1")
        if not 0 <= slow_share <= 1 or slow_factor <= 0:
            raise ValueError("slow_share must be between 0 and 1, and slow_factor above 0")
        self.tau0_ns = tau0_ns
        self.alpha_ns = alpha_ns
        self._step_rows = step_rows
        self._noise = noise
        self._slow_share = slow_share
        self._slow_factor = slow_factor
        self._draw = random.Random(seed)

    def law_ns(self, work: int) -> float:
        """Nanoseconds without what chance adds."""
        if self._step_rows > 1:
            work = -(-work // self._step_rows) * self._step_rows
        return self.tau0_ns + self.alpha_ns * work

    def __call__(self, work: int) -> int:
        """Nanoseconds that a batch of this work takes this time; at least 1."""
        taken_ns = self.law_ns(work)
        if self._noise:
            taken_ns *= self._draw.lognormvariate(0.0, self._noise)
        if self._slow_share and self._draw.random() < self._slow_share:
            taken_ns *= self._slow_factor
        return max(1, round(taken_ns))
