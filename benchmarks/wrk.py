"""The load generator: wrk with a Lua script written for one request, one thread on one core, figures back as JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import BenchmarkError, pinned
from benchmarks.payloads import ID_SLOT, Request

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
REQUEST_TIMEOUT_S = 10
_MARK = "figures: "


@dataclass(frozen=True)
class Load:
    """One run of wrk. Latencies in µs by percentile; `socket_errors` are failed connects, reads, writes and time-outs.

    `bad_statuses` counts answers of 400 and above. `expected_statuses` counts answers of the status asked for (None: not counted).
    """

    requests: int
    duration_s: float
    latency_us: dict[float, float]
    latency_max_us: float
    socket_errors: int
    bad_statuses: int
    expected_statuses: int | None

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second."""
        return self.requests / self.duration_s


def run_wrk(core: int, port: int, request: Request, connections: int, seconds: float, count_status: int | None = None) -> Load:
    """Load a server in a closed loop: each of the connections sends its next request when it has its answer.

    `count_status` counts the answers with that status exactly, at some cost to the generator. wrk knows whole seconds only;
    fractions are rounded up. Raises BenchmarkError when wrk is missing, fails or hangs.
    """
    if shutil.which("wrk") is None:
        raise BenchmarkError("wrk is missing; install it (Debian and Ubuntu: apt-get install wrk)")
    whole_seconds = max(1, -int(-seconds // 1))
    with tempfile.TemporaryDirectory(prefix="shoal-wrk-") as name:
        folder = Path(name)
        (folder / "body.bin").write_bytes(request.body)
        script = folder / "load.lua"
        script.write_text(_script(folder / "body.bin", request, count_status))
        words = ["wrk", "-t1", f"-c{connections}", f"-d{whole_seconds}s", f"--timeout={REQUEST_TIMEOUT_S}s", "--latency"]
        command = pinned(core, [*words, "-s", str(script), f"http://127.0.0.1:{port}{request.path}"])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=whole_seconds + 30, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"wrk did not end {30} s after its time") from None
    return _parse(done)


def _script(body: Path, request: Request, count_status: int | None) -> str:
    lines = [
        f"local file = assert(io.open({_quoted(str(body))}, 'rb'))",
        "local body = file:read('*a')",
        "file:close()",
        "wrk.method, wrk.body = 'POST', body",
        *(f"wrk.headers[{_quoted(name)}] = {_quoted(value)}" for name, value in request.headers.items()),
    ]
    if request.id_at is not None:
        tail = request.id_at + len(ID_SLOT)
        lines += [
            "local front, back, number",
            "function init(args)",
            "  local whole = wrk.format()",
            "  local start = #whole - #body",
            f"  front, back, number = whole:sub(1, start + {request.id_at}), whole:sub(start + {tail} + 1), 0",
            "end",
            "function request()",
            "  number = number + 1",
            f"  return front .. string.format('%0{len(ID_SLOT)}d', number) .. back",
            "end",
        ]
    if count_status is not None:
        lines += [
            "expected = 0",
            "local thread",
            "function setup(one) thread = one end",
            "function response(status, headers, body)",
            f"  if status == {count_status} then expected = expected + 1 end",
            "end",
        ]
    counted = "-1" if count_status is None else "thread:get('expected')"
    lines += [
        "function done(summary, latency, requests)",
        "  local e = summary.errors",
        "  local parts = {}",
        f"  for _, p in ipairs({{{', '.join(map(str, PERCENTILES))}}}) do",
        """    parts[#parts + 1] = string.format('"%g":%d', p, latency:percentile(p))""",
        "  end",
        f"""  io.write(string.format('{_MARK}{{"requests":%d,"duration_us":%d,"max_us":%d,"socket_errors":%d,"""
        """"bad_statuses":%d,"expected":%d,"latency_us":{%s}}\\n',""",
        "    summary.requests, summary.duration, latency.max, e.connect + e.read + e.write + e.timeout,",
        f"    e.status, {counted}, table.concat(parts, ',')))",
        "end",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _parse(done: subprocess.CompletedProcess[str]) -> Load:
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            figures = json.loads(line.removeprefix(_MARK))
            break
    else:
        raise BenchmarkError(f"wrk ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return Load(
        requests=figures["requests"],
        duration_s=figures["duration_us"] / 1e6,
        latency_us={percentile: float(figures["latency_us"][f"{percentile:g}"]) for percentile in PERCENTILES},
        latency_max_us=float(figures["max_us"]),
        socket_errors=figures["socket_errors"],
        bad_statuses=figures["bad_statuses"],
        expected_statuses=None if figures["expected"] < 0 else figures["expected"],
    )
