"""Measuring servers side by side: one sample is one run of load, rounds go A, B, A, B, …, and ratios are taken within a round.

Absolute figures drift with the machine's mood by tens of percent; two servers measured seconds apart drift together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.machine import BenchmarkError, Cores, core_busy_ns
from benchmarks.payloads import Request
from benchmarks.servers import RunningServer
from benchmarks.wrk import run_wrk

WARM_UP_S = 1.0


@dataclass(frozen=True)
class Effort:
    """How long and how often to measure, and where."""

    cores: Cores
    seconds: float
    repeat: int


@dataclass(frozen=True)
class Contender:
    """A running server with the request that it is loaded with and the status that every answer must have."""

    label: str
    server: RunningServer
    request: Request
    status: int = 200


@dataclass(frozen=True)
class Sample:
    """One run of load. `cpu_us` is the server process's CPU time per request, the model included.

    `foreign_share` is the part of the server's core that others (processes, or the hypervisor) used meanwhile: above a few percent
    the latencies and rates mean nothing, and the CPU times suffer from cold caches.
    """

    requests: int
    requests_per_s: float
    cpu_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    foreign_share: float
    rss_mib: float


Samples = dict[str, list[Sample]]


def take_sample(contender: Contender, cores: Cores, connections: int, seconds: float, *, count_status: bool = False) -> Sample:
    """Load a server once. Raises BenchmarkError when any answer is not of the contender's status: such figures are worthless.

    wrk tells apart only answers below 400 and others; `count_status` has it count the exact status, which slows it down.
    """
    server = contender.server
    busy_before, cpu_before = core_busy_ns(cores.server), server.cpu_ns()
    load = run_wrk(cores.load, server.port, contender.request, connections, seconds, contender.status if count_status else None)
    cpu_ns, busy_ns = server.cpu_ns() - cpu_before, core_busy_ns(cores.server) - busy_before
    if load.requests == 0:
        raise BenchmarkError(f"{contender.label} answered nothing")
    if load.socket_errors:
        raise BenchmarkError(f"{contender.label}: {load.socket_errors} socket errors or time-outs in {load.requests} requests")
    if load.bad_statuses != (load.requests if contender.status >= 400 else 0) or (
        load.expected_statuses is not None and load.expected_statuses != load.requests
    ):
        counted = "" if load.expected_statuses is None else f", {load.expected_statuses} were {contender.status}"
        raise BenchmarkError(
            f"{contender.label}: every answer should be {contender.status}; "
            f"of {load.requests}, {load.bad_statuses} were 400 or above{counted}"
        )
    return Sample(
        requests=load.requests,
        requests_per_s=load.requests_per_s,
        cpu_us=cpu_ns / 1e3 / load.requests,
        p50_us=load.latency_us[50.0],
        p90_us=load.latency_us[90.0],
        p99_us=load.latency_us[99.0],
        p999_us=load.latency_us[99.9],
        max_us=load.latency_max_us,
        foreign_share=max(0.0, (busy_ns - cpu_ns) / 1e9 / load.duration_s),
        rss_mib=server.rss_bytes() / 2**20,
    )


def interleave(
    contenders: Sequence[Contender], effort: Effort, connections: int, *, each_round: Callable[[], None] | None = None
) -> Samples:
    """Warm all contenders up, then measure them in turn, `effort.repeat` rounds. Samples by label, in the order of rounds."""
    for contender in contenders:
        take_sample(contender, effort.cores, connections, WARM_UP_S, count_status=True)
    samples: Samples = {contender.label: [] for contender in contenders}
    for _ in range(effort.repeat):
        if each_round is not None:
            each_round()
        for contender in contenders:
            samples[contender.label].append(take_sample(contender, effort.cores, connections, effort.seconds))
    return samples


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' own ratios, and the smallest and largest of them."""

    median: float
    low: float
    high: float


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Ratios within each round."""
    rounds = [above / below for above, below in zip(over, under, strict=True)]
    return Ratio(statistics.median(rounds), min(rounds), max(rounds))


def foreign_share(samples: Samples) -> float:
    """The worst share of the server's core that others took in any of these runs."""
    return max((sample.foreign_share for runs in samples.values() for sample in runs), default=0.0)
