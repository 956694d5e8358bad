"""Case 3: of a batch of eight, the one whose row makes the model raise gets its status; the others get their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.testing.company import together
from shoal.testing.models import gated_model
from shoal.testing.raw_http import infer
from shoal.testing.server import local_settings, running_server

SOURCE = """
class Refusal(Exception):
    def __init__(self, status):
        super().__init__(f"row {status} is not for me")
        if status > 0:
            self.http_status = status

class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def __call__(self, x):
        GATE.enter(len(x))
        for value in x[:, 0]:
            if value >= 400 or value < 0:
                raise Refusal(int(value))
        return x + 1
"""


@pytest.mark.parametrize(("marker", "status"), [(400, 400), (422, 422), (503, 503), (599, 599), (-1, 500), (700, 500)])
def test_only_the_culprit_fails(tmp_path: Path, marker: int, status: int) -> None:
    """Whatever the model raises for item 5, a client's fault or a server's, with or without a status, seven are answered."""
    path, gate = gated_model(tmp_path, SOURCE)
    with running_server(local_settings({"m": path})) as server:
        values = [1, 2, 3, 4, marker, 6, 7, 8]
        requests = [infer("m", {"x": np.array([[value]], np.float32)}) for value in values]
        answers = together(server, gate, "m", infer("m", {"x": np.zeros((1, 1), np.float32)}), requests)
        assert [answer.status for answer in answers] == [200] * 4 + [status] + [200] * 3
        assert answers[4].json()["reason"] == "model_failed" and "not for me" in answers[4].json()["error"]
        for value, answer in zip(values, answers, strict=True):
            if value != marker:
                assert answer.tensors()["y"].tolist() == [[value + 1]]
        assert gate.notes[1] == 8
        figures = server.call(lambda: server.server.engine.lane("m").stats.fail.count)
        assert figures == 1
