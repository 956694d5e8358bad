"""Case 34: values that JSON has no word for. Stated policy: strings in JSON, bit for bit in binary, lengths never change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.testing.models import python_model
from shoal.testing.raw_http import RawClient, infer, json_infer
from shoal.testing.server import local_settings, running_server

VALUES = {
    "FP32": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 0.1, 3.4028235e38], np.float32),
    "FP64": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, 0.1, 1.7976931348623157e308], np.float64),
    "FP16": np.array([np.nan, np.inf, -np.inf, -0.0, 6e-8, 0.1, 65504], np.float16),
}


@pytest.mark.parametrize("datatype", VALUES)
def test_policy(tmp_path: Path, datatype: str) -> None:
    """In and out, in JSON and in binary, the seven values come back as seven values, -0.0 and denormals exactly."""
    path = python_model(
        tmp_path,
        f"""
        class Model:
            inputs = {{"x": ("{datatype}", (7,))}}
            outputs = {{"y": ("{datatype}", (7,))}}
            def __call__(self, x):
                return x
        """,
    )
    values = VALUES[datatype].reshape(1, 7)
    with running_server(local_settings({"m": path})) as server, RawClient(server.port) as client:
        binary = client.ask(infer("m", {"x": values}))
        assert binary.tensors()["y"].tobytes() == values.tobytes()
        answer = client.ask(infer("m", {"x": values}, {"parameters": {}}))

        def refuse(word: str) -> float:
            raise AssertionError(f"{word} is no JSON")

        data = json.loads(answer.body, parse_constant=refuse)["outputs"][0]["data"]
        assert len(data) == 7
        assert data[:3] == ["NaN", "Infinity", "-Infinity"]
        assert np.array(data[3:], values.dtype).tobytes() == values[0, 3:].tobytes()
        back = client.ask(json_infer("m", {"x": (datatype, [1, 7], data)}, {"parameters": {"binary_data_output": True}}))
        got = back.tensors()["y"]
        assert np.isnan(got[0, 0]) and got[0, 1:].tobytes() == values[0, 1:].tobytes()
        refused = client.ask(json_infer("m", {"x": (datatype, [1, 7], [1, 2, 3, 4, 5, 6, "nan"])}))
        assert refused.status == 400 and "data[6]" in refused.json()["error"]
