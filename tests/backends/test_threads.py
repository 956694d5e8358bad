"""The CPU budget: parsing what the kernel says, and sharing it out."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backends import threads
from shoal.backends.threads import (
    CpuBudget,
    cpu_budget,
    parse_cgroup_paths,
    parse_cpu_max,
    parse_v1_quota,
    plan_threads,
    share_threads,
)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("300000", 3.0),
        ("max", None),
        ("", None),
        ("nonsense here", None),
        ("100000 0", None),
    ],
)
def test_cpu_max_of_version_2(text: str, cpus: float | None) -> None:
    """Quota and period, without a limit, with the period left out, and text that is neither."""
    assert parse_cpu_max(text) == cpus


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("-1\n", "100000\n", None), ("400000\n", "100000\n", 4.0), ("25000", "50000", 0.5), ("", "", None), ("1", "0", None)],
)
def test_quota_of_version_1(quota: str, period: str, cpus: float | None) -> None:
    """Two files; -1 means that there is no limit."""
    assert parse_v1_quota(quota, period) == cpus


def test_cgroup_paths_of_both_versions() -> None:
    """Version 2 has one line with an empty name; version 1 has one line per hierarchy, with several controllers in some."""
    assert parse_cgroup_paths("0::/user.slice/app\n") == {"": "/user.slice/app"}
    text = "12:cpu,cpuacct:/docker/ab:c\n4:memory:/docker\n1:name=systemd:/\n0::/\nnot a line\n"
    assert parse_cgroup_paths(text) == {
        "cpu": "/docker/ab:c",
        "cpuacct": "/docker/ab:c",
        "memory": "/docker",
        "name=systemd": "/",
        "": "/",
    }


@pytest.mark.parametrize(
    ("affinity", "quota", "cpus"), [(32, 2.0, 2), (32, None, 32), (2, 8.0, 2), (4, 2.9, 2), (4, 0.5, 1), (1, None, 1)]
)
def test_the_smaller_of_mask_and_quota_in_whole_cpus(affinity: int, quota: float | None, cpus: int) -> None:
    """Case 16: 2 of 32 CPUs means 2; a part of a CPU does not count, but there is always one."""
    assert CpuBudget(affinity, quota).cpus == cpus


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            1.5,
        ),
        ({"/proc/self/cgroup": "0::/gone\n", "/sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (
            {
                "/proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n",
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({}, None),
    ],
)
def test_files_are_looked_for_in_all_the_places(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    """A container's root, nested groups (the smallest quota binds), a group not visible from inside, version 1, and nothing."""
    monkeypatch.setattr(threads, "_read", lambda path: files.get(str(PurePosixPath(path))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    assert cpu_budget() == CpuBudget(32, quota)


def test_this_machine_has_a_budget() -> None:
    """The real files: at least one CPU, no more than the mask allows, and a text for the start log."""
    budget = cpu_budget()
    assert 1 <= budget.cpus <= budget.affinity
    assert str(budget).startswith(f"{budget.cpus} (affinity {budget.affinity}, ")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 128), st.integers(1, 64))
def test_equal_shares_never_exceed_the_cpus(cpus: int, instances: int) -> None:
    """Case 16: all threads together fit, nobody gets none, and no whole share is left over."""
    each = share_threads(cpus, instances)
    assert each >= 1
    assert each * instances <= max(cpus, instances)
    assert (each + 1) * instances > cpus


MODELS = st.dictionaries(st.text("abc", min_size=1), st.tuples(st.integers(1, 4), st.none() | st.integers(1, 8)), max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), MODELS)
def test_a_plan_keeps_what_was_set_and_fits_where_it_can(cpus: int, models: dict[str, tuple[int, int | None]]) -> None:
    """Set numbers stay. The sum is within the CPUs, unless what was set and one thread for each of the rest is more already."""
    plan = plan_threads(cpus, models)
    assert plan.keys() == models.keys()
    least = sum(instances * (threads or 1) for instances, threads in models.values())
    assert sum(models[name][0] * threads for name, threads in plan.items()) <= max(cpus, least)
    for name, (_, threads_set) in models.items():
        assert plan[name] == threads_set if threads_set is not None else plan[name] >= 1


def test_a_plan_by_example() -> None:
    """8 CPUs: 2 x 2 are set, the other 4 are shared by 2 instances."""
    assert plan_threads(8, {"set": (2, 2), "open": (1, None), "other": (1, None)}) == {"set": 2, "open": 2, "other": 2}
