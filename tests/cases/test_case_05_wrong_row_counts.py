"""Case 5: a model that returns another number of rows than it was given is found out, and nobody gets another's row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings
from shoal.testing.company import together
from shoal.testing.models import gated_model, python_model
from shoal.testing.raw_http import RawClient, get, infer
from shoal.testing.server import local_settings, running_server

RESULTS = {"one less": "x[:-1]", "thirty times": "np.repeat(x, 30, axis=0)", "none": "x[:0]"}


@pytest.mark.parametrize("kind", RESULTS)
def test_refused_at_load_time(tmp_path: Path, kind: str) -> None:
    """The probe refuses to serve such a model in batches, and says which output and how many rows."""
    path = python_model(
        tmp_path,
        f"""
        class Model:
            inputs = {{"x": ("FP32", (2,))}}
            outputs = {{"wrong": ("FP32", (2,))}}
            def __call__(self, x):
                return {RESULTS[kind]} if len(x) > 1 else x
        """,
    )
    with running_server(local_settings({"m": ModelSettings(path=path)})) as server, RawClient(server.port) as client:
        answer = client.ask(get("/v2/models/m/ready"))
        assert answer.status == 503
        count = {"one less": 1, "thirty times": 60, "none": 0}[kind]
        assert "wrong" in answer.json()["error"] and f"{count} row" in answer.json()["error"]


@pytest.mark.parametrize("kind", RESULTS)
def test_failed_at_run_time(tmp_path: Path, kind: str) -> None:
    """If it starts to do so later, everybody in that batch gets 500 with the counts, and nobody a shifted or cut answer."""
    path, gate = gated_model(
        tmp_path,
        f"""
        class Model:
            inputs = {{"x": ("FP32", (2,))}}
            outputs = {{"wrong": ("FP32", (2,))}}
            def __call__(self, x):
                GATE.enter(len(x))
                return {RESULTS[kind]} if (x == 13).any() else x
        """,
    )
    with running_server(local_settings({"m": path})) as server:

        def ask(value: float) -> bytes:
            return infer("m", {"x": np.full((1, 2), value, np.float32)})

        answers = together(server, gate, "m", ask(0), [ask(1), ask(13), ask(2)])
        assert [answer.status for answer in answers] == [500] * 3
        for answer in answers:
            assert answer.json()["reason"] == "model_failed"
            count = {"one less": 2, "thirty times": 90, "none": 0}[kind]
            assert f'"wrong": the model returned {count} rows for 3' in answer.json()["error"]
        (later,) = together(server, gate, "m", ask(0), [ask(5)])
        assert later.tensors()["wrong"].tolist() == [[5, 5]]
