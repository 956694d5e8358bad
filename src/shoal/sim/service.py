"""How long a batch takes in the simulator. Models of time only; nothing runs here."""

# ruff: noqa: RUF002 - the symbols of the formula are Greek
from __future__ import annotations

import random


class ServiceTime:
    """l(b) = τ0 + α·b nanoseconds for a batch of b rows, with two departures that real models show.

    `step_rows`: a staircase, b is rounded up to a multiple of it. `noise`: the relative standard deviation of a log-normal factor
    of median 1, drawn from a generator of its own with `seed`, so that the arrivals stay the same.
    """

    def __init__(self, tau0_ns: float, alpha_ns: float, *, step_rows: int = 1, noise: float = 0.0, seed: int = 0) -> None:
        if tau0_ns < 0 or alpha_ns < 0 or step_rows < 1 or noise < 0:
            raise ValueError("times and noise must not be negative, and step_rows at least 1")
        self.tau0_ns = tau0_ns
        self.alpha_ns = alpha_ns
        self._step_rows = step_rows
        self._noise = noise
        self._draw = random.Random(seed)

    def __call__(self, rows: int) -> int:
        """Nanoseconds that a batch of `rows` rows takes this time; at least 1."""
        if self._step_rows > 1:
            rows = -(-rows // self._step_rows) * self._step_rows
        taken_ns = self.tau0_ns + self.alpha_ns * rows
        if self._noise:
            taken_ns *= self._draw.lognormvariate(0.0, self._noise)
        return max(1, round(taken_ns))
