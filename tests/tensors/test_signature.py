"""Requests against a model's signature: rows, order and what may batch together; refusals name input, expected and got."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.datatypes import ModelSpec, TensorSpec
from shoal.errors import BadRequest
from shoal.tensors.signature import bind


@dataclass(frozen=True)
class Tensor:
    """A described tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]


TWO = ModelSpec("test", (TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "INT8", (-1, -1, 2))), ())
SINGLE = ModelSpec("test", (TensorSpec("image", "FP32", (-1, 5)),), ())
WHOLE = ModelSpec("test", (TensorSpec("x", "FP32", (2, -1)),), (), batchable=False)


def test_binding_of_two_inputs_in_any_order() -> None:
    """Inputs are found by name; order, row shapes and bytes follow the model, not the request."""
    a, b = Tensor("a", "FP32", (3, 4)), Tensor("b", "INT8", (3, 7, 2))
    binding = bind(TWO, (a, b))
    assert (binding.rows, binding.order, binding.row_shapes, binding.row_bytes) == (3, (0, 1), ((4,), (7, 2)), 16 + 14)
    swapped = bind(TWO, (b, a))
    assert (swapped.order, swapped.signature) == ((1, 0), binding.signature)


def test_bytes_count_nothing() -> None:
    """BYTES rows have no fixed size."""
    spec = ModelSpec("test", (TensorSpec("s", "BYTES", (-1, 3)),), ())
    assert bind(spec, (Tensor("s", "BYTES", (2, 3)),)).row_bytes == 0


def test_signature_tells_row_shapes_and_extra_apart() -> None:
    """Equal row shapes batch whatever the rows; other shapes and other extras do not."""

    def signature(rows: int, length: int, extra: object = None) -> object:
        return bind(TWO, (Tensor("a", "FP32", (rows, 4)), Tensor("b", "INT8", (rows, length, 2))), extra).signature

    assert signature(1, 7) == signature(9, 7)
    assert hash(signature(1, 7)) == hash(signature(9, 7))
    assert signature(1, 7) != signature(1, 8)
    assert signature(1, 7, "x") == signature(2, 7, "x")
    assert len({signature(1, 7), signature(1, 7, "x"), signature(1, 7, "y")}) == 3


def test_models_without_a_batch() -> None:
    """Where there is no batch dimension the whole shape must match, a request is one row, and each shape is its own signature."""
    binding = bind(WHOLE, (Tensor("x", "FP32", (2, 9)),))
    assert (binding.rows, binding.row_shapes, binding.row_bytes) == (1, ((2, 9),), 72)
    assert binding.signature != bind(WHOLE, (Tensor("x", "FP32", (2, 8)),)).signature
    with pytest.raises(BadRequest, match=r'input "x": the model takes shape \[2,-1\], got \[3,9\]'):
        bind(WHOLE, (Tensor("x", "FP32", (3, 9)),))


def test_a_fixed_batch_dimension_is_not_compared() -> None:
    """Only the dimensions behind the batch are compared for a batching model."""
    spec = ModelSpec("test", (TensorSpec("x", "FP32", (1, 5)),), ())
    assert bind(spec, (Tensor("x", "FP32", (7, 5)),)).rows == 7


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((Tensor("image", "FP32", (1, 7)),), r'input "image": the model takes shape \[-1,5\], got \[1,7\]'),
        ((Tensor("image", "FP64", (1, 5)),), 'input "image": the model takes FP32, got FP64'),
        ((Tensor("image", "FP32", (5,)),), r'input "image": the model takes 2 dimensions \[-1,5\], got 1: \[5\]'),
        ((Tensor("image", "FP32", ()),), r"got 0: \[\]"),
        ((Tensor("image", "FP32", (0, 5)),), r"got \[0,5\]"),
        ((Tensor("image", "FP32", (-1, 5)),), r"got \[-1,5\]"),
        ((Tensor("picture", "FP32", (1, 5)),), 'input "image" is missing; the model takes "image"'),
        ((), 'input "image" is missing'),
        ((Tensor("image", "FP32", (1, 5)), Tensor("mask", "FP32", (1, 5))), 'input "mask" is unknown; the model takes "image"'),
        ((Tensor("image", "FP32", (1, 5)), Tensor("image", "FP32", (1, 5))), "given twice"),
    ],
)
def test_refusals(tensors: tuple[Tensor, ...], message: str) -> None:
    """Each mismatch is a BadRequest that names the input, what the model takes and what came."""
    with pytest.raises(BadRequest, match=message):
        bind(SINGLE, tensors)


def test_different_row_counts() -> None:
    """All inputs must have the same number of rows."""
    with pytest.raises(BadRequest, match='input "b": has 2 rows, but input "a" has 3'):
        bind(TWO, (Tensor("a", "FP32", (3, 4)), Tensor("b", "INT8", (2, 7, 2))))


@given(
    st.lists(
        st.builds(
            Tensor,
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["FP32", "INT8", "BYTES"]),
            st.lists(st.integers(-1, 4), max_size=4).map(tuple),
        ),
        max_size=4,
    )
)
@settings(deadline=None, max_examples=300)
def test_binding_is_total(tensors: list[Tensor]) -> None:
    """Any described tensors either fit exactly or are a BadRequest."""
    try:
        binding = bind(TWO, tensors)
    except BadRequest:
        return
    by_name = {tensor.name: tensor for tensor in tensors}
    assert [tensors[index].name for index in binding.order] == ["a", "b"]
    assert by_name["a"].shape == (binding.rows, 4) and by_name["b"].shape == (binding.rows, *binding.row_shapes[1])
