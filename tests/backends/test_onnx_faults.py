"""Every way in which a model file can be wrong: one sentence that says what to do, as ConfigError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shoal.backends.onnx_load import open_onnx
from shoal.errors import ConfigError

F = TensorProto.FLOAT


def refusal(path: str | Path, **options: Any) -> str:
    """The message with which the file is refused; no chained traceback belongs to it."""
    with pytest.raises(ConfigError) as caught:
        open_onnx(path, **options)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    message = caught.value.message
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ".cc:" not in message
    return message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """A path to nothing and a path to a folder are told apart."""
    assert "no such file" in refusal(tmp_path / "none.onnx")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"hello, this is no model" * 20, "not an ONNX model"),
        (b"\x08\x08", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    ],
)
def test_files_that_hold_no_model(tmp_path: Path, content: bytes, says: str) -> None:
    """Empty, text, an empty protobuf, and the pointer that a clone without LFS leaves."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert says in refusal(path)


def test_a_truncated_file(onnx_files: Any) -> None:
    """The first half of a real model."""
    node, constants = helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": np.ones((4, 4), np.float32)}
    path = Path(onnx_files.build([node], {"x": (F, ["b", 4])}, {"y": (F, ["b", 4])}, constants))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "cut off" in refusal(path)


def test_external_data_missing_or_short(tmp_path: Path) -> None:
    """The weights' own file gone, or too short, is said, and that it belongs beside the model."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", F, ["b", 64])],
        [helper.make_tensor_value_info("y", F, ["b", 64])],
        [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    path, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    onnx.save_model(model, path, save_as_external_data=True, location=weights.name, size_threshold=0)
    assert open_onnx(path).run([np.ones((1, 64), np.float32)])[0][0, 0] == 64
    weights.write_bytes(weights.read_bytes()[:100])
    assert "copy it beside the model" in refusal(path)
    weights.unlink()
    assert "copy it beside the model" in refusal(path)


def test_unknown_operators_and_newer_formats(onnx_files: Any) -> None:
    """An operator nobody knows, an opset and an IR version of the future."""
    assert "operator" in refusal(onnx_files.one("Frobnicate"))
    node, floats = helper.make_node("Relu", ["x"], ["y"]), {"x": (F, ["b"])}
    assert "newer than" in refusal(onnx_files.build([node], floats, {"y": (F, ["b"])}, opset=99))
    path = Path(onnx_files.one())
    model = onnx.load(path)
    model.ir_version = 99
    path.write_bytes(model.SerializeToString())
    assert "newer than" in refusal(path)


def test_outputs_that_no_protocol_carries(tmp_path: Path) -> None:
    """A sequence of maps, as classifiers are often exported, is named with the way out."""
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(F, [])))
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        "g",
        [helper.make_tensor_value_info("x", F, ["b", 2])],
        [onnx.ValueInfoProto(name="y", type=kind)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)])
    model.ir_version = 8
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    message = refusal(path)
    assert "output 'y'" in message
    assert "zipmap" in message


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", ["seq", "optional"])
def test_values_that_are_no_tensors(tmp_path: Path, side: str, kind: str) -> None:
    """Sequences and optional values, in or out, are refused with their name and type."""
    tensor = helper.make_tensor_type_proto(F, ["b", 2])
    if kind == "seq":
        wrapped, operator = helper.make_sequence_type_proto(tensor), "SequenceConstruct" if side == "output" else "SequenceLength"
    else:
        wrapped, operator = helper.make_optional_type_proto(tensor), "Optional" if side == "output" else "OptionalGetElement"
    node = helper.make_node(operator, ["x"], ["y"])
    count = helper.make_tensor_type_proto(TensorProto.INT64, []) if operator == "SequenceLength" else tensor
    plain = helper.make_value_info("x" if side == "output" else "y", count)
    odd = helper.make_value_info("y" if side == "output" else "x", wrapped)
    ends = ([plain], [odd]) if side == "output" else ([odd], [plain])
    model = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert f"{side} '{odd.name}' is a {kind}(tensor(float))" in refusal(path)


def test_a_model_without_outputs(onnx_files: Any) -> None:
    """There would be nothing to answer with."""
    path = onnx_files.build([helper.make_node("Relu", ["x"], ["y"])], {"x": (F, ["batch", 2])}, {})
    assert "no outputs" in refusal(path)


def test_a_datatype_that_the_runtime_lacks(onnx_files: Any) -> None:
    """Complex numbers are refused with the type in the message."""
    assert "complex64" in refusal(onnx_files.one("Identity", TensorProto.COMPLEX64))


def test_wrong_options_name_themselves(onnx_files: Any) -> None:
    """An execution provider that is not built in lists those that are; threads start at 1."""
    path = onnx_files.one()
    assert "CPUExecutionProvider" in refusal(path, providers=["TPUExecutionProvider"])
    assert "threads must be at least 1" in refusal(path, threads=0)
