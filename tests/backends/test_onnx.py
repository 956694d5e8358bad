"""ONNX models: what their description says, which can be batched, and how values travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from shoal.backends.onnx_load import open_onnx, session_options
from shoal.datatypes import DATATYPES, TensorSpec
from shoal.errors import BadRequest, ConfigError

F = TensorProto.FLOAT
DATATYPE_NAMES = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "STRING": "BYTES",
}


@pytest.mark.parametrize("kind", DATATYPE_NAMES)
def test_every_datatype_goes_in_and_comes_out(onnx_files: Any, kind: str) -> None:
    """All 14 datatypes of the protocol are described by their name and pass through a model bit for bit."""
    backend = open_onnx(onnx_files.one("Identity", getattr(TensorProto, kind), ["batch", 4]))
    name = DATATYPE_NAMES[kind]
    assert backend.spec.inputs == (TensorSpec("x", name, (-1, 4)),)
    assert backend.spec.outputs == (TensorSpec("y", name, (-1, 4)),)
    if name == "BYTES":
        rows = np.array([[b"", b"a\x00b\x00", "é".encode(), b"x"]], dtype=object)
    else:
        dtype = DATATYPES[name].numpy
        rows = (
            np.frombuffer(bytes(range(4 * dtype.itemsize)), dtype=dtype).reshape(1, 4)
            if name != "BOOL"
            else np.eye(1, 4, dtype=bool)
        )
    (got,) = backend.run([rows])
    assert got.dtype == rows.dtype
    assert got.tolist() == rows.tolist()


def test_bf16_is_computed_by_the_runtime(onnx_files: Any) -> None:
    """A cast inside the model sees the BF16 values that the bits mean: 0x3FC0 is 1.5, and 2.5 comes back as 0x4020."""
    nodes = [
        helper.make_node("Cast", ["b"], ["f"], to=F),
        helper.make_node("Cast", ["g"], ["c"], to=TensorProto.BFLOAT16),
    ]
    inputs = {"b": (TensorProto.BFLOAT16, ["n"]), "g": (F, ["n"])}
    outputs = {"f": (F, ["n"]), "c": (TensorProto.BFLOAT16, ["n"])}
    backend = open_onnx(onnx_files.build(nodes, inputs, outputs))
    floats, bits = backend.run([np.array([0x3FC0, 0xBF80], np.uint16), np.array([2.5, -0.0], np.float32)])
    assert floats.tolist() == [1.5, -1.0]
    assert bits.tolist() == [0x4020, 0x8000]


def test_bytes_that_are_no_text_are_the_clients_fault(onnx_files: Any) -> None:
    """ONNX strings are text: other bytes raise BadRequest naming the input, and the next run works."""
    backend = open_onnx(onnx_files.one("Identity", TensorProto.STRING, ["batch", 1]))
    with pytest.raises(BadRequest, match=r"input 'x'.*UTF-8"):
        backend.run([np.array([[b"\xff\xfe"]], dtype=object)])
    assert backend.run([np.array([[b"ok"]], dtype=object)])[0].tolist() == [[b"ok"]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ({"x": ["batch", 4]}, {"y": ["batch", 4]}, None),
        ({"x": ["batch", "length"]}, {"y": ["n", "m"]}, None),
        ({"x": [1, 4]}, {"y": [1, 4]}, "input 'x' has the fixed first dimension 1"),
        ({"x": [8, 4]}, {"y": ["batch", 4]}, "input 'x' has the fixed first dimension 8"),
        ({"x": []}, {"y": []}, "input 'x' is a scalar"),
    ],
)
def test_the_batch_axis_is_found_or_refused_by_name(onnx_files: Any, inputs: Any, outputs: Any, reason: str | None) -> None:
    """Batchable if and only if the first dimension of everything is variable; otherwise the tensor at fault is named."""
    as_floats = [{name: (F, shape) for name, shape in side.items()} for side in (inputs, outputs)]
    spec = open_onnx(onnx_files.build([helper.make_node("Relu", ["x"], ["y"])], *as_floats)).spec
    assert spec.batchable is (reason is None)
    assert spec.unbatchable_reason is None if reason is None else spec.unbatchable_reason.startswith(reason)


def test_an_output_without_a_batch_axis_is_named(onnx_files: Any) -> None:
    """Inputs may vary while an output is a mean over everything: that output is named."""
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0)]
    path = onnx_files.build(nodes, {"x": (F, ["batch", 4])}, {"y": (F, ["batch", 4]), "mean": (F, [])})
    spec = open_onnx(path).spec
    assert not spec.batchable
    assert "output 'mean' is a scalar" in str(spec.unbatchable_reason)


def test_an_output_that_loses_its_batch_axis_inside_the_graph_is_found(onnx_files: Any) -> None:
    """Declared variable, but the runtime's own shape inference knows better: a Reshape to one row."""
    node, floats = helper.make_node("Reshape", ["x", "shape"], ["y"]), (F, ["batch", 4])
    spec = open_onnx(onnx_files.build([node], {"x": floats}, {"y": floats}, {"shape": np.array([1, 4])})).spec
    assert str(spec.unbatchable_reason).startswith("output 'y' has the fixed first dimension 1")


def test_a_fixed_model_still_runs_whole(onnx_files: Any) -> None:
    """Without a batch axis the whole shape is kept in the description, and the model runs."""
    backend = open_onnx(onnx_files.one(shape=[1, 4]))
    assert backend.spec.inputs[0].shape == (1, 4)
    assert backend.run([np.array([[-1, 2, -3, 4]], np.float32)])[0].tolist() == [[0, 2, 0, 4]]


def test_constants_of_the_graph_are_no_inputs_and_constant_models_do_not_batch(onnx_files: Any) -> None:
    """A model without inputs is described as such."""
    node = helper.make_node("Identity", ["w"], ["y"])
    spec = open_onnx(onnx_files.build([node], {}, {"y": (F, [2])}, {"w": np.ones(2, np.float32)})).spec
    assert spec.inputs == ()
    assert spec.unbatchable_reason == "the model has no inputs"


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_rows_and_no_elements_do_not_hurt(onnx_files: Any, shape: tuple[int, ...]) -> None:
    """Case 32: empty tensors come back empty, and the session lives on."""
    backend = open_onnx(onnx_files.one(shape=["batch", "length"]))
    assert backend.run([np.empty(shape, np.float32)])[0].shape == shape
    assert backend.run([np.full((1, 2), -1, np.float32)])[0].tolist() == [[0, 0]]


def test_a_failing_run_leaves_the_session_usable(onnx_files: Any) -> None:
    """The runtime's own exception passes through; the next run is right."""
    backend = open_onnx(onnx_files.one())
    with pytest.raises(Exception, match="invalid dimensions"):
        backend.run([np.ones((2, 5), np.float32)])
    assert backend.run([np.ones((2, 4), np.float32)])[0].tolist() == [[1] * 4] * 2


def test_session_options_are_those_stated() -> None:
    """Thread counts as asked, one inter-op thread, no spinning unless asked, arena on, patterns per shape off."""
    options = session_options(3)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (True, False)
    for scope in ("intra_op", "inter_op"):
        assert options.get_session_config_entry(f"session.{scope}.allow_spinning") == "0"
        assert session_options(1, spinning=True).get_session_config_entry(f"session.{scope}.allow_spinning") == "1"


def test_instances_share_a_session_only_without_a_pool(onnx_files: Any) -> None:
    """One thread each: the same session. Two threads each: sessions of their own, so that the budget holds per instance."""
    path = onnx_files.one()
    for threads, shared in ((1, True), (2, False)):
        backend = open_onnx(path, threads=threads)
        assert (backend.clone()._session is backend._session) is shared


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_sessions_start_no_more_threads_than_their_budget(onnx_files: Any) -> None:
    """Case 16: `threads` counts the caller, so a session of n threads adds n - 1 to the process, and one of 1 adds none."""
    path = onnx_files.one()
    before = _threads()
    one = open_onnx(path, threads=1)
    one.run([np.ones((1, 4), np.float32)])
    assert _threads() == before
    two = open_onnx(path, threads=2)
    two.run([np.ones((1, 4), np.float32)])
    assert _threads() == before + 1


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads memory use from /proc")
def test_memory_stays_level_while_shapes_keep_changing(onnx_files: Any) -> None:
    """Case 30: after one round over all shapes, resident memory drifts by less than 5 % over many more."""
    node = helper.make_node("Softmax", ["x"], ["y"])
    shape = ["batch", "length", 16]
    backend = open_onnx(onnx_files.build([node], {"x": (F, shape)}, {"y": (F, shape)}))
    lengths = range(8, 513, 24)

    def turn() -> int:
        for rows in (16, 7, 7, 1, 13):
            for length in lengths:
                backend.run([np.zeros((rows, length, 16), np.float32)])
        return int(Path("/proc/self/statm").read_text().split()[1])

    turn()
    settled = turn()
    assert max(turn() for _ in range(10)) < settled * 1.05


def test_labels_come_from_the_files_metadata(onnx_files: Any) -> None:
    """`shoal.labels` in the metadata becomes the description's labels."""
    node, floats = helper.make_node("Relu", ["x"], ["y"]), (F, ["batch", 2])
    path = onnx_files.build([node], {"x": floats}, {"y": floats}, metadata={"shoal.labels": '{"y": ["cat", "dog"]}'})
    assert open_onnx(path).spec.labels == {"y": ("cat", "dog")}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"y": 3}',
        '{"y": "abc"}',
        '{"y": [null, 1]}',
        '{"y": ["\\ud800"]}',
        '{"z": ["a"]}',
    ],
)
def test_wrong_labels_are_refused(onnx_files: Any, text: str) -> None:
    """Labels that are no JSON, of the wrong form, or for an output that is not there."""
    node, floats = helper.make_node("Relu", ["x"], ["y"]), (F, ["batch", 2])
    path = onnx_files.build([node], {"x": floats}, {"y": floats}, metadata={"shoal.labels": text})
    with pytest.raises(ConfigError, match=r"shoal\.labels"):
        open_onnx(path)


def test_closed_means_closed(onnx_files: Any) -> None:
    """After `close` a run raises instead of using freed memory; closing twice is harmless."""
    backend = open_onnx(onnx_files.one())
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.run([np.ones((1, 4), np.float32)])
