"""Case 18: a queue timeout ends a request at its time, although the only executor is busy much longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings, QueueSettings
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


@pytest.mark.parametrize("stage", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_fails_while_the_batch_still_runs(tmp_path: Path, stage: bool, own: bool) -> None:
    """504 comes while the batch in front still runs, also for one that is staged; it is never run, its place is free."""
    path, gate = gated(tmp_path)
    queue = QueueSettings(max_queue_rows=1, default_timeout_ms=None if own else 100.0)
    model = ModelSettings(path=path, probe=False, stage=stage, queue=queue)
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as long, RawClient(server.port) as client:
        try:
            long.send(infer("m", {"x": row(1)}))
            gate.wait_entered()
            for number in range(2, 5):  # each finds the place of the one before free
                headers = {"x_request_timeout_ms": 100} if own else {}
                answer = client.ask(infer("m", {"x": row(number)}, **headers))
                assert (answer.status, answer.json()["reason"]) == (504, "deadline_exceeded")
                waited_ms = float(answer.json()["error"].split("waiting ")[1].split(" ms")[0])
                assert waited_ms >= 100.0
        finally:
            gate.open()
        assert long.response().status == 200
        server.settled()
        assert gate.notes == [[1.0]]
        stats = server.call(lambda: server.server.engine.lane("m").stats)
        assert (stats.expired, stats.success.count) == (3, 1)
