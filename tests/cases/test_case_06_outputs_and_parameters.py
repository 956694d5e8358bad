"""Case 6: in one batch, each gets the outputs that it asked for and its own parameters back, and nothing of its neighbours'."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.testing.company import together
from shoal.testing.models import gated_model
from shoal.testing.raw_http import infer
from shoal.testing.server import local_settings, running_server

SOURCE = """
class Model:
    inputs = {"x": ("FP32", (2,))}
    outputs = {"labels": ("INT32", (1,)), "scores": ("FP32", (2,)), "seen": ("BYTES", (1,))}
    echo_parameters = True
    def __call__(self, x, parameters):
        GATE.enter(len(x))
        seen = np.array([[str(sorted(row.items()))] for row in parameters], dtype=object)
        return {"labels": x.argmax(axis=1, keepdims=True).astype("int32"), "scores": x, "seen": seen}
"""


def ask(value: float, outputs: list[str], parameters: dict[str, object]) -> bytes:
    """One row, the outputs wanted of it (as JSON), and custom parameters."""
    fields = {"outputs": [{"name": name} for name in outputs], "parameters": parameters}
    return infer("m", {"x": np.array([[0, value]], np.float32)}, fields)


def test_in_company_as_alone(tmp_path: Path) -> None:
    """A wants labels, B scores, C both in another order, D comes with id = "123": each is answered as it is alone."""
    path, gate = gated_model(tmp_path, SOURCE)
    with running_server(local_settings({"m": path})) as server:
        requests = [
            ask(1, ["labels"], {}),
            ask(-2, ["scores"], {}),
            ask(3, ["scores", "labels"], {"a": 1}),
            ask(4, ["seen"], {"id": "123"}),
            ask(5, ["seen"], {"id": 123, "flag": True}),
        ]
        first = ask(0, [], {})
        company = together(server, gate, "m", first, requests)
        assert gate.notes == [1, 5]
        alone = [together(server, gate, "m", first, [request])[0] for request in requests]
        for answer, solo in zip(company, alone, strict=True):
            assert answer.body == solo.body
        told = [{output["name"]: output["data"] for output in answer.json()["outputs"]} for answer in company]
        assert told == [
            {"labels": [1]},
            {"scores": [0.0, -2.0]},
            {"scores": [0.0, 3.0], "labels": [1]},
            {"seen": ["[('id', '123')]"]},
            {"seen": ["[('flag', True), ('id', 123)]"]},
        ]
        assert [output["name"] for output in company[2].json()["outputs"]] == ["scores", "labels"]
        assert [answer.json().get("parameters") for answer in company] == [
            None,
            None,
            {"a": 1},
            {"id": "123"},
            {"id": 123, "flag": True},
        ]
