"""The physical limit: ONNX Runtime alone in a loop, one thread, no server, CPU time per row at several batch sizes.

Run as a process of its own so that it can be bound to the server's core: `python -m benchmarks.bare_loop MODEL --seconds S`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.machine import BenchmarkError, pinned

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def run_bare_loop(core: int, model: Path, seconds: float) -> dict[int, float]:
    """Measure on a core, in a fresh process: batch size → CPU µs per row. `seconds` is the time of all sizes together."""
    command = pinned(core, [sys.executable, "-m", "benchmarks.bare_loop", str(model), "--seconds", str(seconds)])
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=seconds + 60, check=False)
    if done.returncode:
        raise BenchmarkError(f"the bare loop ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return {int(size): float(cost) for size, cost in json.loads(done.stdout).items()}


def measure(model: str, seconds: float) -> dict[int, float]:
    """CPU µs per row by batch size, in this process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    random = np.random.default_rng(3)
    costs = {}
    for size in BATCH_SIZES:
        feed = {entry.name: random.normal(0.0, 1.0, (size, entry.shape[1])).astype(np.float32)}
        session.run(None, feed)
        runs, started = 0, time.process_time_ns()
        give_up = started + int(seconds / len(BATCH_SIZES) * 1e9)
        while time.process_time_ns() < give_up:
            session.run(None, feed)
            runs += 1
        costs[size] = (time.process_time_ns() - started) / 1e3 / (runs * size)
    return costs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    json.dump(measure(arguments.model, arguments.seconds), sys.stdout)
