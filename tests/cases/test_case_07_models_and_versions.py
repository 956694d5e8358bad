"""Case 7: two models, and two versions of one, asked in turns: each answer is that of the model it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.testing.models import python_model
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server


def adding(directory: Path, amount: int) -> str:
    """A model that adds `amount`."""
    return python_model(
        directory,
        f"""
        class Model:
            inputs = {{"x": ("FP32", (1,))}}
            outputs = {{"y": ("FP32", (1,))}}
            def __call__(self, x):
                return x + {amount}
        """,
    )


def test_interleaved(tmp_path: Path) -> None:
    """Three lanes with a window each; a hundred and fifty requests in turns on one connection; every answer is tagged and right."""
    batching = BatchingSettings(max_delay_ms=2.0)
    models = {
        "a": ModelSettings(path=adding(tmp_path, 1000), batching=batching),
        "b": ModelSettings(path=adding(tmp_path, 2000), batching=batching),
    }
    with running_server(local_settings(models)) as server, RawClient(server.port) as client:
        second = ModelSettings(path=adding(tmp_path, 3000), version="2", batching=batching)
        server.run(server.server.engine.load("a", second))
        targets = [("a", "1", 1000), ("b", None, 2000), ("a", "2", 3000), ("a", None, 3000), ("b", "1", 2000)]
        plan = [(number, *targets[number % 5]) for number in range(150)]
        for start in range(0, 150, 50):
            turn = plan[start : start + 50]
            client.send(b"".join(infer(name, {"x": np.array([[n]], np.float32)}, version=version) for n, name, version, _ in turn))
            for number, name, version, amount in turn:
                answer = client.response()
                assert answer.tensors()["y"].tolist() == [[number + amount]]
                told = answer.json()
                newest = {"a": "2", "b": "1"}[name]
                assert (told["model_name"], told["model_version"]) == (name, version or newest)
        counts = [server.lane("a", "1").stats.inferences, server.lane("a", "2").stats.inferences, server.lane("b").stats.inferences]
        assert counts == [30, 60, 60]
        assert client.ask(infer("a", {"x": np.zeros((1, 1), np.float32)}, version="3")).status == 404
        server.settled()
