"""The rows of the table: what is measured, against what, and how it is judged. Budgets stand here and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.bare_loop import run_bare_loop
from benchmarks.machine import BenchmarkError, pinned
from benchmarks.measure import Contender, Effort, Ratio, Sample, Samples, foreign_share, interleave, ratio
from benchmarks.models import BenchModel
from benchmarks.payloads import Request, oip_binary_request, oip_json_request, send
from benchmarks.refusal import REFUSED, full_server
from benchmarks.report import Budget, Row
from benchmarks.servers import KINDS, MODEL_NAME, ROOT, RunningServer

IDLE_S = 5.0
IDLE_CONNECTIONS = 10


@dataclasses.dataclass(frozen=True)
class Bench:
    """What a row needs: a folder for model files, and how hard to try."""

    folder: Path
    effort: Effort


@contextlib.contextmanager
def _duel(bench: Bench, model: BenchModel) -> Iterator[tuple[Contender, Contender]]:
    """Prototype and Shoal with the same model, both up at the same time, both known to answer rightly."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name in ("prototype", "shoal"):
            kind = KINDS[name]
            server = stack.enter_context(RunningServer.of_model(kind, bench.effort.cores.server, model))
            request = kind.request(model.row)
            server.check(request, model.answer)
            contenders.append(Contender(name, server, request))
        yield contenders[0], contenders[1]


def http_small(bench: Bench) -> list[Row]:
    """The cost of a small request, and the tail in the very same runs."""
    with _duel(bench, models.make_tiny(bench.folder)) as duel:
        samples = interleave(duel, bench.effort, 64)
    cost = _cost_row("http-small", "256-byte tensor over HTTP, 64 connections: server CPU per request", samples, Budget(1.40))
    tails = {label: [sample.p99_us / sample.p50_us for sample in runs] for label, runs in samples.items()}
    tail = Row(
        "tail",
        "P99 ÷ P50 at saturation, in the runs of http-small",
        unit="P99/P50",
        prototype=statistics.median(tails["prototype"]),
        shoal=statistics.median(tails["shoal"]),
        judged=statistics.median(tails["shoal"]),
        judged_unit="",
        spread=(min(tails["shoal"]), max(tails["shoal"])),
        budget=Budget(1.5),
        note=f"P50 {_ms(samples, 'p50_us')}, P99 {_ms(samples, 'p99_us')}, P99.9 {_ms(samples, 'p999_us')}",
        foreign_share=foreign_share(samples),
    )
    return [cost, tail]


def http_large(bench: Bench) -> list[Row]:
    """The cost of moving a large tensor."""
    with _duel(bench, models.make_big(bench.folder)) as duel:
        samples = interleave(duel, bench.effort, 16)
    work = "602,112-byte tensor over HTTP, 16 connections: server CPU per request"
    return [_cost_row("http-large", work, samples, Budget(1.30))]


def single(bench: Bench) -> list[Row]:
    """Latency without company. The budget, 0.75 of Triton's, needs a peer, so here it is for information."""
    with _duel(bench, models.make_tiny(bench.folder)) as duel:
        samples = interleave(duel, bench.effort, 1)
    p50 = {label: [sample.p50_us for sample in runs] for label, runs in samples.items()}
    return [
        _ratio_row(
            "single",
            "256-byte tensor, one connection: P50",
            "µs P50",
            p50,
            samples,
            note=f"P99 {_ms(samples, 'p99_us')}, CPU {_pair(samples, 'cpu_us', '{:.0f}')} µs",
        )
    ]


def mlp(bench: Bench) -> list[Row]:
    """How much of the core the model gets: the bare loop's CPU per row at its best batch ÷ a request's CPU."""
    model = models.make_mlp(bench.folder)
    loops: list[dict[int, float]] = []

    def bare() -> None:
        loops.append(run_bare_loop(bench.effort.cores.server, model.path, bench.effort.seconds))

    with _duel(bench, model) as duel:
        samples = interleave(duel, bench.effort, 64, each_round=bare)
    best = [min(loop.values()) for loop in loops]
    shares = {label: ratio(best, [sample.cpu_us for sample in runs]) for label, runs in samples.items()}
    sizes = sorted({min(loop, key=loop.__getitem__) for loop in loops})
    return [
        Row(
            "mlp",
            "1024-wide MLP, 64 connections, all on one core: bare ONNX Runtime CPU per row at its best ÷ CPU per request",
            unit="share",
            prototype=shares["prototype"].median,
            shoal=shares["shoal"].median,
            judged=shares["shoal"].median,
            judged_unit="",
            spread=(shares["shoal"].low, shares["shoal"].high),
            budget=Budget(0.55, at_least=True),
            note=f"bare {statistics.median(best):.1f} µs a row (batch {', '.join(map(str, sizes))}), "
            f"CPU {_pair(samples, 'cpu_us', '{:.1f}')} µs, {_pair(samples, 'requests_per_s', '{:,.0f}')} req/s",
            foreign_share=foreign_share(samples),
            details={"bare_us_per_row": loops, "samples": _details(samples)},
        )
    ]


def refusal(bench: Bench) -> list[Row]:
    """Refusing must cost less than serving: beside the prototype serving, in the same rounds."""
    model = models.make_tiny(bench.folder)
    prototype, shoal = KINDS["prototype"], KINDS["shoal"]
    cores, request = bench.effort.cores, shoal.request(model.row)
    with (
        RunningServer.of_model(prototype, cores.server, model) as yardstick,
        full_server(bench.folder, cores, request, model.row_items) as full,
    ):
        contenders = (
            Contender("prototype", yardstick, prototype.request(model.row)),
            Contender("shoal", full, request, REFUSED),
        )
        samples = interleave(contenders, bench.effort, 64)
    work = "refusing (429) a 256-byte tensor at a full queue, 64 connections: CPU per refusal; prototype: per request served"
    return [_cost_row("refusal", work, samples, Budget(0.80))]


def idle(bench: Bench) -> list[Row]:
    """A server that nobody talks to must sleep."""
    with _duel(bench, models.make_tiny(bench.folder)) as duel, contextlib.ExitStack() as stack:
        for contender in duel:
            for _ in range(IDLE_CONNECTIONS):
                connection = stack.enter_context(contextlib.closing(contender.server.connect()))
                send(connection, contender.request)
        time.sleep(1.0)  # what follows the last answer is over by then
        before = [(contender.server.cpu_ns(), contender.server.context_switches()) for contender in duel]
        time.sleep(IDLE_S)
        after = [(contender.server.cpu_ns(), contender.server.context_switches()) for contender in duel]
    cpu_ms = [(now[0] - then[0]) / 1e6 for then, now in zip(before, after, strict=True)]
    switches = [now[1] - then[1] for then, now in zip(before, after, strict=True)]
    return [
        Row(
            "idle",
            f"{IDLE_CONNECTIONS} idle keep-alive connections, {IDLE_S:g} s: CPU of the process",
            unit="ms CPU",
            prototype=cpu_ms[0],
            shoal=cpu_ms[1],
            judged=cpu_ms[1],
            judged_unit="ms",
            budget=Budget(2.0),
            note=f"context switches {switches[0]} / {switches[1]}",
            details={"context_switches": {"prototype": switches[0], "shoal": switches[1]}},
        )
    ]


def yardstick(bench: Bench) -> list[Row]:
    """The prototype against itself: how far from 1 a ratio may be today without meaning anything."""
    model, kind = models.make_tiny(bench.folder), KINDS["prototype"]
    with contextlib.ExitStack() as stack:
        contenders = []
        for label in ("prototype", "shoal"):
            server = stack.enter_context(RunningServer.of_model(kind, bench.effort.cores.server, model))
            contenders.append(Contender(label, server, kind.request(model.row)))
        samples = interleave(contenders, bench.effort, 64)
    return [_cost_row("yardstick", "as http-small, the prototype in both places: the ratio's noise", samples)]


def http_small_256(bench: Bench) -> list[Row]:
    """Four times the connections that fit into a batch."""
    with _duel(bench, models.make_tiny(bench.folder)) as duel:
        samples = interleave(duel, bench.effort, 256)
    return [_cost_row("http-small-256", "as http-small with 256 connections", samples)]


def http_unique_id(bench: Bench) -> list[Row]:
    """Every request's JSON differs, so nothing that was prepared for an equal one can be used."""

    def with_id(model: BenchModel) -> Request:
        return oip_binary_request(MODEL_NAME, model.row, with_id=True)

    return [_variant(bench, "http-unique-id", 'as http-small, every request with an "id" of its own', with_id)]


def http_json(bench: Bench) -> list[Row]:
    """Numbers as JSON both ways; the prototype goes on taking raw bytes."""

    def as_json(model: BenchModel) -> Request:
        return oip_json_request(MODEL_NAME, model.row)

    return [_variant(bench, "http-json", "as http-small, numbers as JSON both ways (prototype: raw bytes)", as_json)]


def core(bench: Bench) -> list[Row]:
    """The scheduler alone, from its own benchmark; the figure judged has priorities and deadlines in use."""
    script = ROOT / "benchmarks" / "core.py"
    command = pinned(bench.effort.cores.server, [sys.executable, str(script), "--json"])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    if done.returncode:
        raise BenchmarkError(f"{script.name} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    document = json.loads(done.stdout)
    results: dict[str, float] = document["results"]
    judged = "levels + deadlines, poll after each"
    if judged not in results:
        raise BenchmarkError(f"{script.name} has no figure for {judged!r}, but {', '.join(results)}")
    others = ", ".join(
        f"{name} {results[name]:.2f}" for name in ("plain", "the same, levels + deadlines", "refused") if name in results
    )
    return [
        Row(
            "core",
            f"scheduler alone, µs per request: submit + poll + complete, {judged}",
            unit="µs",
            shoal=results[judged],
            judged=results[judged],
            judged_unit="µs",
            budget=Budget(3.0),
            note=others.replace("the same,", "staged and recalled,"),
            details=document,
        )
    ]


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "http-small": http_small,
    "tail": http_small,
    "http-large": http_large,
    "single": single,
    "mlp": mlp,
    "refusal": refusal,
    "idle": idle,
    "core": core,
    "yardstick": yardstick,
    "http-small-256": http_small_256,
    "http-unique-id": http_unique_id,
    "http-json": http_json,
}
"""What may be asked for by name. `tail` comes from the runs of `http-small`, so either brings both."""


def _variant(bench: Bench, name: str, work: str, request_of: Callable[[BenchModel], Request]) -> Row:
    model = models.make_tiny(bench.folder)
    with _duel(bench, model) as (prototype, shoal):
        variant = dataclasses.replace(shoal, request=request_of(model))
        shoal.server.check(variant.request, model.answer)
        samples = interleave((prototype, variant), bench.effort, 64)
    return _cost_row(name, work, samples)


def _cost_row(name: str, work: str, samples: Samples, budget: Budget | None = None) -> Row:
    costs = {label: [sample.cpu_us for sample in runs] for label, runs in samples.items()}
    note = (
        f"{_pair(samples, 'requests_per_s', '{:,.0f}')} req/s, P50 {_ms(samples, 'p50_us')}, P99 {_ms(samples, 'p99_us')},"
        f" RSS {_pair(samples, 'rss_mib', '{:.0f}')} MiB"
    )
    return _ratio_row(name, work, "µs CPU", costs, samples, budget, note)


def _ratio_row(
    name: str,
    work: str,
    unit: str,
    values: dict[str, list[float]],
    samples: Samples,
    budget: Budget | None = None,
    note: str = "",
) -> Row:
    result: Ratio = ratio(values["shoal"], values["prototype"])
    return Row(
        name,
        work,
        unit=unit,
        prototype=statistics.median(values["prototype"]),
        shoal=statistics.median(values["shoal"]),
        judged=result.median,
        spread=(result.low, result.high),
        budget=budget,
        note=note,
        foreign_share=foreign_share(samples),
        details={"samples": _details(samples)},
    )


def _details(samples: Samples) -> dict[str, list[dict[str, float]]]:
    return {label: [dataclasses.asdict(sample) for sample in runs] for label, runs in samples.items()}


def _median(runs: Sequence[Sample], figure: str) -> float:
    return float(statistics.median(getattr(sample, figure) for sample in runs))


def _pair(samples: Samples, figure: str, form: str) -> str:
    """The medians of both, "prototype / shoal"."""
    return " / ".join(form.format(_median(samples[label], figure)) for label in ("prototype", "shoal"))


def _ms(samples: Samples, figure: str) -> str:
    return " / ".join(f"{_median(samples[label], figure) / 1e3:.2f}" for label in ("prototype", "shoal")) + " ms"
