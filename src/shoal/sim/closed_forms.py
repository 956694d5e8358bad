"""What theory says must come out of the scheduler: one slot or none busy, Poisson arrivals, l(b) = τ0 + α·b, one row per request.

Formulas only, computed numerically with numpy; nothing is simulated here. Times are in one unit throughout (milliseconds by
habit), rates in requests per that unit. Distributions are truncated where what is cut off weighs next to nothing (1e-12).
Take-everything chain and its bound: Y. Inoue, "Queueing analysis of GPU-based inference servers with dynamic batching: a
closed-form characterization", 2021; the rest follows from the same renewal arguments, written out beside each function.
"""

# ruff: noqa: RUF002 - the symbols of the formulas are Greek, and their minus is a minus
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


def _log_factorials(count: int) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, count + 1)))))


def poisson_pmf(mean: float | np.ndarray[Any, Any], largest: int) -> FloatArray:
    """P(Poisson(mean) = k) for k = 0 … largest; shape of `mean` with k as last axis."""
    means = np.asarray(mean, dtype=np.float64)[..., None]
    k = np.arange(largest + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where(k == 0, 0.0, k * np.log(means)) - means - _log_factorials(largest)
    result: FloatArray = np.exp(np.where(means == 0.0, np.where(k == 0, 0.0, -np.inf), exponent))
    return result


def _stationary(transition: FloatArray) -> FloatArray:
    """π with π·P = π and Σπ = 1; rows that were cut off are scaled up to 1."""
    matrix = transition / transition.sum(axis=1, keepdims=True)
    system = matrix.T - np.eye(len(matrix))
    system[-1] = 1.0  # one balance equation follows from the others; the sum takes its place
    target = np.zeros(len(matrix))
    target[-1] = 1.0
    return np.clip(np.linalg.solve(system, target), 0.0, None)


@dataclass(frozen=True)
class TakeEverything:
    """One slot, no window, no batch limit: B' = max(1, Poisson(λ·l(B))). Needs ρ = λα < 1."""

    rate: float
    tau0: float
    alpha: float
    probabilities: FloatArray
    """P(B = b) for b = 0, 1, …; the first is 0."""

    @classmethod
    def solve(cls, rate: float, tau0: float, alpha: float) -> TakeEverything:
        """Solve the chain. Raises ValueError where λα ≥ 1."""
        rho = rate * alpha
        if rho >= 1:
            raise ValueError("the queue is unstable: rate * alpha must be below 1")
        mean = (rate * tau0 + 1) / (1 - rho)
        largest = math.ceil(mean + 12 * math.sqrt(mean / (1 - rho * rho)) + 20)
        return cls(rate, tau0, alpha, cls._chain(rate, tau0, alpha, largest))

    @staticmethod
    def _chain(rate: float, tau0: float, alpha: float, largest: int) -> FloatArray:
        sizes = np.arange(1, largest + 1)
        pmf = poisson_pmf(rate * (tau0 + alpha * sizes), largest)
        transition = pmf[:, 1:].copy()
        transition[:, 0] += pmf[:, 0]
        return np.concatenate(([0.0], _stationary(transition)))

    def _sizes(self) -> FloatArray:
        return np.arange(len(self.probabilities), dtype=np.float64)

    def service(self) -> FloatArray:
        """l(b) for every b."""
        return self.tau0 + self.alpha * self._sizes()

    def idle_probability(self) -> float:
        """π0 = P(no arrival during a batch)."""
        return float(self.probabilities @ np.exp(-self.rate * self.service()))

    def mean_batch(self) -> float:
        """E[B], from the distribution; equals (λτ0 + π0)/(1 − ρ)."""
        return float(self.probabilities @ self._sizes())

    def mean_latency(self) -> float:
        """E[W] = (λ·E[l²]/2 + E[B·l(B)])/E[B]."""
        p, times = self.probabilities, self.service()
        return float((self.rate * (p @ times**2) / 2 + p @ (self._sizes() * times)) / self.mean_batch())

    @cached_property
    def _others(self) -> FloatArray:
        """P(k arrivals during a batch of b), for b = 1, 2, …"""
        return poisson_pmf(self.rate * self.service()[1:], 2 * len(self.probabilities))

    def latency_above(self, x: float) -> float:
        """P(W > x). A request that finds batch b running waits U·h, h = l(b), and leaves with all who come during h.

        The uniform U is integrated exactly: for k others, P(U·h > x − l(1 + k)) is linear in x, cut off at 0 and 1.
        """
        p, times, others = self.probabilities[1:], self.service()[1:], self._others
        own = self.tau0 + self.alpha * (1 + np.arange(others.shape[1]))
        beyond = np.clip(1 - (x - own[None, :]) / times[:, None], 0, 1)
        busy = float(np.sum(p * self.rate * times * np.sum(others * beyond, axis=1)))
        idle = self.idle_probability() if self.tau0 + self.alpha > x else 0.0
        return (busy + idle) / self.mean_batch()

    def percentile(self, share: float) -> float:
        """The smallest x with P(W ≤ x) ≥ share (0.99 for P99), by bisection."""
        low, high = 0.0, self.tau0 + self.alpha
        while self.latency_above(high) > 1 - share:
            high *= 2
        for _ in range(48):
            middle = (low + high) / 2
            low, high = (middle, high) if self.latency_above(middle) > 1 - share else (low, middle)
        return high


def mean_latency_bound(rate: float, tau0: float, alpha: float) -> float:
    """φ1 = 1.5·τ0/(1 − ρ) + (α/2)(ρ + 2)/(1 − ρ²): E[W] of taking everything is never above it."""
    rho = rate * alpha
    return 1.5 * tau0 / (1 - rho) + alpha / 2 * (rho + 2) / (1 - rho * rho)


@dataclass(frozen=True)
class Means:
    """Mean latency and mean rows per batch."""

    latency: float
    batch: float


def finite_limit(rate: float, tau0: float, alpha: float, limit: int) -> Means:
    """One slot, no window, at most `limit` rows a batch. State q = what waits at a dispatch, b = min(q, limit).

    q' = max(1, q − b + Poisson(λ·l(b))); E[W] = E[q·l(b) + λ·l(b)²/2] / (λ·E[l(b)] + P(q − b + A = 0)), the denominator being
    the requests that arrive per batch, idle times included. Raises ValueError unless λ < limit/l(limit).
    """
    full = tau0 + alpha * limit
    load = rate * full / limit
    if load >= 1:
        raise ValueError("the queue is unstable: rate must be below limit / l(limit)")
    largest = math.ceil(rate * full + limit + 12 * math.sqrt(rate * full) + 40 / (1 - load))
    waiting = np.arange(1, largest + 1)
    batch = np.minimum(waiting, limit)
    times = tau0 + alpha * batch
    pmf = poisson_pmf(rate * (tau0 + alpha * np.arange(limit + 1)), largest)
    transition = np.zeros((largest, largest))
    for row, (q, b) in enumerate(zip(waiting, batch, strict=True)):
        left = int(q - b)
        arrived = pmf[b]
        if left == 0:
            transition[row] = arrived[1:]
            transition[row, 0] += arrived[0]
        else:
            transition[row, left - 1 :] = arrived[: largest - left + 1]
    p = _stationary(transition)
    emptied = float(np.sum(p * np.where(waiting <= limit, np.exp(-rate * times), 0.0)))
    latency = float(np.sum(p * (waiting * times + rate * times**2 / 2))) / (rate * float(p @ times) + emptied)
    return Means(latency, float(p @ batch))


@dataclass(frozen=True)
class Window:
    """A window of T where a slot is always free: rows, delay until the start, how often the batch fills, how long that takes."""

    mean_batch: float
    mean_delay: float
    full_share: float
    mean_fill_time: float


def window_never_busy(rate: float, window: float, limit: int | None = None) -> Window:
    """Fixed window T, slots never busy; without a limit the batch is 1 + Poisson(λT) and the mean delay T(1 + λT/2)/(1 + λT).

    With a limit the batch goes when the (limit − 1)-th follower comes, if within T: an Erlang(limit − 1, λ) time, inside T with
    probability P(Poisson(λT) ≥ limit − 1). `mean_fill_time` is the mean of that Erlang time where it is within T (nan without a
    limit). With N followers in T the delays of a full batch sum to its fill time F plus F·(limit − 2)/2 on average.
    """
    mean = rate * window
    if limit is None:
        return Window(1 + mean, window * (1 + mean / 2) / (1 + mean), 0.0, math.nan)
    followers = limit - 1
    pmf = poisson_pmf(mean, followers)
    below = pmf[:-1]
    full = 1 - float(below.sum())
    count = np.arange(followers)
    # E[F; F ≤ T] of an Erlang(n, λ) time is n/λ · P(Erlang(n + 1, λ) ≤ T).
    fill = followers / rate * (1 - float(pmf.sum()))
    size = float(below @ (1 + count)) + full * limit
    delays = float(below @ (window * (1 + count / 2))) + fill * (1 + (followers - 1) / 2)
    return Window(size, delays / size, full, fill / full)


def window_loaded(rate: float, tau0: float, alpha: float, window: float) -> Means:
    """Fixed window T, one slot, no limit: B' = 1 + Poisson(λY), Y = max(l(B) − X, T), X ~ Exp(λ) the time to the first arrival.

    E[W] = (E[B·l(B)] + E[Y + λY²/2])/E[B]. X is integrated by Gauss-Legendre on (0, l − T); beyond it Y = T.
    """
    rho = rate * alpha
    if rho >= 1:
        raise ValueError("the queue is unstable: rate * alpha must be below 1")
    mean = (1 + rate * (tau0 + window)) / (1 - rho)
    largest = math.ceil(mean + 12 * math.sqrt(mean / (1 - rho * rho)) + 20)
    sizes = np.arange(1, largest + 1)
    times = tau0 + alpha * sizes
    nodes, weights = np.polynomial.legendre.leggauss(96)
    transition = np.zeros((largest, largest))
    delay = np.zeros(largest)
    for row, time in enumerate(times):
        reach = max(0.0, float(time) - window)
        x = reach * (nodes + 1) / 2
        y = np.concatenate((time - x, [window]))
        weight = np.concatenate((weights * reach / 2 * rate * np.exp(-rate * x), [math.exp(-rate * reach)]))
        transition[row] = weight @ poisson_pmf(rate * y, largest - 1)
        delay[row] = float(weight @ (y + rate * y**2 / 2))
    p = _stationary(transition)
    batch = float(p @ sizes)
    return Means(float(p @ (sizes * times) + p @ delay) / batch, batch)


def no_batching(rate: float, service: float) -> float:
    """M/D/1: E[W] = s + λs²/(2(1 − λs)). Raises ValueError where λs ≥ 1."""
    load = rate * service
    if load >= 1:
        raise ValueError("the queue is unstable: rate * service must be below 1")
    return service + rate * service**2 / (2 * (1 - load))


def fluid_cycle(rate: float, tau0: float, alpha: float) -> float:
    """H = τ0/(1 − ρ): in the fluid limit one slot's cycle, and latencies lie between H and 2H."""
    return tau0 / (1 - rate * alpha)
