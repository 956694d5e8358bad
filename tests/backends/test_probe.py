"""The load-time probe: what it lets through, what it refuses and how it says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from shoal.backends.base import Array
from shoal.backends.onnx_load import open_onnx
from shoal.backends.probe import ProbeReport, made_up_rows, probe, require_batchable, row_difference
from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import ConfigError

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 4))


class Fake:
    """A backend made of a function from arrays to arrays; it counts its runs and the rows of each."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[TensorSpec] = (X,),
        outputs: Sequence[TensorSpec] = (Y,),
        **described: Any,
    ) -> None:
        self.spec = ModelSpec("fake", tuple(inputs), tuple(outputs), **described)
        self.function = function
        self.rows: list[int] = []
        self.parameters: list[Any] = []

    def run(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Sequence[Array]:
        self.rows.append(inputs[0].shape[0] if inputs[0].ndim else 0)
        self.parameters.append(parameters)
        result = self.function(*inputs)
        return result if isinstance(result, tuple) else (result,)

    def clone(self) -> Fake:
        return self

    def close(self) -> None:
        pass


def test_a_good_model_passes_at_1_2_3_and_max() -> None:
    """All sizes are run and timed, and nothing is said against it."""
    backend = Fake(lambda x: x * 2)
    report = probe(backend, 16)
    assert (report.batchable, report.reason, report.deterministic, report.warnings) == (True, None, True, ())
    assert set(report.timings_ns) == set(backend.rows) == {1, 2, 3, 16}
    require_batchable(report, "good", 16)


def test_times_come_from_the_clock_and_the_first_touch_does_not_count() -> None:
    """With a clock that counts up by 1 ms per look every run takes 1 ms, and fast sizes are run twice."""
    ticks = iter(range(0, 10**12, 10**6))
    backend = Fake(lambda x: x + 1)
    report = probe(backend, 3, clock_ns=lambda: next(ticks))
    assert report.timings_ns == {1: 10**6, 2: 10**6, 3: 10**6}
    assert backend.rows.count(2) == 2
    slow = iter(range(0, 10**15, 10**8))
    backend = Fake(lambda x: x + 1)
    probe(backend, 3, clock_ns=lambda: next(slow))
    assert backend.rows.count(2) == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[:-1] if len(x) > 1 else x, "output 'y' has 1 rows for a batch of 2"),
        (lambda x: np.repeat(x, 30, axis=0), "output 'y' has 30 rows for a batch of 1"),
        (lambda x: x[:0], "output 'y' has 0 rows for a batch of 1"),
        (lambda x: x.sum(), "output 'y' has no rows"),
        (lambda x: x if len(x) < 16 else x[:15], "output 'y' has 15 rows for a batch of 16"),
        (lambda x: (x, x), "it returned 2 outputs, declared are 1"),
        (lambda x: x / x.max(), "output 'y': row 1 of a batch of 2 is not the same row alone"),
        (lambda x: np.roll(x, 1, axis=0), "output 'y': row 0 of a batch of 2 is not the same row alone"),
        (lambda x: x - x.mean(axis=0), "output 'y': row 0 of a batch of 2"),
        (lambda x: np.vstack([x[:15], x[15:] * 0]), "output 'y': row 15 of a batch of 16"),
        (lambda x: x[:, : len(x)], "shape [2] instead of [1]"),
        (lambda x: x.reshape(1, 4), "it raised on 2 rows, though not on 1: ValueError"),
    ],
)
def test_wrong_rows_are_refused_by_name(function: Callable[..., Any], reason: str) -> None:
    """Case 5 and its kin: missing, surplus and no rows, blended rows, shifted rows; with batching on loading fails and says why."""
    report = probe(Fake(function), 16)
    assert not report.batchable
    assert reason in str(report.reason)
    with pytest.raises(ConfigError, match="max_batch_size = 1") as caught:
        require_batchable(report, "bad", 16)
    assert reason in caught.value.message
    assert "'bad'" in caught.value.message


def test_of_several_outputs_the_wrong_one_is_named() -> None:
    """The second output loses a row."""
    outputs = (Y, TensorSpec("z", "INT64", (-1,)))
    report = probe(Fake(lambda x: (x, np.zeros(max(1, len(x) - 1), np.int64)), outputs=outputs), 4)
    assert report.reason == "output 'z' has 1 rows for a batch of 2"


def test_one_row_at_a_time_is_not_refused() -> None:
    """With max_batch_size = 1 a model that blends rows is only run alone, so nothing is compared and nothing refused."""
    backend = Fake(lambda x: x / x.max())
    report = probe(backend, 1)
    assert report.batchable
    assert set(backend.rows) == {1}
    require_batchable(ProbeReport(False, "whatever"), "bad", 1)


def test_a_dynamic_onnx_graph_with_a_fixed_reshape_is_found_out(onnx_files: Any) -> None:
    """The batch axis is declared variable, but a Reshape inside knows one row only: found when 2 rows are run."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["one"]), helper.make_node("Add", ["x", "one"], ["y"])]
    floats = (TensorProto.FLOAT, ["batch", 4])
    backend = open_onnx(onnx_files.build(nodes, {"x": floats}, {"y": floats}, {"shape": np.array([1, 4])}))
    report = probe(backend, 8)
    assert backend.spec.batchable
    assert str(report.reason).startswith("it raised on 2 rows, though not on 1")


def test_an_onnx_graph_that_blends_rows_is_found_out(onnx_files: Any) -> None:
    """Dynamic quantization computes one scale over the whole batch: a row's answer depends on its company."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    floats = (TensorProto.FLOAT, ["batch", 4])
    report = probe(open_onnx(onnx_files.build(nodes, {"x": floats}, {"y": floats})), 8)
    assert not report.batchable
    assert "not the same row alone" in str(report.reason)


def test_models_that_answer_differently_each_time_are_not_compared() -> None:
    """Noise is no fault of batching: rows are counted, not compared, and a warning says so. Wrong counts are still refused."""
    random = np.random.default_rng(1)
    report = probe(Fake(lambda x: x + random.random(x.shape).astype(np.float32)), 8)
    assert (report.batchable, report.deterministic) == (True, False)
    assert "two answers" in report.warnings[0]
    report = probe(Fake(lambda x: random.random((1, 4)).astype(np.float32)), 8)
    assert report.reason == "output 'y' has 1 rows for a batch of 2"


def test_models_that_raise_on_made_up_values_are_let_through_with_a_warning() -> None:
    """Nobody knows what they would do with real values."""

    def particular(x: Array) -> Array:
        raise KeyError("not a word that I know")

    report = probe(Fake(particular), 8)
    assert report.batchable
    assert report.timings_ns == {}
    assert "KeyError: 'not a word that I know'" in report.warnings[0]


def test_variable_dimensions_are_tried_until_one_is_taken() -> None:
    """8 first; a model that wants at least 32 is probed with 32."""
    seen: list[int] = []

    def wants_32(x: Array) -> Array:
        seen.append(x.shape[1])
        if x.shape[1] < 32:
            raise ValueError("too small")
        return x

    spec = TensorSpec("x", "FP32", (-1, -1))
    report = probe(Fake(wants_32, inputs=(spec,), outputs=(spec,)), 4)
    assert (report.batchable, report.warnings) == (True, ())
    assert seen[:3] == [8, 2, 32]
    assert set(seen[3:]) == {32}


def test_large_rows_bound_the_largest_batch() -> None:
    """16 bytes a row and 160 bytes allowed: 10 rows are run, and a warning says that 1000 were not."""
    backend = Fake(lambda x: x)
    report = probe(backend, 1000, max_input_bytes=160)
    assert max(backend.rows) == 10
    assert "10 rows only, not 1000" in report.warnings[0]


def test_in_place_changes_do_not_mislead() -> None:
    """A model that overwrites its inputs, and hands out a buffer that it uses again, is judged by what it computes."""
    kept = np.zeros((64, 4), np.float32)

    def careless(x: Array) -> Array:
        x *= 3
        kept[: len(x)] = x
        return kept[: len(x)]

    assert probe(Fake(careless), 64).reason is None


def test_models_without_a_batch_axis_are_only_warmed_up() -> None:
    """One run with the whole shape; the description's reason is repeated, and no rows are counted."""
    whole = TensorSpec("x", "FP32", (1, 3, -1))
    backend = Fake(lambda x: x, inputs=(whole,), outputs=(whole,), batchable=False, unbatchable_reason="fixed")
    report = probe(backend, 8)
    assert (report.batchable, report.reason, report.warnings) == (False, "fixed", ())
    assert set(backend.rows) == {1}
    scalar = TensorSpec("x", "FP32", ())
    assert probe(Fake(lambda x: x, inputs=(scalar,), outputs=(scalar,), batchable=False), 8).warnings == ()


def test_parameters_are_passed_only_to_models_that_use_them() -> None:
    """One empty mapping per row."""
    backend = Fake(lambda x: x, uses_parameters=True)
    probe(backend, 3)
    assert all(parameters == [{}] * rows for parameters, rows in zip(backend.parameters, backend.rows, strict=True))
    backend = Fake(lambda x: x)
    probe(backend, 3)
    assert set(backend.parameters) == {None}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DATATYPES)), st.integers(1, 5), st.integers(0, 40), st.sampled_from([(), (3,), (2, -1)]))
def test_made_up_rows_do_not_depend_on_their_company(datatype: str, rows: int, first: int, shape: tuple[int, ...]) -> None:
    """Row k is the same alone and in any batch; dtype and shape are those of the spec."""
    tensor = TensorSpec("x", datatype, (-1, *shape))
    together = made_up_rows(tensor, rows, first=first, seed=3, variable_dim=2)
    assert together.dtype == DATATYPES[datatype].numpy
    assert together.shape == (rows, *(2 if dim == -1 else dim for dim in shape))
    for row in range(rows):
        assert made_up_rows(tensor, 1, first=first + row, seed=3, variable_dim=2).tolist() == together[row : row + 1].tolist()


@pytest.mark.parametrize(
    ("datatype", "one", "two", "same"),
    [
        ("FP32", [1.0, 2.0], [1.0, 2.0001], True),
        ("FP32", [1.0, 2.0], [1.0, 2.001], False),
        ("FP32", [1e-6, 100.0], [2e-6, 100.0], True),
        ("FP32", [0.0], [2e-5], False),
        ("FP64", [1.0], [1.0 + 1e-8], False),
        ("FP16", [1.0], [1.005], True),
        ("FP32", [np.nan, np.inf], [np.nan, np.inf], True),
        ("FP32", [np.inf], [-np.inf], False),
        ("FP32", [1.0], [np.nan], False),
        ("FP32", [np.nan], [1.0], False),
        ("BF16", [0x3F80], [0x3F81], True),
        ("BF16", [0x3F80], [0x4000], False),
        ("INT64", [1, 2], [1, 3], False),
        ("BYTES", [b"a"], [b"b"], False),
        ("BYTES", [b"a"], [b"a"], True),
    ],
)
def test_rows_agree_within_the_stated_tolerance(datatype: str, one: list[Any], two: list[Any], same: bool) -> None:
    """Floats relative to the row's largest magnitude; NaN equals NaN; everything else exactly."""
    dtype = DATATYPES[datatype].numpy
    assert (row_difference(np.array(one, dtype), np.array(two, dtype), datatype) is None) is same
