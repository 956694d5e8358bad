"""Simulated against closed form: the scheduler in virtual time must behave as queueing theory says (`make verify-queueing`).

Prints a table and exits with status 1 if a mean or a mean batch size is off by more than 2 %, a P50 or P99 by more than 3 %, or a
law without statistics is broken. Seeds are fixed. Arrivals are Poisson, stretched to the exact mean rate: at high load most of
the scatter of a finite run is that of its own realised rate. Takes about a minute on one core.
"""

# ruff: noqa: D102, D103, RUF001, RUF003 - a script: names of the formulas are Greek, and the table says what each part does
from __future__ import annotations

import sys
import time

import numpy as np

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.sim import closed_forms as theory
from shoal.sim.arrivals import IntArray, poisson
from shoal.sim.service import ServiceTime
from shoal.sim.simulator import SimulationResult, simulate

TAU0, ALPHA = 1.8874, 0.1438  # ms; ResNet-50 on a V100, from the literature
UNBOUNDED = QueueSettings(max_queue_rows=None, max_queue_bytes=None)
NO_LIMIT = 1 << 30
MEAN, TAIL = 0.02, 0.03

# ρ, E[B], E[W], p50, p99 as published with the design
REFERENCE = (
    (0.02, 1.037, 2.3206, None, None),
    (0.1, 1.712, 3.1459, 3.147, 4.625),
    (0.3, 5.632, 4.2248, 4.188, 6.376),
    (0.5, 13.125, 5.9019, 5.811, 9.345),
    (0.7, 30.625, 9.8176, 9.611, 16.156),
    (0.8, 52.50, 14.7147, None, None),
    (0.9, 118.1, 29.4084, None, None),
)
REQUESTS = {0.02: 60_000, 0.1: 80_000, 0.3: 120_000, 0.5: 250_000, 0.7: 400_000, 0.8: 600_000, 0.9: 1_200_000}


class Report:
    """Prints rows and remembers whether all were good."""

    def __init__(self) -> None:
        self.failures = 0

    def head(self, title: str) -> None:
        print(f"\n{title}\n{'':44}{'simulated':>12}{'theory':>12}{'off by':>9}{'limit':>8}")

    def compare(self, name: str, simulated: float, expected: float, limit: float) -> None:
        off = simulated / expected - 1
        good = abs(off) <= limit
        self.failures += not good
        print(f"{name:44}{simulated:12.4f}{expected:12.4f}{100 * off:+8.2f}%{100 * limit:7.1f}%{'' if good else '   FAILED'}")

    def law(self, name: str, holds: bool, detail: str) -> None:
        self.failures += not holds
        print(f"{name:44}{detail:>24}{'' if holds else '   FAILED'}")


def arrivals(rate_per_ms: float, count: int, seed: int) -> IntArray:
    """Poisson arrivals stretched to the exact mean rate."""
    times = poisson(rate_per_ms * 1e3, count, seed)
    return np.rint(times * (count / rate_per_ms * 1e6 / times[-1])).astype(np.int64)


def run(
    rate: float, count: int, *, limit: int = NO_LIMIT, delay: float = 0.0, tau0: float = TAU0, slots: int = 1, seed: int = 1
) -> SimulationResult:
    """One simulation; rate per ms, times in ms."""
    return simulate(
        arrivals(rate, count, seed),
        ServiceTime(tau0 * 1e6, ALPHA * 1e6),
        batching=BatchingSettings(max_batch_size=limit, max_delay_ms=delay),
        queue=UNBOUNDED,
        slots=slots,
    )


def steady(values: IntArray) -> np.ndarray:
    """Without the first twentieth, in ms: the run begins empty."""
    return values[len(values) // 20 :] / 1e6


def laws(report: Report, name: str, result: SimulationResult) -> None:
    """What must hold to the nanosecond, whatever the dice say: every latency ≤ l(b_k) + l(b_k+1), where all was taken each time."""
    times = result.batches.service_ns
    end = result.batches.started_ns + times
    own = np.searchsorted(end, result.arrivals_ns + result.outcome_ns)
    bound = times[own] + np.where(own > 0, times[own - 1], 0)
    worst = float((result.outcome_ns / bound).max())
    report.law(f"{name}: worst latency ÷ (l(k) + l(k+1))", bool((result.outcome_ns <= bound).all()), f"{worst:.6f} ≤ 1")


def little(report: Report, name: str, result: SimulationResult) -> None:
    """Little's law: the scheduler's own count of requests, averaged over time, against λ·E[W]."""
    product = len(result.arrivals_ns) / result.span_ns * float(result.outcome_ns.mean())
    off = result.mean_in_system / product - 1
    report.law(f"{name}: E[L] ÷ λ·E[W] − 1", abs(off) < 1e-9, f"{off:+.1e}")


def take_everything(report: Report) -> None:
    report.head("One slot, no window, no limit: the reference table")
    for rho, batch, latency, p50, p99 in REFERENCE:
        rate = rho / ALPHA
        exact = theory.TakeEverything.solve(rate, TAU0, ALPHA)
        result = run(rate, REQUESTS[rho])
        waits = steady(result.latencies_ns)
        rows = result.batches.rows[len(result.batches.rows) // 20 :]
        name = f"ρ = {rho}"
        report.compare(f"{name}: E[B] of the table and of the chain", batch, exact.mean_batch(), 0.001)
        report.compare(f"{name}: E[W] of the table and of the chain", latency, exact.mean_latency(), 0.001)
        for label, value, share in (("p50", p50, 0.5), ("p99", p99, 0.99)):
            if value is not None:
                report.compare(f"{name}: {label} of the table and of the chain", value, exact.percentile(share), 0.001)
        report.compare(f"{name}: E[B]", float(rows.mean()), exact.mean_batch(), MEAN)
        report.compare(f"{name}: E[W] ms", float(waits.mean()), exact.mean_latency(), MEAN)
        report.compare(f"{name}: p50 ms", float(np.percentile(waits, 50)), exact.percentile(0.5), TAIL)
        report.compare(f"{name}: p99 ms", float(np.percentile(waits, 99)), exact.percentile(0.99), TAIL)
        bound = theory.mean_latency_bound(rate, TAU0, ALPHA)
        report.law(
            f"{name}: E[W] below the bound φ1",
            exact.mean_latency() <= bound * (1 + 1e-9),
            f"{exact.mean_latency():.3f} ≤ {bound:.3f}",
        )
        laws(report, name, result)
        little(report, name, result)


def finite(report: Report) -> None:
    report.head("One slot, no window, at most b rows a batch")
    for limit, loads in ((8, (0.3, 0.6, 0.8, 0.9)), (32, (0.3, 0.6, 0.8, 0.9))):
        for load in loads:
            rate = load * limit / (TAU0 + ALPHA * limit)
            exact = theory.finite_limit(rate, TAU0, ALPHA, limit)
            result = run(rate, 200_000 if load < 0.9 else 400_000, limit=limit, seed=2)
            name = f"b ≤ {limit}, {load:.0%} of capacity"
            rows = result.batches.rows[len(result.batches.rows) // 20 :]
            report.compare(f"{name}: E[B]", float(rows.mean()), exact.batch, MEAN)
            report.compare(f"{name}: E[W] ms", float(steady(result.latencies_ns).mean()), exact.latency, MEAN)
            little(report, name, result)


def windows(report: Report) -> None:
    report.head("Fixed window T, a slot always free")
    rate = 2.0
    for delay, limit in ((1.0, None), (4.0, None), (4.0, 8), (3.0, 8), (20.0, 16)):
        exact = theory.window_never_busy(rate, delay, limit)
        result = run(rate, 100_000, limit=limit or NO_LIMIT, delay=delay, tau0=0.0, slots=1_000, seed=3)
        name = f"T = {delay} ms, λT = {rate * delay:g}" + (f", b ≤ {limit}" if limit else "")
        report.compare(f"{name}: E[B]", float(result.batches.rows.mean()), exact.mean_batch, MEAN)
        report.compare(f"{name}: delay ms", float(result.waited_ns.mean()) / 1e6, exact.mean_delay, MEAN)
        if limit:
            full = np.asarray(result.batches.reasons) == "full"
            report.compare(f"{name}: share of full batches", float(full.mean()), exact.full_share, MEAN)
            first = np.cumsum(result.batches.rows) - result.batches.rows
            fill = result.batches.started_ns - result.arrivals_ns[first]
            report.compare(f"{name}: fill time ms", float(fill[full].mean()) / 1e6, exact.mean_fill_time, MEAN)
    report.head("Fixed window T, one slot under load, no limit")
    for rho in (0.1, 0.3, 0.5, 0.7):
        for share in (0.25, 0.5, 1.0, 2.0):
            rate, delay = rho / ALPHA, share * TAU0
            loaded = theory.window_loaded(rate, TAU0, ALPHA, delay)
            result = run(rate, 60_000 if rho < 0.5 else 150_000, delay=delay, seed=4)
            name = f"ρ = {rho}, T = {share} τ0"
            rows = result.batches.rows[len(result.batches.rows) // 20 :]
            report.compare(f"{name}: E[B]", float(rows.mean()), loaded.batch, MEAN)
            report.compare(f"{name}: E[W] ms", float(steady(result.latencies_ns).mean()), loaded.latency, MEAN)


def no_batching(report: Report) -> None:
    report.head("No batching (M/D/1)")
    service = TAU0 + ALPHA
    for load in (0.2, 0.5, 0.8):
        for limit in (0, 1):
            result = run(load / service, 60_000 if load < 0.5 else 150_000, limit=limit, seed=5)
            name = f"load {load}, max_batch_size = {limit}"
            report.compare(
                f"{name}: E[W] ms", float(steady(result.latencies_ns).mean()), theory.no_batching(load / service, service), MEAN
            )
            little(report, name, result)


def main() -> int:
    """Run all; 0 if all is well."""
    begin = time.perf_counter()
    report = Report()
    for part in (take_everything, finite, windows, no_batching):
        part(report)
    print(f"\n{report.failures} failed; took {time.perf_counter() - begin:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
