"""How many CPUs this process may use, and how they are shared out among the executors of all models.

The allowance is the smaller of the affinity mask and the CPU quota of the control group, of either version. Files are read in
`cpu_budget` alone; parsing them is pure. Nothing here starts a thread.

Why it matters: a runtime that sizes its thread pool by the machine, inside a container that may use 2 of 32 CPUs, starts 32
threads that are then throttled together, and every one of them is waited for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["CpuBudget", "cpu_budget", "parse_cgroup_paths", "parse_cpu_max", "parse_v1_quota", "plan_threads", "share_threads"]

_ROOT: Final = PurePosixPath("/sys/fs/cgroup")
_V1_MOUNTS: Final = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """CPUs in the affinity mask, the quota of the control group in CPUs (None: no quota), and what follows from both."""

    affinity: int
    quota: float | None

    @property
    def cpus(self) -> int:
        """Whole CPUs that may be kept busy all the time. A quota of 2.5 CPUs counts as 2: a third thread would be throttled."""
        if self.quota is None:
            return max(1, self.affinity)
        return max(1, min(self.affinity, math.floor(self.quota)))

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"quota {self.quota:g}"
        return f"{self.cpus} (affinity {self.affinity}, {quota})"


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """`/proc/self/cgroup` as controller → path below that controller's mount; version 2 is the controller with the empty name.

    Lines are `id:controllers:path`; lines of another form are skipped.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdigit() and separator and path.startswith("/"):
            for controller in controllers.split(","):
                paths.setdefault(controller, path)
    return paths


def parse_cpu_max(text: str) -> float | None:
    """`cpu.max` of version 2, `"quota period"` in microseconds, as CPUs; None for `max` or for text that is neither."""
    parts = text.split()
    period = parts[1] if len(parts) > 1 else "100000"
    return parse_v1_quota(parts[0], period) if parts else None


def parse_v1_quota(quota: str, period: str) -> float | None:
    """`cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1 as CPUs; None without a quota (-1) or for text that is no number."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _read(path: PurePosixPath) -> str | None:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return None


def _quotas(root: PurePosixPath, path: str, parse: Callable[[PurePosixPath], float | None]) -> list[float]:
    """Quotas of the group and of all groups above it: the smallest one binds. Inside a container only the root may be visible."""
    group = PurePosixPath(path.lstrip("/"))
    folders = [group, *group.parents] if group.parts else [group]
    return [quota for folder in folders if (quota := parse(root / folder)) is not None]


def cpu_budget() -> CpuBudget:
    """What this process may use now. Reads the affinity mask and the control group's files; where they are missing, no quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def version_2(folder: PurePosixPath) -> float | None:
        text = _read(folder / "cpu.max")
        return None if text is None else parse_cpu_max(text)

    def version_1(folder: PurePosixPath) -> float | None:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        return None if quota is None or period is None else parse_v1_quota(quota, period)

    paths = parse_cgroup_paths(_read(PurePosixPath("/proc/self/cgroup")) or "")
    quotas: list[float] = []
    for mount in (_ROOT, _ROOT / "unified"):
        quotas += _quotas(mount, paths.get("", "/"), version_2)
    for name in _V1_MOUNTS:
        quotas += _quotas(_ROOT / name, paths.get("cpu", "/"), version_1)
    return CpuBudget(affinity, min(quotas, default=None))


def share_threads(cpus: int, instances: int) -> int:
    """Threads for each of `instances` equal executors, so that together they are no more than `cpus`; at least 1 each.

    With more executors than CPUs each still has the one thread that it runs on.
    """
    return max(1, cpus // max(1, instances))


def plan_threads(cpus: int, models: Mapping[str, tuple[int, int | None]]) -> dict[str, int]:
    """Threads of one instance of each model, from `name → (instances, threads or None)`.

    A number that was set is kept; what is left of `cpus` is shared evenly by the instances of the others. The sum over all
    instances is at most `cpus` unless the settings themselves ask for more, or there are more instances than CPUs.
    """
    taken = sum(instances * threads for instances, threads in models.values() if threads is not None)
    open_instances = sum(instances for instances, threads in models.values() if threads is None)
    share = share_threads(max(0, cpus - taken), open_instances)
    return {name: share if threads is None else threads for name, (_, threads) in models.items()}
