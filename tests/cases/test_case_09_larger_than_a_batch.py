"""Case 9: a request of more rows than a batch may hold is cut and rejoined, or refused, as the settings say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.testing.models import gated_model
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server

SOURCE = """
class Model:
    inputs = {"x": ("FP32", (2,))}
    outputs = {"y": ("FP32", (2,))}
    def __call__(self, x):
        GATE.enter(len(x))
        if (x < 0).any():
            raise ValueError("negative row")
        return x + 100
"""
ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)


def test_split_and_rejoined(tmp_path: Path) -> None:
    """Twelve rows with a limit of five run as 5 + 5 + 2 and come back as one answer in order."""
    path, door = gated_model(tmp_path, SOURCE)
    door.open()
    model = ModelSettings(path=path, probe=False, batching=BatchingSettings(max_batch_size=5))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client:
        assert client.ask(infer("m", {"x": ROWS})).tensors()["y"].tolist() == (ROWS + 100).tolist()
        assert door.notes == [5, 5, 2]
        server.settled()


def test_invalid_row_fails_the_request_once(tmp_path: Path) -> None:
    """With row 9 invalid the request fails, once; the next one on the connection is answered."""
    path, door = gated_model(tmp_path, SOURCE)
    door.open()
    model = ModelSettings(path=path, probe=False, batching=BatchingSettings(max_batch_size=5))
    rows = ROWS.copy()
    rows[9] = -1
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client:
        client.send(infer("m", {"x": rows}) + infer("m", {"x": ROWS[:1]}))
        answer = client.response()
        assert (answer.status, answer.json()["reason"]) == (500, "model_failed")
        assert "negative row" in answer.json()["error"]
        assert client.response().tensors()["y"].tolist() == [[100, 101]]
        server.settled()
        assert server.call(lambda: server.server.engine.lane("m").stats.fail.count) == 1


def test_rejected(tmp_path: Path) -> None:
    """With `oversize = "reject"` the answer is 413 and names the limit; five rows still pass."""
    path, door = gated_model(tmp_path, SOURCE)
    door.open()
    model = ModelSettings(path=path, probe=False, batching=BatchingSettings(max_batch_size=5, oversize="reject"))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client:
        answer = client.ask(infer("m", {"x": ROWS}))
        assert (answer.status, answer.json()["reason"]) == (413, "too_large")
        assert "12 rows" in answer.json()["error"] and "5" in answer.json()["error"]
        assert client.ask(infer("m", {"x": ROWS[:5]})).tensors()["y"].tolist() == (ROWS[:5] + 100).tolist()
        assert door.notes == [5]
