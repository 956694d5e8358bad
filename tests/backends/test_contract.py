"""Both kinds of backend go through the suite that all backends must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from shoal.backends.base import Backend
from shoal.backends.registry import open_backend
from shoal.testing.backend_contract import BackendContract

CLASS = """
class Model:
    inputs = {"x": ("FP32", (4,)), "ids": ("INT64", (-1,)), "word": ("BYTES", ())}
    outputs = {"sum": ("FP32", (4,)), "count": ("INT64", ()), "upper": ("BYTES", ())}
    labels = {"sum": ("a", "b", "c", "d")}

    def load(self):
        self.ones = np.ones(4, np.float32)

    def __call__(self, x, ids, word, parameters):
        x += 1  # inputs may be changed in place
        return {"upper": [w.upper() for w in word], "sum": x + self.ones, "count": ids.sum(axis=1)}
"""

CARELESS = """
scratch = np.zeros((64, 4), np.float32)

def model(x, y):
    scratch[: len(x)] = x + y
    return scratch[: len(x)], x

model.inputs = {"x": ("FP32", (4,)), "y": ("FP32", (4,))}
model.outputs = {"kept": ("FP32", (4,)), "same": ("FP32", (4,))}
"""


class TestOnnxModels(BackendContract):
    """Sessions with one and with two threads, with one and several inputs, and every way in which values travel."""

    @pytest.fixture(
        autouse=True, params=["digits", "floats", "threads", "several", "BOOL", "INT64", "FLOAT16", "BFLOAT16", "STRING"]
    )
    def chosen(self, request: Any, onnx_files: Any) -> None:
        """The model of this round."""
        kind, self.threads = request.param, 2 if request.param == "threads" else 1
        if kind == "digits":
            self.path = "digits"
        elif kind in ("floats", "threads"):
            weights = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
            node = helper.make_node("MatMul", ["x", "w"], ["y"])
            shapes = {"x": (TensorProto.FLOAT, ["batch", 4])}, {"y": (TensorProto.FLOAT, ["batch", 5])}
            self.path = onnx_files.build([node], *shapes, {"w": weights})
        elif kind == "several":
            nodes = [
                helper.make_node("Add", ["a", "b"], ["sum"]),
                helper.make_node("ArgMax", ["sum"], ["best"], axis=1, keepdims=0),
                helper.make_node("Identity", ["text"], ["same"]),
            ]
            floats, text = (TensorProto.FLOAT, ["n", "length"]), (TensorProto.STRING, ["n", 2])
            inputs = {"a": floats, "text": text, "b": floats}
            outputs = {"same": text, "sum": floats, "best": (TensorProto.INT64, ["n"]), "a_too": floats}
            nodes.append(helper.make_node("Identity", ["a"], ["a_too"]))
            self.path = onnx_files.build(nodes, inputs, outputs)
        else:
            self.path = onnx_files.one("Identity", getattr(TensorProto, kind), ["batch", 3])

    def make(self) -> Backend:
        """A freshly opened session."""
        return open_backend(self.path, threads=self.threads)


class TestPythonModels(BackendContract):
    """A class with state of its own, and a function that shares memory in every wrong way."""

    @pytest.fixture(autouse=True, params=["class", "careless"])
    def chosen(self, request: Any, model_file: Callable[..., str]) -> None:
        """The model of this round."""
        self.kind = request.param
        self.target = model_file(CLASS) if self.kind == "class" else model_file(CARELESS, "model")

    def make(self) -> Backend:
        """A freshly imported model."""
        return open_backend(self.target)

    def test_clones_run_at_the_same_time(self) -> None:
        """As for all; left out for a function with state in its module, which is shared by design and must be thread-safe."""
        if self.kind == "class":
            super().test_clones_run_at_the_same_time()
