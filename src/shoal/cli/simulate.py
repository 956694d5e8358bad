"""`shoal simulate`: what a batching setting would do under a load, in virtual time.

Words to numbers and back; the work is in `sim/`. Also runnable as `python -m shoal.cli.simulate`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_REQUESTS = 20_000_000


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command to argparse's subparsers; `run` of the parsed options runs it and returns the exit status."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="simulate a batching setting in virtual time",
        description="Drive the real scheduler in virtual time, with a batch of b rows taking tau0 + alpha * b milliseconds.",
        allow_abbrev=False,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def _number(lowest: float, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number of at least `lowest`, or above it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or value < lowest or (above and value == lowest):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {lowest:g}, not {text}")
        return value

    return parse


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    """An argparse type: a whole number between two bounds, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be between {lowest} and {highest}, not {text}")
        return value

    return parse


def _parts(text: str, separator: str, kinds: Sequence[Callable[[str], Any]], shape: str) -> list[Any]:
    words = text.split(separator)
    if len(words) != len(kinds):
        raise argparse.ArgumentTypeError(f"{text!r} must look like {shape}")
    return [kind(word) for kind, word in zip(kinds, words, strict=True)]


def _tenants(text: str) -> list[Any]:
    """An argparse type: names, weights and shares."""
    kinds = (str, _number(0, above=True), _number(0, above=True))
    tenants = [tuple(_parts(part, ":", kinds, "NAME:WEIGHT:SHARE")) for part in text.split(",")]
    if len({tenant[0] for tenant in tenants}) != len(tenants):
        raise argparse.ArgumentTypeError(f"{text!r} names a tenant twice")
    return tenants


def _shares(text: str) -> list[float]:
    """An argparse type: positive numbers between commas."""
    return [_number(0, above=True)(part) for part in text.split(",")]


def _lengths(text: str) -> list[Any]:
    """An argparse type: a distribution of lengths."""
    kind, _, rest = text.partition(":")
    whole = _integer(1, 1 << 20)
    if kind == "lognormal":
        shape = "lognormal:MEDIAN:SIGMA:MIN:MAX"
        figures = _parts(rest, ":", (_number(0, above=True), _number(0), whole, whole), shape)
    elif kind == "uniform":
        figures = _parts(rest, ":", (whole, whole), "uniform:MIN:MAX")
    else:
        raise argparse.ArgumentTypeError(f"{text!r} must begin with lognormal: or uniform:")
    if figures[-2] > figures[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} has a smallest length above the largest")
    return [kind, *figures]


def _burst(text: str) -> list[Any]:
    """An argparse type: how requests bunch."""
    kind, _, rest = text.partition(":")
    if kind == "fanout":
        return [kind, *_parts(rest, ":", (_integer(2, 100_000),), "fanout:N")]
    if kind == "onoff":
        return [kind, *_parts(rest, ":", (_number(0, above=True), _number(0)), "onoff:ON_MS:OFF_MS")]
    raise argparse.ArgumentTypeError(f"{text!r} must begin with fanout: or onoff:")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    big = 1 << 40
    add = parser.add_argument
    add("--tau0-ms", type=_number(0), required=True, help="fixed time of a batch")
    add("--alpha-ms", type=_number(0), required=True, help="time per row of a batch")
    add("--rate-per-s", type=_number(0, above=True), required=True, help="requests per second, on average")
    add("--max-batch-size", type=_integer(0, big), default=64, help="rows per batch; 0: every request alone (default: 64)")
    add("--max-delay-ms", type=_number(0), default=0.0, help="how long the oldest may wait for others (default: 0)")
    add("--slots", type=_integer(1, 10_000), default=1, help="batches that run at the same time (default: 1)")
    add("--stage", action="store_true", help="form one further batch while all slots are busy")
    add("--requests", type=_integer(1, MAX_REQUESTS), default=100_000, help="how many requests come (default: 100000)")
    add("--rows", type=_integer(1, big), default=1, help="rows of each request (default: 1)")
    add("--seed", type=_integer(0, big), default=1, help="of the arrivals (default: 1)")
    add("--arrivals", choices=("poisson", "constant", "onoff"), default="poisson", help="how they come (default: poisson)")
    add("--on-ms", type=_number(0, above=True), default=100.0, help="with onoff: length of a burst (default: 100)")
    add("--off-ms", type=_number(0), default=100.0, help="with onoff: silence after it (default: 100)")
    add("--noise", type=_number(0), default=0.0, help="relative scatter of the time of a batch (default: 0)")
    add("--max-queue-rows", type=_integer(1, big), default=None, help="rows that may wait (default: no bound)")
    add("--timeout-ms", type=_number(0, above=True), default=None, help="how long a request may wait (default: for ever)")
    add("--mode", choices=("fixed", "adaptive"), default="fixed", help="who decides when a batch starts (default: fixed)")
    add("--slo-ms", type=_number(0, above=True), default=None, help="latency objective: prints the share answered within it")
    add("--early-drop", action="store_true", help="also in fixed mode: give up what cannot meet the objective any more")
    add(
        "--tenants",
        type=_tenants,
        default=None,
        help="NAME:WEIGHT:SHARE,… with weights for fair queueing and shares of the traffic",
    )
    add("--levels", type=_shares, default=None, help="SHARE,SHARE,… of the traffic by priority level, level 1 first")
    add(
        "--aging-ms",
        type=_number(0, above=True),
        default=None,
        help="with levels: a request rises by one each time it waited that long",
    )
    add(
        "--lengths",
        type=_lengths,
        default=None,
        help="lognormal:MEDIAN:SIGMA:MIN:MAX or uniform:MIN:MAX tokens; alpha is per token then",
    )
    add("--max-batch-tokens", type=_integer(1, big), default=None, help="with lengths: padded tokens per batch (default: no bound)")
    add("--burst", type=_burst, default=None, help="fanout:N (N requests at once), or onoff:ON_MS:OFF_MS (as --arrivals onoff)")
    add("--slow-share", type=_number(0), default=0.0, help="share of the batches that take three times as long (default: 0)")
    add("--step-rows", type=_integer(1, big), default=1, help="batch times rise in steps of so many rows (default: 1, a line)")
    add("--compare", action="store_true", help="try no batching, several windows and the adaptive mode on the same arrivals")
    add("--plot", default=None, metavar="FILE.svg", help="with --compare: draw the figures")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Simulate and print; 0, or 2 with a sentence on stderr where the options contradict each other."""
    problem = _contradiction(options)
    if problem is not None:
        print(f"shoal simulate: {problem}", file=sys.stderr)
        return 2
    capacity = _capacity_per_s(options)
    if options.rate_per_s > capacity:
        print(f"note: more comes than can be served, about {capacity:,.0f} requests per second; the queue grows", file=sys.stderr)
    if options.compare:
        return _compare(options)
    summary = _simulate(options)
    if options.json:
        print(json.dumps(summary))
    else:
        for key, value in summary.items():
            print(f"{key:16} {value:14,.3f}" if isinstance(value, float) else f"{key:16} {value:14,}")
    return 0


def _capacity_per_s(options: argparse.Namespace) -> float:
    """Requests per second of all slots in full batches: slots · b / l(b), by the rows of a request."""
    rows = max(options.max_batch_size, options.rows) if options.max_batch_size else options.rows
    tokens = 1.0 if options.lengths is None else float(options.lengths[1])
    batch_ms = options.tau0_ms + options.alpha_ms * rows * tokens
    return float(options.slots * rows / batch_ms * 1e3 / options.rows)


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.tau0_ms + options.alpha_ms <= 0:
        return "a batch must take some time: --tau0-ms and --alpha-ms cannot both be 0"
    if options.max_queue_rows is not None and options.rows > options.max_queue_rows:
        return f"a request of {options.rows} rows never fits into --max-queue-rows {options.max_queue_rows}"
    if options.plot is not None and not options.compare:
        return "--plot draws what --compare compares: give both"
    if options.slow_share > 1:
        return f"--slow-share is a share of the batches, at most 1, not {options.slow_share:g}"
    if options.max_batch_tokens is not None and options.lengths is None:
        return "--max-batch-tokens needs --lengths"
    if options.max_batch_tokens is not None and options.rows * options.lengths[-1] > options.max_batch_tokens:
        largest = f"{options.rows} x {options.lengths[-1]} tokens"
        return f"a request of {largest} never fits into --max-batch-tokens {options.max_batch_tokens}"
    if options.early_drop and options.slo_ms is None and options.timeout_ms is None:
        return "--early-drop needs an objective: give --slo-ms, or --timeout-ms"
    pieces = options.requests * -(-options.rows // max(1, options.max_batch_size)) if options.max_batch_size else options.requests
    if pieces > MAX_REQUESTS:
        return f"the requests would be cut into more than {MAX_REQUESTS:,} pieces: lower --requests or --rows"
    longest_ms = options.requests / options.rate_per_s * 1e3 + options.requests * options.rows * options.alpha_ms
    longest_ms += pieces * options.tau0_ms + options.max_delay_ms
    if longest_ms > 1e11:
        return "the simulated time would be longer than three years: raise --rate-per-s or lower --requests"
    return None


def _requests(options: argparse.Namespace) -> Any:
    """Who sends what, and when."""
    from shoal.sim import arrivals, workload

    rate, count, seed = options.rate_per_s, options.requests, options.seed
    burst = options.burst or ["onoff", options.on_ms, options.off_ms]
    if options.burst and burst[0] == "fanout":
        times_ns = workload.fan_out(rate, count, burst[1], seed)
    elif options.burst or options.arrivals == "onoff":
        times_ns = arrivals.on_off(rate, count, seed, burst[1], burst[2])
    elif options.arrivals == "constant":
        times_ns = arrivals.constant(rate, count)
    else:
        times_ns = arrivals.poisson(rate, count, seed)
    from shoal.sim.simulator import Requests

    requests: dict[str, Any] = {"rows": arrivals.constant_rows(count, options.rows)}
    if options.tenants is not None:
        names = [name for name, _, _ in options.tenants]
        drawn = workload.choices([share for _, _, share in options.tenants], count, seed + 1)
        requests["tenants"] = [names[index] for index in drawn.tolist()]
    if options.levels is not None:
        requests["levels"] = workload.choices(options.levels, count, seed + 2) + 1
    if options.lengths is not None:
        kind, *figures = options.lengths
        make: Callable[..., Any] = workload.lognormal_lengths if kind == "lognormal" else workload.uniform_lengths
        requests["lengths"] = make(*figures, count, seed + 3)
    return Requests(times_ns, **requests)


def _settings(options: argparse.Namespace) -> tuple[Any, Any]:
    """The settings of the scheduler."""
    from shoal.config.settings import BatchingSettings, LengthSettings, QueueSettings

    by_length = options.lengths is not None
    batching = BatchingSettings(
        max_batch_size=options.max_batch_size,
        max_delay_ms=options.max_delay_ms,
        mode=options.mode,
        early_drop=True if options.early_drop else None,
        max_batch_cost=options.max_batch_tokens,
        cost="tokens" if by_length else "rows",
        lengths={"tokens": LengthSettings(policy="pad")} if by_length else {},
    )
    queue = QueueSettings(
        max_queue_rows=options.max_queue_rows,
        max_queue_bytes=None,
        default_timeout_ms=options.timeout_ms,
        slo_ms=options.slo_ms,
        priority_levels=len(options.levels or [1]),
        aging_ms=options.aging_ms,
        tenant_weights={name: weight for name, weight, _ in options.tenants or ()},
    )
    return batching, queue


def _laws(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the service time."""
    return {
        "tau0_ns": options.tau0_ms * 1e6,
        "alpha_ns": options.alpha_ms * 1e6,
        "noise": options.noise,
        "slow_share": options.slow_share,
        "step_rows": options.step_rows,
        "seed": options.seed,
    }


def _simulate(options: argparse.Namespace) -> dict[str, float]:
    # Imported here so that `shoal --help` does not wait for numpy.
    from shoal.sim.service import ServiceTime
    from shoal.sim.simulator import simulate_requests

    batching, queue = _settings(options)
    result = simulate_requests(
        _requests(options), ServiceTime(**_laws(options)), batching=batching, queue=queue, slots=options.slots, stage=options.stage
    )
    summary = result.summary()
    if options.slo_ms is not None:
        objective_ns = round(options.slo_ms * 1e6)
        summary["in_time_share"] = result.in_time_share(objective_ns)
        summary["goodput_per_s"] = result.goodput_per_s(objective_ns)
    if options.tenants is not None:
        summary["fairness"] = result.fairness(queue.tenant_weights)
    return summary


def _compare(options: argparse.Namespace) -> int:
    from shoal.sim.compare import compare, policies, svg, table

    batching, queue = _settings(options)
    tried = policies(batching, options.tau0_ms)
    figures = compare(_requests(options), _laws(options), tried, queue, options.slots, options.slo_ms)
    print(json.dumps(figures) if options.json else table(figures))
    if options.plot is not None:
        try:
            Path(options.plot).write_text(svg(figures), encoding="utf-8")
        except OSError as error:
            print(f"shoal simulate: {options.plot}: cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command by itself, without the others."""
    parser = argparse.ArgumentParser(prog="python -m shoal.cli.simulate", description=__doc__)
    add_parser(parser.add_subparsers())
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(["simulate", *words])
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
