"""Case 29: not ready, with the load error, when the only model cannot be loaded; alive and ready while a queue is full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings, QueueSettings
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, get, infer
from shoal.testing.server import local_settings, running_server


@pytest.mark.parametrize("kind", ["missing", "empty", "not onnx", "cut short", "python error", "no such class"])
def test_only_model_fails_to_load(tmp_path: Path, kind: str) -> None:
    """Live, but not ready, and the answer says why; so does an inference."""
    path = tmp_path / ("model.py" if kind in ("python error", "no such class") else "model.onnx")
    target = str(path)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "not onnx":
        path.write_bytes(b"<html>404</html>" * 100)
    elif kind == "cut short":
        from shoal.models import digits_path

        path.write_bytes(digits_path().read_bytes()[:5000])
    elif kind == "python error":
        path.write_text("import nothing_of_that_name\n")
        target += ":Model"
    elif kind == "no such class":
        path.write_text("class Other: pass\n")
        target += ":Model"
    with running_server(local_settings({"m": ModelSettings(path=target)})) as server, RawClient(server.port) as client:
        assert client.ask(get("/v2/health/live")).status == 200
        for path_ in ("/v2/health/ready", "/v2/models/m/ready", "/v2/models/m", "/v2/models/m/config", "/v2/models/m/stats"):
            answer = client.ask(get(path_))
            assert (answer.status, answer.json()["reason"]) == (503, "not_ready"), path_
            assert '"m"' in answer.json()["error"] and len(answer.json()["error"]) > 40
        answer = client.ask(infer("m", {"x": np.zeros((1, 4), np.float32)}))
        assert (answer.status, answer.json()["reason"]) == (503, "not_ready")


def test_full_queue_is_no_outage(tmp_path: Path) -> None:
    """While the queue stays full, hundreds of probes and refusals in turns: always live, always ready."""
    path, gate = gated(tmp_path)
    model = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_rows=2))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client, RawClient(server.port) as probe:
        good = infer("m", {"x": np.ones((1, 4), np.float32)})
        client.send(good)
        gate.wait_entered()
        client.send(good * 2)
        server.wait_waiting("m", 2)
        for _ in range(200):
            assert probe.ask(good).status == 429
            assert probe.ask(get("/v2/health/live")).status == 200
            assert probe.ask(get("/v2/health/ready")).status == 200
        gate.open()
        assert [client.response().status for _ in range(3)] == [200] * 3
        server.settled()
