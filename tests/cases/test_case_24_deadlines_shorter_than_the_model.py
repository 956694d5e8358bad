"""Case 24 over HTTP: a hundred calls with deadlines that the model cannot meet leave no trace; the next hundred are answered."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server


def test_hundred_late_then_hundred_normal(tmp_path: Path) -> None:
    """Each of the late ones is 504 (or never answered, as its client hangs up); no executor is replaced, and none is run."""
    path, gate = gated(tmp_path)
    model = ModelSettings(path=path, probe=False, batching=BatchingSettings(max_batch_size=8))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as first:
        first.send(infer("m", {"x": np.zeros((1, 4), np.float32)}))
        gate.wait_entered()
        late = [RawClient(server.port) for _ in range(100)]
        for number, client in enumerate(late):
            client.send(infer("m", {"x": np.full((1, 4), -1, np.float32)}, x_request_timeout_ms=5))
            if number % 4 == 3:
                client.vanish()
        for number, client in enumerate(late):
            if number % 4 != 3:
                answer = client.response()
                assert (answer.status, answer.json()["reason"]) == (504, "deadline_exceeded")
                client.close()
        lane = server.lane("m")
        server.wait_until(lambda: lane.snapshot().held_requests == 0)
        server.check_invariants()
        gate.open()
        assert first.response().status == 200
        for number in range(100):
            answer = first.ask(infer("m", {"x": np.full((1, 4), number, np.float32)}))
            assert answer.tensors()["y"][0, 0] == 2.0 * number
        server.settled()
        assert (lane.restarts, lane.stats.workers_lost) == (0, 0)
        assert [-1.0] not in gate.notes and len(gate.notes) == 101
