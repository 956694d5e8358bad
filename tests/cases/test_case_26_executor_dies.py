"""Case 26, as the failure of a thread: what it ran is 503, what waits survives, another takes its place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.engine import executor
from shoal.testing.company import together
from shoal.testing.models import gated, gated_model
from shoal.testing.raw_http import RawClient, get, infer
from shoal.testing.server import local_settings, running_server


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@pytest.mark.parametrize("dies_at", [1, 2])
def test_thread_dies_in_the_middle_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    """The death comes from outside of the model, so nothing is known of the batch that ran, be it the first or a staged one."""
    path, gate = gated(tmp_path)
    whole = executor.execute
    calls = 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        outcome = whole(*args, **options)
        if calls == dies_at:
            raise SystemExit("the thread is torn down")
        return outcome

    monkeypatch.setattr(executor, "execute", dying)
    with running_server(local_settings({"m": path})) as server, RawClient(server.port) as first, RawClient(server.port) as second:
        first.send(infer("m", {"x": row(1)}))
        gate.wait_entered()
        second.send(infer("m", {"x": row(2)}))
        server.wait_waiting("m", 1)
        gate.open()
        lost, kept = (first, second) if dies_at == 1 else (second, first)
        answer = lost.response()
        assert (answer.status, answer.json()["reason"]) == (503, "worker_lost")
        assert kept.response().status == 200
        assert lost.ask(infer("m", {"x": row(3)})).tensors()["y"][0, 0] == 6.0
        assert first.ask(get("/v2/health/ready")).status == 200
        server.settled()
        lane = server.lane("m")
        assert (lane.restarts, lane.stats.workers_lost) == (1, 1)


@pytest.mark.parametrize(
    "what", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "MemoryError()", "RecursionError('deep')"]
)
def test_model_that_tries_to_end_the_program(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a model raises is that request's failure; thread, batch-mates and server go on."""
    caplog.set_level(logging.CRITICAL)
    path, gate = gated_model(
        tmp_path,
        f"""
        class Model:
            inputs = {{"x": ("FP32", (4,))}}
            outputs = {{"y": ("FP32", (4,))}}
            def __call__(self, x):
                GATE.enter(len(x))
                if (x == 13).any():
                    raise {what}
                return 2 * x
        """,
    )
    with running_server(local_settings({"m": path})) as server:
        requests = [infer("m", {"x": row(number)}) for number in (1, 13, 2)]
        answers = together(server, gate, "m", infer("m", {"x": row(0)}), requests)
        assert [answer.status for answer in answers] == [200, 500, 200]
        assert what.partition("(")[0] in answers[1].json()["error"]
        assert server.lane("m").restarts == 0
