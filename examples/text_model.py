"""A little text model for trying out batches of rows of different length: a transformer of two layers with seeded weights.

    python examples/text_model.py                 # writes examples/text_model.onnx
    shoal serve --config examples/text.toml

It understands nothing, but costs what such models cost. `ids` [batch, seq] are token numbers, `mask` [batch, seq] is 1 where there
is a token; `vector` [batch, width] is the mean over the tokens, `scores` [batch, seq] is one number for each of them. Everything
that looks along a row heeds the mask: attention by a large negative bias, the mean by weights. So padding changes no answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LONGEST = 512


class Graph:
    """Collects nodes and constants; every call returns the name of what it made."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.random.normal(0.0, shape[0] ** -0.5, shape))

    def add(self, operator: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def norm(self, x: str, width: int) -> str:
        return self.add("LayerNormalization", x, self.constant(np.ones(width)), self.constant(np.zeros(width)), axis=-1)


def attention(graph: Graph, x: str, bias: str, width: int, heads: int) -> str:
    """Every token looks at the tokens of its row; `bias` [batch, 1, 1, seq] keeps it from looking at padding."""
    split = graph.constant([0, 0, heads, width // heads], np.int64)
    parts = []
    for _ in range(3):
        projected = graph.add("MatMul", x, graph.weight(width, width))
        parts.append(graph.add("Transpose", graph.add("Reshape", projected, split), perm=[0, 2, 1, 3]))
    query, key, value = parts
    products = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 1, 3, 2]))
    scaled = graph.add("Mul", products, graph.constant((width // heads) ** -0.5))
    weights = graph.add("Softmax", graph.add("Add", scaled, bias), axis=-1)
    joined = graph.add("Transpose", graph.add("MatMul", weights, value), perm=[0, 2, 1, 3])
    flat = graph.add("Reshape", joined, graph.constant([0, 0, width], np.int64))
    return graph.add("MatMul", flat, graph.weight(width, width))


def feed_forward(graph: Graph, x: str, width: int) -> str:
    """Each token by itself."""
    inner = graph.add("Relu", graph.add("MatMul", x, graph.weight(width, 4 * width)))
    return graph.add("MatMul", inner, graph.weight(4 * width, width))


def build(*, layers: int = 2, width: int = 128, heads: int = 4, words: int = 2000, seed: int = 0) -> onnx.ModelProto:
    """The model; at most `LONGEST` tokens in a row."""
    graph = Graph(seed)
    length = graph.add("Shape", "ids", start=1, end=2)
    places = graph.add("Slice", graph.weight(LONGEST, width), graph.constant([0], np.int64), length)
    x = graph.add("Add", graph.add("Gather", graph.weight(words, width), "ids"), places)
    mask = graph.add("Cast", "mask", to=TensorProto.FLOAT)
    missing = graph.add("Sub", graph.constant(1.0), mask)
    bias = graph.add("Mul", graph.add("Unsqueeze", missing, graph.constant([1, 2], np.int64)), graph.constant(-1e9))
    for _ in range(layers):
        x = graph.add("Add", x, attention(graph, graph.norm(x, width), bias, width, heads))
        x = graph.add("Add", x, feed_forward(graph, graph.norm(x, width), width))
    x = graph.norm(x, width)
    graph.add("Squeeze", graph.add("MatMul", x, graph.weight(width, 1)), graph.constant([2], np.int64), name="scores")
    weights = graph.add("Unsqueeze", mask, graph.constant([2], np.int64))
    axes = graph.constant([1], np.int64)
    total = graph.add("ReduceSum", graph.add("Mul", x, weights), axes, keepdims=0)
    graph.add("Div", total, graph.add("ReduceSum", weights, axes, keepdims=0), name="vector")
    row = ["batch", "seq"]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "text",
            [helper.make_tensor_value_info(name, TensorProto.INT64, row) for name in ("ids", "mask")],
            [
                helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["batch", width]),
                helper.make_tensor_value_info("scores", TensorProto.FLOAT, row),
            ],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    model.ir_version = 8
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".onnx"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    options.output.write_bytes(build(layers=options.layers, width=options.width).SerializeToString())
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
