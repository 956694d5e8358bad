"""Case 32: shapes with a zero, and no inputs at all, are refused by name: no row could be answered. Never a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config.settings import ModelSettings
from shoal.testing.company import together
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, get, infer, json_infer, post
from shoal.testing.server import local_settings, running_server

import numpy as np  # isort: skip


def empty(shape: list[int], binary: bool, name: str = "x") -> bytes:
    """A request with one empty tensor."""
    entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": shape}
    entry |= {"parameters": {"binary_data_size": 0}} if binary else {"data": []}
    head = json.dumps({"inputs": [entry]}).encode()
    return post(f"/v2/models/{'digits' if name == 'image' else 'm'}/infer", head, Inference_Header_Content_Length=len(head))


@pytest.mark.parametrize("shape", [[0], [2, 0], [0, 4], [0, 0], [0, 4, 1], []])
@pytest.mark.parametrize("binary", [True, False])
def test_zero_dimensions(tmp_path: Path, shape: list[int], binary: bool) -> None:
    """400 that names the input; the neighbours in the queue are answered."""
    path, gate = gated(tmp_path, columns=-1)
    with running_server(local_settings({"m": path})) as server:
        good = infer("m", {"x": np.ones((2, 4), np.float32)})
        before, refused, after = together(server, gate, "m", good, [good, empty(shape, binary), good], refused={1})
        assert (refused.status, refused.json()["reason"]) == (400, "bad_request")
        assert '"x"' in refused.json()["error"]
        assert before.tensors()["y"].shape == after.tensors()["y"].shape == (2, 4)


@pytest.mark.parametrize("shape", [[0], [2, 0], [0, 1, 8, 8], [1, 0, 8, 8], [1, 1, 8, 0]])
def test_zero_dimensions_for_onnx(shape: list[int]) -> None:
    """The same in front of ONNX Runtime."""
    with running_server(local_settings({"digits": ModelSettings(path="digits")})) as server, RawClient(server.port) as client:
        for binary in (True, False):
            assert client.ask(empty(shape, binary, "image")).status == 400
        assert client.ask(infer("digits", {"image": np.zeros((1, 1, 8, 8), np.float32)})).tensors()["logits"].shape == (1, 10)


def test_no_inputs(tmp_path: Path) -> None:
    """An empty list of inputs, and none at all."""
    path, gate = gated(tmp_path)
    gate.open()
    with running_server(local_settings({"m": path})) as server, RawClient(server.port) as client:
        for body in (b'{"inputs": []}', b"{}", b""):
            answer = client.ask(post("/v2/models/m/infer", body))
            assert (answer.status, answer.json()["reason"]) == (400, "bad_request")
        assert client.ask(json_infer("m", {"x": ("FP32", [1, 4], [1, 2, 3, 4])})).status == 200
        assert client.ask(get("/v2/health/live")).status == 200
