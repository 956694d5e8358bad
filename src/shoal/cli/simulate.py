"""`shoal simulate`: what a batching setting would do under a load, in virtual time.

Words to numbers and back; the work is in `sim/`. Also runnable as `python -m shoal.cli.simulate`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
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
    batch_ms = options.tau0_ms + options.alpha_ms * rows
    return float(options.slots * rows / batch_ms * 1e3 / options.rows)


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.tau0_ms + options.alpha_ms <= 0:
        return "a batch must take some time: --tau0-ms and --alpha-ms cannot both be 0"
    if options.max_queue_rows is not None and options.rows > options.max_queue_rows:
        return f"a request of {options.rows} rows never fits into --max-queue-rows {options.max_queue_rows}"
    pieces = options.requests * -(-options.rows // max(1, options.max_batch_size)) if options.max_batch_size else options.requests
    if pieces > MAX_REQUESTS:
        return f"the requests would be cut into more than {MAX_REQUESTS:,} pieces: lower --requests or --rows"
    longest_ms = options.requests / options.rate_per_s * 1e3 + options.requests * options.rows * options.alpha_ms
    longest_ms += pieces * options.tau0_ms + options.max_delay_ms
    if longest_ms > 1e11:
        return "the simulated time would be longer than three years: raise --rate-per-s or lower --requests"
    return None


def _simulate(options: argparse.Namespace) -> dict[str, float]:
    # Imported here so that `shoal --help` does not wait for numpy.
    from shoal.config.settings import BatchingSettings, QueueSettings
    from shoal.sim import arrivals
    from shoal.sim.service import ServiceTime
    from shoal.sim.simulator import simulate

    rate, count, seed = options.rate_per_s, options.requests, options.seed
    if options.arrivals == "poisson":
        times_ns = arrivals.poisson(rate, count, seed)
    elif options.arrivals == "constant":
        times_ns = arrivals.constant(rate, count)
    else:
        times_ns = arrivals.on_off(rate, count, seed, options.on_ms, options.off_ms)
    result = simulate(
        times_ns,
        ServiceTime(options.tau0_ms * 1e6, options.alpha_ms * 1e6, noise=options.noise, seed=seed),
        batching=BatchingSettings(max_batch_size=options.max_batch_size, max_delay_ms=options.max_delay_ms),
        queue=QueueSettings(max_queue_rows=options.max_queue_rows, max_queue_bytes=None, default_timeout_ms=options.timeout_ms),
        rows=arrivals.constant_rows(count, options.rows),
        slots=options.slots,
        stage=options.stage,
    )
    return result.summary()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command by itself, without the others."""
    parser = argparse.ArgumentParser(prog="python -m shoal.cli.simulate", description=__doc__)
    add_parser(parser.add_subparsers())
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(["simulate", *words])
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
