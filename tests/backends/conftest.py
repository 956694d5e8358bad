"""Small ONNX models and Python model files, made where a test needs them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str] | None


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, tuple[int, Shape]],
    constants: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    metadata: dict[str, str] | None = None,
) -> onnx.ModelProto:
    """A model of these nodes; shapes are lists of numbers and names."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    if metadata:
        helper.set_model_props(model, metadata)
    return model


class OnnxFiles:
    """Writes models into a folder and returns their paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, model: onnx.ModelProto, name: str = "model.onnx") -> str:
        path = self.folder / name
        path.write_bytes(model.SerializeToString())
        return str(path)

    def one(self, operator: str = "Relu", kind: int = TensorProto.FLOAT, shape: Shape = ("batch", 4), out: Shape = None) -> str:
        """One operator from `x` to `y`."""
        node = helper.make_node(operator, ["x"], ["y"])
        return self.save(make_model([node], {"x": (kind, shape)}, {"y": (kind, out or shape)}))

    def build(self, *arguments: Any, **options: Any) -> str:
        """As `make_model`, written to a file."""
        return self.save(make_model(*arguments, **options))


@pytest.fixture
def onnx_files(tmp_path: Path) -> OnnxFiles:
    """Models written into this test's folder."""
    return OnnxFiles(tmp_path)


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., str]:
    """Writes Python source to `model.py` (numpy is imported as np) and returns the target `…/model.py:name`."""

    def write(source: str, name: str = "Model", file: str = "model.py") -> str:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import numpy as np\n" + textwrap.dedent(source))
        return f"{path}:{name}"

    return write
