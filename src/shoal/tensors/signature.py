"""Does a request fit the model, how many rows has it, and what may it be batched with? Descriptions only; no data is touched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Protocol

import msgspec

from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import BadRequest

__all__ = ["Binding", "TensorLike", "bind", "check_tensor", "match_names"]


class TensorLike(Protocol):
    """Whatever describes a tensor of a request: name, datatype name, and shape with the batch dimension in front."""

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def datatype(self) -> str:
        """Datatype name of the protocol."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """All dimensions, the batch first."""
        ...


class Binding(msgspec.Struct, frozen=True, eq=False):
    """How a request maps to a model.

    `rows`: size of the batch dimension, 1 for models without one. `signature`: requests batch together only when equal.
    `order`: for each input of the model, its index in the request. `row_shapes`: for each input of the model, the shape of one row
    (of the whole tensor where there is no batch). `row_bytes`: bytes of one row over all inputs, BYTES counted as 0. `length`: how
    long its rows are where rows of different length share a batch (see `lengths.py`), else 0.
    """

    rows: int
    signature: tuple[Hashable, ...]
    order: tuple[int, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    row_bytes: int
    length: int = 0


def _show(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def match_names(spec: ModelSpec, tensors: Sequence[TensorLike]) -> tuple[int, ...]:
    """For each input of the model, its index among `tensors`; -1 for an optional one that is not there. Raises `BadRequest`."""
    positions = {tensor.name: index for index, tensor in enumerate(tensors)}
    expected = ", ".join(f'"{model_input.name}"' for model_input in spec.inputs)
    missing = [tensor.name for tensor in spec.inputs if tensor.name not in positions and not tensor.optional]
    if missing:
        raise BadRequest(f'input "{missing[0]}" is missing; the model takes {expected}')
    known = {model_input.name for model_input in spec.inputs}
    for tensor in tensors:
        if tensor.name not in known:
            raise BadRequest(f'input "{tensor.name[:100]}" is unknown; the model takes {expected}')
    if len(tensors) != len(positions):
        raise BadRequest(f"an input is given twice; the model takes {expected}")
    return tuple([positions.get(model_input.name, -1) for model_input in spec.inputs])


def check_tensor(expected: TensorSpec, got: TensorLike, batchable: bool) -> None:
    """Raise `BadRequest` unless datatype and shape are what the model takes."""
    if got.datatype != expected.datatype:
        raise BadRequest(f'input "{expected.name}": the model takes {expected.datatype}, got {got.datatype}')
    shape, wanted = got.shape, expected.shape
    if len(shape) != len(wanted):
        counts = f"{len(wanted)} dimensions {_show(wanted)}, got {len(shape)}: {_show(shape[:20])}"
        raise BadRequest(f'input "{expected.name}": the model takes {counts}')
    for axis, dimension in enumerate(wanted):
        if shape[axis] < 1 or (dimension >= 0 and shape[axis] != dimension and not (batchable and axis == 0)):
            raise BadRequest(f'input "{expected.name}": the model takes shape {_show(wanted)}, got {_show(shape)}')


def bind(spec: ModelSpec, tensors: Sequence[TensorLike], extra: Hashable = None) -> Binding:
    """Check a request's tensors against `spec` and say how they batch.

    `extra` joins the signature when given: what else must be equal in one batch (requested outputs, parameters, where they change
    the result). Raises `BadRequest` naming the input, what the model takes and what came. Depends on its arguments only, so a
    result may be kept for equal heads.
    """
    inputs = spec.inputs
    if len(tensors) == 1 and len(inputs) == 1 and tensors[0].name == inputs[0].name:
        order: tuple[int, ...] = (0,)
    else:
        order = match_names(spec, tensors)
    batchable = spec.batchable
    rows = 0
    row_bytes = 0
    row_shapes: list[tuple[int, ...]] = []
    for model_input, index in zip(inputs, order, strict=True):
        tensor = tensors[index]
        shape = tensor.shape
        check_tensor(model_input, tensor, batchable)
        if batchable:
            if not rows:
                rows = shape[0]
            elif shape[0] != rows:
                raise BadRequest(f'input "{model_input.name}": has {shape[0]} rows, but input "{inputs[0].name}" has {rows}')
            shape = shape[1:]
        row_shapes.append(tuple(shape))
        row_bytes += prod(shape) * DATATYPES[model_input.datatype].itemsize
    shapes = tuple(row_shapes)
    return Binding(rows or 1, shapes if extra is None else (shapes, extra), order, shapes, row_bytes)
