"""The scheduling rules against their numbers, in virtual time (`make verify-scheduling`).

Prints every figure with its bound and exits with status 1 if one lies outside. Seeds are fixed and the real scheduler is driven, so
the figures are the same on every machine. Uses two processes; takes some minutes.
"""

# ruff: noqa: D102, D103, RUF001 - a script: names of the formulas are Greek, and the table says what each part does
from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import numpy as np

from shoal.config.settings import BatchingSettings, LengthSettings, QueueSettings
from shoal.core.replay import Chooser, Law
from shoal.core.rules import FOREVER
from shoal.core.starting import Arrivals
from shoal.sim.arrivals import on_off, poisson
from shoal.sim.service import ServiceTime
from shoal.sim.simulator import Requests, SimulationResult, simulate_requests
from shoal.sim.workload import choices, fan_out, lognormal_lengths

TAU0, ALPHA = 1.8874, 0.1438  # ms; ResNet-50 on a V100, from the literature
WINDOWS = (0.0, 0.25, 0.5, 1.0, 2.0)  # in τ0
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8)
WIDE = 256  # a batch limit that does not matter at these loads
SKIP = 10_000  # requests until the mode has learned the traffic


class Case(NamedTuple):
    """One simulation, as values that can be sent to another process."""

    mode: str = "fixed"
    window: float = 0.0
    drop: bool = False
    slots: int = 1
    load: float = 0.5
    objective: float | None = None
    traffic: str = "poisson"
    limit: int = WIDE
    noise: float = 0.0
    slow: float = 0.0
    count: int = 70_000
    seed: int = 11


class Figures(NamedTuple):
    """What came of one."""

    p99: float
    mean: float
    in_time: float
    goodput_per_ms: float


def rate_per_s(load: float, slots: int) -> float:
    return load * slots / ALPHA * 1e3


def capacity_per_ms(slots: int, limit: int) -> float:
    return slots * limit / (TAU0 + ALPHA * limit)


def evaluate(case: Case) -> Figures:
    rate = rate_per_s(case.load, case.slots)
    if case.traffic == "poisson":
        times = poisson(rate, case.count, case.seed)
    elif case.traffic == "fanout":
        times = fan_out(rate, case.count, 8, case.seed)
    else:
        phase = float(case.traffic)
        times = on_off(rate, case.count, case.seed, phase, phase)
    batching = BatchingSettings(
        max_batch_size=case.limit,
        mode="adaptive" if case.mode == "adaptive" else "fixed",
        max_delay_ms=case.window * TAU0,
        early_drop=case.drop,
    )
    objective_ms = None if case.objective is None else case.objective * TAU0
    queue = QueueSettings(max_queue_rows=None, max_queue_bytes=None, slo_ms=objective_ms)
    service = ServiceTime(TAU0 * 1e6, ALPHA * 1e6, noise=case.noise, slow_share=case.slow, seed=case.seed + 1)
    result = simulate_requests(Requests(times), service, batching=batching, queue=queue, slots=case.slots)
    outcome = result.outcome_ns[SKIP:]
    served = outcome[outcome >= 0] / 1e6
    limit_ns = FOREVER if objective_ms is None else round(objective_ms * 1e6) + 1
    good = (outcome >= 0) & (outcome <= limit_ns)
    span_ms = (times[-1] - times[SKIP]) / 1e6
    p99, mean = (float(np.percentile(served, 99)), float(served.mean())) if served.size else (math.inf, math.inf)
    return Figures(p99, mean, float(good.mean()), float(good.sum()) / span_ms)


class Evaluate:
    """Runs cases side by side."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, cases: Iterable[Case], what: Callable[[Case], Any] = evaluate) -> list[Any]:
        return self._pool.map(what, list(cases), chunksize=1)


class Report:
    """Prints rows and remembers whether all were good."""

    def __init__(self) -> None:
        self.failures = 0

    def head(self, title: str) -> None:
        print(f"\n{title}\n{'':58}{'seen':>10}{'bound':>12}", flush=True)

    def check(self, name: str, seen: float, least: float = -math.inf, most: float = math.inf) -> None:
        good = least <= seen <= most
        self.failures += not good
        bound = f"≥ {least:g}" if most == math.inf else f"≤ {most:g}"
        print(f"{name:58}{seen:10.3f}{bound:>12}{'' if good else '   FAILED'}", flush=True)


def best_window(run: Evaluate, case: Case) -> tuple[float, float]:
    """The smallest P99 and the smallest mean of the fixed windows."""
    found = run([case._replace(mode="fixed", window=window) for window in WINDOWS])
    return min(figures.p99 for figures in found), min(figures.mean for figures in found)


def one_slot(report: Report, run: Evaluate) -> None:
    report.head("One slot, Poisson: adaptive over T = 0, and the share answered in time with early drop (%)")
    for load in (*LOADS, 0.9):
        adaptive, at_once = run([Case(mode="adaptive", load=load), Case(load=load)])
        report.check(f"ρ {load}: P99 of adaptive / T = 0", adaptive.p99 / at_once.p99, 0.0, 1.01)
        report.check(f"ρ {load}: mean of adaptive / T = 0", adaptive.mean / at_once.mean, 0.0, 1.01)
    for load, bounds in ((0.5, (77.5, 99.5, 100.0)), (0.7, (62.0, 87.0, 99.0)), (0.9, (52.0, 71.5, 84.0))):
        for objective, bound in zip((3.0, 5.0, 8.0), bounds, strict=True):
            (figures,) = run([Case(mode="adaptive", drop=True, load=load, objective=objective, count=100_000)])
            report.check(f"ρ {load}, S = {objective:g} τ0: in time", 100 * figures.in_time, bound - 0.05)


def several_slots(report: Report, run: Evaluate) -> None:
    report.head("Several slots, Poisson: adaptive over the best of the fixed windows 0, ¼, ½, 1, 2 τ0")
    for slots in (2, 4):
        for load in LOADS:
            case = Case(slots=slots, load=load)
            p99, mean = best_window(run, case)
            (adaptive,) = run([case._replace(mode="adaptive")])
            bound = 1.05
            if slots == 2 and load >= 0.3:
                bound = 0.90
            if slots == 4 and load >= 0.5:
                bound = 0.65 if load == 0.7 else 0.80
            report.check(f"{slots} slots, ρ {load}: P99", adaptive.p99 / p99, 0.0, bound)
            report.check(f"{slots} slots, ρ {load}: mean", adaptive.mean / mean, 0.0, 1.05)


def objectives(report: Report, run: Evaluate) -> None:
    report.head("Share in time, adaptive less the best fixed window with the same early drop (points)")
    for slots in (1, 2, 4):
        for load in (0.3, 0.5, 0.7, 0.9):
            for objective in (3.0, 5.0, 8.0):
                case = Case(slots=slots, load=load, objective=objective, drop=True, count=30_000)
                fixed = run([case._replace(window=window) for window in WINDOWS])
                (adaptive,) = run([case._replace(mode="adaptive")])
                best = max(figures.in_time for figures in fixed)
                report.check(f"{slots} slots, ρ {load}, S = {objective:g} τ0", 100 * (adaptive.in_time - best), -1.0)


def overload(report: Report, run: Evaluate) -> None:
    report.head("Overload, limit 32: goodput in % of capacity")
    wanted = {(5.0, 1.2): 91, (5.0, 2.0): 98, (5.0, 10.0): 100, (8.0, 1.2): 100, (8.0, 2.0): 100, (8.0, 10.0): 100}
    for slots in (1, 4):
        for (objective, factor), bound in wanted.items():
            capacity = capacity_per_ms(slots, 32)
            load = factor * capacity * ALPHA / slots
            case = Case(mode="adaptive", drop=True, slots=slots, load=load, objective=objective, limit=32, count=40_000)
            (figures,) = run([case])
            report.check(
                f"{slots} slots, S = {objective:g} τ0, {factor:g} × capacity", 100 * figures.goodput_per_ms / capacity, bound - 2
            )


def replayed(report: Report, run: Evaluate) -> None:
    report.head("Shadow replay: P99 of adaptive over the best fixed window, bursts and fan-outs")
    for traffic, bound in (("20", 1.10), ("200", 1.10), ("fanout", 1.05)):
        for slots in (1, 2, 4):
            for load in (0.3, 0.5):
                case = Case(slots=slots, load=load / (1 if traffic == "fanout" else 1.25), traffic=traffic)
                p99, _ = best_window(run, case)
                (adaptive,) = run([case._replace(mode="adaptive")])
                label = "fan-outs of 8" if traffic == "fanout" else f"on/off {traffic} ms"
                report.check(f"{label}, {slots} slots, ρ {case.load:g}: P99", adaptive.p99 / p99, 0.0, bound)
    report.head("Scatter in the batch times: P99 of adaptive over the best fixed window")
    for name, noise, slow in (("5 % scatter", 0.05, 0.0), ("10 % scatter", 0.10, 0.0), ("1 % of batches 3 × slow", 0.0, 0.01)):
        ratios = []
        for slots in (2, 4):
            for load in LOADS:
                # One slow batch in a hundred puts the P99 on the edge between slow and not: it takes more requests to be told.
                case = Case(slots=slots, load=load, noise=noise, slow=slow, count=280_000 if slow else 70_000)
                p99, _ = best_window(run, case)
                (adaptive,) = run([case._replace(mode="adaptive")])
                ratios.append(adaptive.p99 / p99)
        if name == "5 % scatter":
            report.check(f"{name}: geometric mean", math.exp(sum(map(math.log, ratios)) / len(ratios)), 0.0, 0.90)
        else:
            report.check(f"{name}: worst", max(ratios), 0.0, 1.10)
    replay_cost(report)


def replay_cost(report: Report) -> None:
    """What a replay costs, over how often the server takes a step of it: one every 20 ms."""
    arrivals = Arrivals()
    for moment in poisson(rate_per_s(0.7, 4), 20_000, 3).tolist():
        arrivals.add(moment, 1)
        arrivals.update(moment, int((TAU0 + ALPHA) * 1e6))
    chooser = Chooser(4, FOREVER)
    law = Law(TAU0 * 1e6, ALPHA * 1e6, (), WIDE)
    worst, steps, begun = 0.0, 0, time.perf_counter()
    more = True
    while more:
        before = time.perf_counter()
        more = chooser.think(arrivals, law, 1)
        worst = max(worst, time.perf_counter() - before)
        steps += 1
    mean_ms = (time.perf_counter() - begun) / steps * 1e3
    report.check("a step of replay, one every 20 ms: % of a core", 100 * mean_ms / 20.0, 0.0, 2.0)
    print(f"{'':58}{worst * 1e3:10.3f} ms the longest of {steps} steps")


def two_objectives(report: Report, run: Evaluate) -> None:
    report.head("Two objectives, half and half, limit 32: loose less tight, in time (points)")
    for slots in (1, 4):
        for factor in (1.0, 1.2, 1.5, 2.0):
            count = 40_000
            times = poisson(factor * capacity_per_ms(slots, 32) * 1e3, count, 5)
            tight = choices([0.5, 0.5], count, 6) == 1
            timeouts = np.where(tight, round(3 * TAU0 * 1e6), round(8 * TAU0 * 1e6))
            result = simulate_requests(
                Requests(times, timeouts_ns=timeouts),
                ServiceTime(TAU0 * 1e6, ALPHA * 1e6),
                batching=BatchingSettings(max_batch_size=32, mode="adaptive"),
                queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None),
                slots=slots,
            )
            good = result.in_time(0)[SKIP:]
            shares = 100 * good[tight[SKIP:]].mean(), 100 * good[~tight[SKIP:]].mean()
            report.check(
                f"{slots} slots, {factor:g} ×: {shares[0]:.1f} tight, {shares[1]:.1f} loose", shares[1] - shares[0], -15.0, 15.0
            )


def reach(case: Case) -> float:
    """The largest load at which 99 % are answered in time, to a quarter of a point."""
    low, high = 0.02, 0.98
    while high - low > 0.0025:
        middle = (low + high) / 2
        low, high = (middle, high) if evaluate(case._replace(load=middle)).in_time >= 0.99 else (low, middle)
    return (low + high) / 2


def largest_load(report: Report, run: Evaluate) -> None:
    report.head("Largest load with 99 % in time: adaptive over the best fixed window that drops nothing")
    for slots, bounds in ((2, (1.40, 1.20, 1.10)), (4, (1.30, 1.30, 1.20))):
        for objective, bound in zip((3.0, 5.0, 8.0), bounds, strict=True):
            case = Case(slots=slots, objective=objective, count=60_000)
            cases = [case._replace(mode="adaptive", drop=True)]
            cases += [case._replace(window=window) for window in (0.0, 0.25, 0.5, 1.0)]
            adaptive, *windows = run(cases, reach)
            fixed = max(windows)
            report.check(f"{slots} slots, S = {objective:g} τ0: {adaptive:.3f} / {fixed:.3f}", adaptive / fixed, bound)


def tenants(report: Report, run: Evaluate) -> None:
    report.head("Tenants and ageing")
    service = lambda: ServiceTime(TAU0 * 1e6, ALPHA * 1e6)  # noqa: E731
    batch_ms = TAU0 + ALPHA * 32
    count = 30_000
    names = [("a", "b")[index] for index in choices([0.5, 0.5], count, 3).tolist()]
    times = poisson(3 * capacity_per_ms(1, 32) * 1e3, count, 4)
    result = simulate_requests(
        Requests(times, tenants=names),
        service(),
        batching=BatchingSettings(max_batch_size=32),
        queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None, tenant_weights={"a": 1.0, "b": 3.0}),
    )
    report.check("weights 1 : 3, both backlogged: rows off by at most", worst_unfairness(result, names, times), 0.0, 32.0)
    before, after = quiet_p99_ms(service, 0.5), quiet_p99_ms(service, 5.0)
    name = f"the other at 10 × its half: P99 {before:.1f} → {after:.1f} ms, in batch times"
    report.check(name, (after - before) / batch_ms, 0.0, 1.0)
    idle_gains(report, service)
    ageing(report, service)


def quiet_p99_ms(service: Callable[[], ServiceTime], other: float) -> float:
    """P99 of a tenant that uses 0.4 of the capacity, while another of the same weight sends `other` times the capacity."""
    capacity = capacity_per_ms(1, 32) * 1e3
    count = 8_000
    quiet = poisson(0.4 * capacity, count, 8)
    both = np.concatenate([quiet, poisson(other * capacity, round(count * other / 0.4), 9)])
    order = np.argsort(both, kind="stable")
    mine = order < count
    result = simulate_requests(
        Requests(both[order], tenants=["quiet" if own else "other" for own in mine]),
        service(),
        batching=BatchingSettings(max_batch_size=32),
        queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None, fair_tenants=True),
    )
    return float(np.percentile(result.outcome_ns[mine], 99)) / 1e6


def worst_unfairness(result: SimulationResult, names: Sequence[str], times: Any) -> float:
    """By how many rows the served ones ever differ from 1 : 3 while both wait."""
    finish = times + result.waited_ns
    order = np.argsort(finish, kind="stable")
    a = np.cumsum([names[index] == "a" for index in order])
    b = np.cumsum([names[index] == "b" for index in order])
    backlogged = finish[order] < times[-1]
    middle = slice(2000, int(backlogged.sum()))
    difference = np.abs(b[middle] - b[middle][0] - 3.0 * (a[middle] - a[middle][0])) / 4.0
    return float(difference.max())


def idle_gains(report: Report, service: Callable[[], ServiceTime]) -> None:
    """One tenant sends all the time, the other only after 10 s: how much of the first batches are the latter's?"""
    steady = poisson(2 * capacity_per_ms(1, 32) * 1e3, 60_000, 2)
    late = np.full(2_000, round(10e9), dtype=np.int64)
    times = np.sort(np.concatenate([steady, late]), kind="stable")
    names = ["late" if time_ns == late[0] else "steady" for time_ns in times.tolist()]
    result = simulate_requests(
        Requests(times, tenants=names),
        service(),
        batching=BatchingSettings(max_batch_size=32),
        queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None, fair_tenants=True),
    )
    started = times + result.waited_ns
    after = np.argsort(started, kind="stable")
    after = after[started[after] > late[0]][: 32 * 20]
    share = float(np.mean([names[index] == "late" for index in after]))
    report.check("idle for 10 s: share of the next 20 batches", share, 0.0, 0.5 + 1 / 20)


def ageing(report: Report, service: Callable[[], ServiceTime]) -> None:
    """Level 1 alone would fill the executor; what waits on level 3 still gets its turn."""
    count, aging_ms = 30_000, 50.0
    times = poisson(0.97 * capacity_per_ms(1, 32) * 1e3, count, 12)
    levels = choices([0.96, 0.02, 0.02], count, 13) + 1
    result = simulate_requests(
        Requests(times, levels=levels),
        service(),
        batching=BatchingSettings(max_batch_size=32, early_drop=False),
        queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None, priority_levels=3, aging_ms=aging_ms),
    )
    longest = float(result.waited_ns.max()) / 1e6
    report.check("ageing, 3 levels of 50 ms: longest wait, ms", longest, 0.0, 3 * aging_ms + TAU0 + ALPHA * 32)


def lengths(report: Report, run: Evaluate) -> None:
    report.head("Lengths, log-normal (median 20, σ 0.7, 4…128): padding factor, backlogged")
    count = 20_000
    drawn = lognormal_lengths(20, 0.7, 4, 128, count, 21)
    times = poisson(1e6, count, 22)

    def factor(batching: BatchingSettings) -> float:
        result = simulate_requests(
            Requests(times, lengths=drawn),
            ServiceTime(0.3e6, 0.02e6),
            batching=batching,
            queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None),
        )
        return result.padding_factor

    pad = {"ids": LengthSettings(policy="pad")}
    chosen = factor(BatchingSettings(max_batch_size=32, cost="tokens", max_batch_cost=512, lengths=pad))
    report.check("sorted windows, 512 padded tokens", chosen, 1.0, 1.3)
    for rows in (8, 32):
        blocks = drawn[: count // rows * rows].reshape(-1, rows)
        print(f"{f'in order of arrival, {rows} rows':58}{float(blocks.max(axis=1).sum() * rows / blocks.sum()):10.3f}")


def main() -> int:
    """Run all, or the parts named on the command line; 0 if all is well."""
    begin = time.perf_counter()
    report = Report()
    parts = (one_slot, several_slots, objectives, overload, replayed, two_objectives, largest_load, tenants, lengths)
    wanted = set(sys.argv[1:]) or {part.__name__ for part in parts}
    unknown = wanted - {part.__name__ for part in parts}
    if unknown:
        print(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.__name__ for part in parts)}", file=sys.stderr
        )
        return 2
    with get_context("fork").Pool(2) as pool:
        for part in parts:
            if part.__name__ in wanted:
                part(report, Evaluate(pool))
    print(f"\n{report.failures} failed; took {time.perf_counter() - begin:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
