"""What the benchmarks ask of the machine: cores, CPU clocks of processes, context switches, memory, foreign load.

Everything here reads Linux's /proc or a system clock. Nothing here starts a process.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """A benchmark could not be run, or ran in a way that makes its figures worthless."""


@dataclass(frozen=True)
class Cores:
    """The core that servers run on and the one that load comes from."""

    server: int
    load: int


def choose_cores(server: int | None = None, load: int | None = None) -> Cores:
    """Two different cores that this process may use. Raises BenchmarkError when there are not two."""
    usable = sorted(os.sched_getaffinity(0))
    chosen_server = usable[0] if server is None else server
    others = [core for core in usable if core != chosen_server]
    chosen_load = (others[0] if others else chosen_server) if load is None else load
    if chosen_server == chosen_load:
        raise BenchmarkError("the benchmarks need two cores, one for the server and one for the load")
    for core in (chosen_server, chosen_load):
        if core not in usable:
            raise BenchmarkError(f"core {core} is not among the usable ones: {usable}")
    return Cores(chosen_server, chosen_load)


def pinned(core: int, command: list[str]) -> list[str]:
    """The command bound to one core, and told to end with the process that started it, however that one ends."""
    if shutil.which("taskset") is None:
        raise BenchmarkError("taskset is missing; it comes with the Debian package util-linux")
    guard = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    return [*guard, "taskset", "-c", str(core), *command]


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def process_cpu_ns(pid: int) -> int:
    """CPU time that a process has used so far, user and system, of all its threads (ended ones too), in nanoseconds.

    The clock id is Linux's encoding of "CPU clock of process pid" (what clock_getcpuclockid(3) computes). It resolves
    nanoseconds where utime and stime of /proc/PID/stat resolve ticks of 10 ms, and it counts the same.
    """
    return time.clock_gettime_ns((~pid << 3) | 2)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def context_switches(pid: int) -> int:
    """Context switches of all living threads of a process, voluntary or not."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def core_busy_ns(core: int) -> int:
    """Time that a core was not idle so far: user, nice, system, both kinds of interrupts, and what the hypervisor stole.

    Interrupts count because the CPU clocks of processes contain those that hit them; on the loopback, most belong to the sender.
    """
    for line in Path("/proc/stat").read_text().splitlines():
        words = line.split()
        if words[0] == f"cpu{core}":
            return sum(int(words[column]) for column in (1, 2, 3, 6, 7, 8)) * 1_000_000_000 // TICKS_PER_S
    raise BenchmarkError(f"/proc/stat knows no core {core}")


def describe() -> dict[str, object]:
    """The machine in a few words, for the result file."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }
