"""Case 3 with hooks: of a batch of eight, the one whose decode or encode raises gets its status; the others get their results."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from shoal.testing.company import together
from shoal.testing.gates import Gate
from shoal.testing.models import gated_model, python_model
from shoal.testing.raw_http import RawClient, Response, infer, json_infer
from shoal.testing.server import ThreadedServer, local_settings, running_server

HOOKED = """
class Refusal(Exception):
    def __init__(self, where, status):
        super().__init__(f"{where} refused {status}")
        if status > 0:
            self.http_status = status

class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def decode(self, x):
        if DECODE_REFUSES and (x[0, 0] >= 400 or x[0, 0] < 0):
            raise Refusal("decode", int(x[0, 0]))
        return x
    def __call__(self, x):
        GATE.enter(x[:, 0].tolist())
        return x + 1
    def encode(self, y):
        if y[0, 0] >= 401 or y[0, 0] < 1:
            raise Refusal("encode", int(y[0, 0]) - 1)
        return y * 2
"""

POISONED = """
class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def __call__(self, x):
        GATE.enter(x[:, 0].tolist())
        if (x == 666).any():
            raise ValueError("poison")
        return x + 1
"""

MEMORY = """
class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def __call__(self, x):
        GATE.enter(x[:, 0].tolist())
        if len(x) > 3:
            raise MemoryError("no room")
        return x + 1
"""


def request(value: float) -> bytes:
    """One row."""
    return infer("m", {"x": np.array([[value]], np.float32)})


def eight(server: ThreadedServer, gate: Gate, values: list[float]) -> list[Response]:
    """These requests, in one batch, behind one of 0."""
    return together(server, gate, "m", request(0), [request(value) for value in values])


@pytest.mark.parametrize("where", ["decode", "encode"])
@pytest.mark.parametrize(("marker", "status"), [(400, 400), (422, 422), (503, 503), (-1, 500)])
def test_case_3_only_the_request_whose_hook_raises_fails(tmp_path: Path, where: str, marker: int, status: int) -> None:
    """Whatever the hook raises for item 5, seven are answered, from one run of the model; nothing is run again."""
    path, gate = gated_model(tmp_path, f"DECODE_REFUSES = {where == 'decode'}\n{HOOKED}")
    with running_server(local_settings({"m": path})) as server:
        values = [1.0, 2.0, 3.0, 4.0, float(marker), 6.0, 7.0, 8.0]
        answers = eight(server, gate, values)
        assert [answer.status for answer in answers] == [200] * 4 + [status] + [200] * 3
        assert answers[4].json()["reason"] == "model_failed" and f"{where} refused {marker}" in answers[4].json()["error"]
        for value, answer in zip(values, answers, strict=True):
            if value != marker:
                assert answer.tensors()["y"].tolist() == [[2 * (value + 1)]]
        ran = [value for value in values if where == "encode" or value != marker]
        assert gate.notes == [[0.0], ran]
        stats = server.lane("m").stats
        figures = server.call(lambda: (stats.fail.count, stats.success.count, stats.executions, stats.inferences, stats.reruns))
        assert figures == (1, 8, 2, 1 + len(ran), 0)


def test_a_poisoned_input_takes_a_batch_down_once(tmp_path: Path) -> None:
    """The first time it is found by halving; sent again, the seven others are run together and it alone, and it fails as before."""
    path, gate = gated_model(tmp_path, POISONED)
    with running_server(local_settings({"m": path})) as server:
        for values, runs in (
            ([1.0, 2.0, 3.0, 4.0, 666.0, 6.0, 7.0, 8.0], None),
            ([11.0, 12.0, 666.0, 14.0, 15.0, 16.0, 17.0, 18.0], [[11.0, 12.0, 14.0, 15.0, 16.0, 17.0, 18.0], [666.0]]),
        ):
            before = len(gate.notes) + 1
            answers = eight(server, gate, values)
            for value, answer in zip(values, answers, strict=True):
                if value == 666:
                    assert (answer.status, answer.json()["error"]) == (500, "ValueError: poison")
                else:
                    assert answer.tensors()["y"].tolist() == [[value + 1]]
            if runs is not None:
                assert gate.notes[before:] == runs
        stats = server.lane("m").stats
        assert server.call(lambda: (stats.bisections, stats.ran_alone, stats.fail.count)) == (1, 1, 2)
        assert 0 < server.call(lambda: stats.reruns) <= 6


def test_a_batch_too_large_for_memory_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Eight where three fit: eight answers, and batches of two from then on; the statistics say so."""
    caplog.set_level(logging.WARNING, "shoal.engine")
    path, gate = gated_model(tmp_path, MEMORY)
    with running_server(local_settings({"m": path})) as server:
        values = [float(value) for value in range(1, 9)]
        for _ in range(2):
            before = len(gate.notes) + 1
            answers = eight(server, gate, values)
            assert [answer.tensors()["y"].tolist() for answer in answers] == [[[value + 1]] for value in values]
            sizes = [len(note) for note in gate.notes[before:]]
        assert sizes == [2, 2, 2, 2]
        lane = server.lane("m")
        assert server.call(lambda: (lane.stats.out_of_memory, lane.stats.fail.count, lane.memory_cap_rows)) == (2, 0, 2)
    told = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert told == ["model m: memory did not suffice for 4 rows; batches have at most 2 for now"]


def test_images_are_decoded_and_labels_encoded(tmp_path: Path) -> None:
    """Hooks may change datatypes: texts come in, the model sees numbers, texts go out; parameters reach both hooks."""
    path = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"text": ("BYTES", (1,))}
            outputs = {"label": ("BYTES", (1,))}
            def decode(self, text, parameters):
                return np.array([[len(item) + parameters.get("more", 0)] for item in text[:, 0]], np.float32)
            def __call__(self, text):
                return {"score": text * 10, "rank": [0] * len(text)}
            def encode(self, score, rank, parameters):
                return [[f"{value:g}{parameters.get('unit', '')}"] for value in score[:, 0]]
        """,
    )
    texts = {"text": ("BYTES", [2, 1], ["a", "bcd"])}
    with running_server(local_settings({"m": path})) as server, RawClient(server.port) as client:
        client.send(json_infer("m", texts, {"parameters": {"more": 1, "unit": " pt"}}))
        assert client.response().json()["outputs"][0]["data"] == ["20 pt", "40 pt"]
        client.send(json_infer("m", texts))
        assert client.response().json()["outputs"][0]["data"] == ["10", "30"]
