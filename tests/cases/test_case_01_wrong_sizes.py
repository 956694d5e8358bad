"""Case 1: a request whose data does not fit its shape never touches its neighbour's rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.testing.company import together
from shoal.testing.models import gated
from shoal.testing.raw_http import infer, json_infer, post
from shoal.testing.server import local_settings, running_server

B = np.arange(5, dtype=np.float32).reshape(1, 5) + 10


def wrong(kind: str, values: int) -> bytes:
    """A request that declares [1,5] and sends `values` floats."""
    floats = np.arange(values, dtype=np.float32)
    if kind == "json":
        return json_infer("m", {"x": ("FP32", [1, 5], floats.tolist())})
    if kind == "raw":
        return post("/v2/models/m/infer", floats.tobytes(), Inference_Header_Content_Length=0)
    announced = {"announced": 4 * values, "hidden": 20}[kind]
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 5], "parameters": {"binary_data_size": announced}}
    head = json.dumps({"inputs": [entry]}).encode()
    return post("/v2/models/m/infer", head + floats.tobytes(), Inference_Header_Content_Length=len(head))


@pytest.mark.parametrize("kind", ["json", "raw", "announced", "hidden"])
@pytest.mark.parametrize("values", [7, 6, 4, 1])
def test_neighbour_is_not_shifted(tmp_path: Path, kind: str, values: int) -> None:
    """A gets 400 before it is queued; B, whether it comes before or after A, gets what it gets alone."""
    path, gate = gated(tmp_path, columns=5)
    with running_server(local_settings({"m": path})) as server:
        good = infer("m", {"x": B})
        (alone,) = together(server, gate, "m", good, [good])
        before, a, after = together(server, gate, "m", good, [good, wrong(kind, values), good], refused={1})
        assert (a.status, a.json()["reason"]) == (400, "bad_request")
        assert '"x"' in a.json()["error"]
        for answer in (alone, before, after):
            assert answer.tensors()["y"].tolist() == (2 * B).tolist()
        assert gate.notes[-1] == [10.0, 10.0]
