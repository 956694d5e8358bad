"""The models that the benchmarks serve, made on the spot: small enough to show the server, or heavy enough to show batching.

All have one FP32 input `x` and one FP32 output `y`, a free batch axis, opset 17. Weights come from a fixed seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 9

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BenchModel:
    """A model file, one row to send to it and the answer to expect."""

    name: str
    path: Path
    row: Array
    answer: Array

    @property
    def row_items(self) -> int:
        """Numbers in one row."""
        return int(self.row.size)


def make_tiny(folder: Path) -> BenchModel:
    """64 numbers in (256 bytes), 10 out, one multiplication: nearly all the time is the server's."""
    return _dense_model(folder, "tiny", (64, 10))


def make_mlp(folder: Path) -> BenchModel:
    """1024 → 1024 → 1024 → 10 with ReLU between: a row costs 20 µs in a good batch and 90 µs alone."""
    return _dense_model(folder, "mlp", (1024, 1024, 1024, 10))


def make_big(folder: Path) -> BenchModel:
    """150,528 numbers in (602,112 bytes, a colour picture of 224 by 224), their mean out: the time is that of moving bytes."""
    items = 224 * 224 * 3
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=1)
    return _save(folder, "big", [node], [], items, 1)


def _dense_model(folder: Path, name: str, widths: tuple[int, ...]) -> BenchModel:
    random = np.random.default_rng(7)
    nodes, weights, value = [], [], "x"
    last = len(widths) - 2
    for layer, (wide_in, wide_out) in enumerate(pairwise(widths)):
        # Scaled so that values neither grow nor fade from layer to layer: denormal numbers would be slow.
        array = random.normal(0.0, (2.0 / wide_in) ** 0.5, (wide_in, wide_out)).astype(np.float32)
        weights.append(numpy_helper.from_array(array, f"w{layer}"))
        result = "y" if layer == last else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [result]))
        if layer != last:
            nodes.append(helper.make_node("Relu", [result], [f"r{layer}"]))
            value = f"r{layer}"
    return _save(folder, name, nodes, weights, widths[0], widths[-1])


def _save(folder: Path, name: str, nodes: list[Any], weights: list[Any], items_in: int, items_out: int) -> BenchModel:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", items_in])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", items_out])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    row = np.random.default_rng(11).normal(0.0, 1.0, items_in).astype(np.float32)
    return BenchModel(name, path, row, _expected(path, row))


def _expected(path: Path, row: Array) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"x": row[None]})
    result: Array = answer[0]
    return result
