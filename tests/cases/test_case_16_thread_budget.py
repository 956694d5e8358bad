"""Case 16: several ONNX sessions together use no more threads than there are CPUs, and the start-up lines say so."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shoal.backends.threads import cpu_budget
from shoal.config.settings import ModelSettings
from shoal.testing.process import serving
from shoal.testing.server import local_settings, running_server


def count_threads() -> int:
    """Threads of this process as the system counts them, those of native libraries too; not the loop's idle ones for look-ups."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            count += "libuv" not in (task / "comm").read_text()
        except OSError:  # it ended while we looked
            continue
    return count


def test_sessions_share_the_cpus() -> None:
    """Two sessions with defaults: together at most as many threads as CPUs (but one each); no pools beside."""
    before = count_threads()
    with running_server(local_settings({name: ModelSettings(path="digits") for name in ("a", "b")})) as server:
        budget = server.call(lambda: server.server.engine.thread_budget)
        assert sum(budget.values()) <= max(2, cpu_budget().cpus)
        ours = sum(thread.name.startswith("shoal") for thread in threading.enumerate())
        pools = sum(threads - 1 for threads in budget.values())
        # ONNX Runtime has one thread of its own for the whole process, which does no arithmetic.
        # Threads take their names a moment after they have begun, so the count is looked at until those are set.
        server.wait_until(lambda: count_threads() - before <= ours + pools + 1)


def test_start_up_lines_show_the_sum(tmp_path: Path) -> None:
    """A process that may use one CPU gives each session one thread, whatever the machine has."""
    one_cpu = {min(os.sched_getaffinity(0))}
    config = tmp_path / "shoal.toml"
    config.write_text('[server]\nhttp_port = 0\n[models.a]\npath = "digits"\n[models.b]\npath = "digits"\n')
    with serving("--config", str(config), cpus=one_cpu) as process:
        (line,) = [line for line in process.lines if line.startswith("threads:")]
        assert line == "threads: 2 for models on 1 CPU (a 1 x 1, b 1 x 1)"
        process.terminate()
        assert process.wait() == 0
