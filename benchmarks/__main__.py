"""`python -m benchmarks [ROW …]`: runs the rows asked for, prints one table, writes one file of results."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import shoal
from benchmarks.machine import BenchmarkError, choose_cores, describe
from benchmarks.measure import Effort
from benchmarks.report import Row, table, write_json
from benchmarks.rows import ROWS, Bench
from benchmarks.servers import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    """Run; 0 when everything was measured, 1 when a row failed, or missed its budget with --strict."""
    options = _parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    try:
        cores = choose_cores(options.server_core, options.load_core)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    # This process mostly waits; what little it does must not disturb the server.
    os.sched_setaffinity(0, {cores.load})
    started = datetime.now(UTC)
    run = _describe_run(options, started)
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            bench = Bench(Path(folder), Effort(cores, options.seconds, options.repeat))
            functions = {ROWS[name]: name for name in reversed(options.rows or list(ROWS))}
            for function, name in reversed(functions.items()):
                print(f"measuring {name} …", file=sys.stderr, flush=True)
                rows += _run_row(bench, name, function)
    except KeyboardInterrupt:
        print("interrupted; the servers are stopped", file=sys.stderr)
        return 130
    print(table(rows))
    path = options.json or RESULTS / f"{started:%Y%m%dT%H%M%SZ}.json"
    write_json(path, rows, {**run, "duration_s": round(time.time() - started.timestamp(), 1)})
    print(f"written: {path}")
    verdicts = {row.verdict for row in rows}
    return int("failed" in verdicts or (options.strict and "miss" in verdicts))


def _run_row(bench: Bench, name: str, function: Any) -> list[Row]:
    try:
        result: list[Row] = function(bench)
    except (BenchmarkError, OSError, subprocess.SubprocessError) as error:
        work = " ".join((function.__doc__ or "").split())
        return [Row(name, work, error=str(error) or type(error).__name__)]
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", type=_row_name, help=f"{', '.join(ROWS)} (default: all)")
    parser.add_argument("--seconds", type=_positive, default=3.0, help="length of one run of load (default %(default)g)")
    parser.add_argument("--repeat", type=_count, default=5, help="rounds of each row (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the results go (default benchmarks/results/TIME.json)")
    parser.add_argument("--server-core", type=int, metavar="N", help="core of the servers (default: the first usable one)")
    parser.add_argument("--load-core", type=int, metavar="N", help="core of the load generator (default: the next one)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 also when a row misses its budget")
    return parser


def _row_name(text: str) -> str:
    if text not in ROWS:
        raise argparse.ArgumentTypeError(f"no row {text!r}; there are {', '.join(ROWS)}")
    return text


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError("must be 1 to 100")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError("must be above 0 and at most 60")
    return value


def _describe_run(options: argparse.Namespace, started: datetime) -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "started": started.isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "shoal": shoal.__version__,
        "onnxruntime": version("onnxruntime"),
        "seconds": options.seconds,
        "repeat": options.repeat,
        "machine": describe(),
    }


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    """End as by an exception, so that every server is stopped on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
