"""Takes a batch's outputs apart: checked once per batch, then each caller's rows are slices of the same memory, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec, serialize_bytes
from shoal.errors import ModelFailed
from shoal.tensors.payload import Array

__all__ = ["Answer", "BadElement", "check_outputs", "fit_output", "join_answers", "make_answer", "serialize_bytes"]


class BadElement(ModelFailed):
    """One element of a BYTES output is neither bytes nor text. Counts are right, so only the owner of `row` need fail."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class Answer:
    """The outputs of one batch.

    `specs` describes them; `arrays` holds them, contiguous and little-endian, rows first (whole tensors where `batched` is
    False); `views` is the same memory as bytes, None for BYTES; `row_bytes` is the size of a row in it. `tail_shapes` are the
    dimensions behind the rows (all of them where there are no rows). Never written to again.
    """

    __slots__ = ("arrays", "batched", "row_bytes", "rows", "specs", "tail_shapes", "views")

    def __init__(self, specs: tuple[TensorSpec, ...], arrays: tuple[Array, ...], rows: int, batched: bool) -> None:
        self.specs = specs
        self.arrays = arrays
        self.rows = rows
        self.batched = batched
        self.views: tuple[memoryview | None, ...] = tuple(
            [None if array.dtype.hasobject else array.reshape(-1).view(np.uint8).data for array in arrays]
        )
        self.row_bytes = tuple([array.nbytes // rows if batched else array.nbytes for array in arrays])
        self.tail_shapes = tuple([array.shape[1:] if batched else array.shape for array in arrays])

    def view(self, output_index: int, start: int, rows: int) -> bytes | memoryview:
        """Little-endian bytes of rows `start` to `start + rows`; BYTES are serialized, everything else is not copied."""
        view = self.views[output_index]
        if view is None:
            return serialize_bytes(self.array(output_index, start, rows))
        if not self.batched:
            return view
        size = self.row_bytes[output_index]
        return view[start * size : (start + rows) * size]

    def array(self, output_index: int, start: int, rows: int) -> Array:
        """Rows `start` to `start + rows` as an array (a view); the whole tensor where there is no batch."""
        array = self.arrays[output_index]
        return array[start : start + rows] if self.batched else array

    def shape(self, output_index: int, rows: int) -> tuple[int, ...]:
        """Shape of `rows` rows of an output."""
        shape = self.arrays[output_index].shape
        return (rows, *shape[1:]) if self.batched else shape


def _fit_bytes(spec: TensorSpec, output: Array, bad: dict[int, BadElement]) -> Array:
    """BYTES: an array of objects that are all `bytes`; strings become their UTF-8 bytes.

    An element that is neither stands as an empty one in the result, and its row, with the first error in it, in `bad`.
    """
    if output.dtype.kind not in "OSU":
        raise ModelFailed(f'output "{spec.name}": the model returned {output.dtype.name}, expected BYTES (bytes or str elements)')
    items = output.reshape(-1).tolist()
    if output.dtype.kind == "O" and set(map(type, items)) <= {bytes}:
        return np.ascontiguousarray(output).reshape(output.shape)
    row_elements = max(len(items) // output.shape[0], 1) if output.ndim and items else 1
    for index, item in enumerate(items):
        fault = None
        if isinstance(item, str):
            try:
                items[index] = item.encode()
            except UnicodeEncodeError:
                fault = "text that UTF-8 cannot carry"
        elif isinstance(item, bytes):
            items[index] = bytes(item)
        else:
            fault = f"{type(item).__name__}, expected bytes or str"
        if fault is not None:
            row, element = divmod(index, row_elements)
            items[index] = b""
            bad.setdefault(row, BadElement(f'output "{spec.name}": element {element} of the row is {fault}', row))
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(output.shape)


def fit_output(spec: TensorSpec, output: Array, bad: dict[int, BadElement]) -> Array:
    """The output as a contiguous little-endian array of the datatype, if it is one already up to byte order and layout.

    Rows with an unusable element of BYTES are noted in `bad`. Raises `ModelFailed`.
    """
    wanted = DATATYPES[spec.datatype].numpy
    got = output.dtype
    if type(output) is not np.ndarray:  # slices and bytes of a subclass may mean something else
        if isinstance(output, np.ma.MaskedArray) and np.ma.is_masked(output):
            raise ModelFailed(f'output "{spec.name}": the model returned an array with masked values')
        output = np.asarray(output)
    if wanted.hasobject:
        return _fit_bytes(spec, output, bad)
    if got == wanted:
        return output if output.flags.c_contiguous else np.array(output, order="C")
    if spec.datatype == "BF16" and got.name == "bfloat16":
        return np.array(output, order="C").view(wanted)
    if got.newbyteorder("<") == wanted:
        return np.array(output, dtype=wanted, order="C")
    raise ModelFailed(f'output "{spec.name}": the model returned {got.name}, expected {spec.datatype} ({wanted.name})')


def make_answer(spec: ModelSpec, outputs: Sequence[Any], rows: int, bad: dict[int, BadElement] | None = None) -> Answer:
    """Check a batch's outputs and make them sliceable. `rows` is how many rows the model was given.

    With `bad`, rows with an unusable element of a BYTES output are noted there and hold an empty one; their owners must not be
    answered. Without it the first of them is raised.

    Raises `ModelFailed` naming the output and both counts (or datatypes) when the model returned another number of outputs, of
    rows, or another datatype; `BadElement` when all counts are right and one element of a BYTES output is unusable. Nothing is
    cast, cut or padded. Dimensions behind the batch are answered as the model made them.
    """
    check_outputs(spec, outputs, [rows] * len(spec.outputs))
    found: dict[int, BadElement] = {} if bad is None else bad
    arrays = tuple([fit_output(tensor, output, found) for tensor, output in zip(spec.outputs, outputs, strict=True)])
    if bad is None and found:
        raise found[min(found)]
    return Answer(spec.outputs, arrays, rows, spec.batchable)


def check_outputs(spec: ModelSpec, outputs: Sequence[Any], rows: Sequence[int]) -> None:
    """Raise `ModelFailed` unless there is an array for each output, with as many rows as `rows` says where there is a batch."""
    if len(outputs) != len(spec.outputs):
        raise ModelFailed(f"the model returned {len(outputs)} outputs, expected {len(spec.outputs)}")
    for tensor, output, wanted in zip(spec.outputs, outputs, rows, strict=True):
        if not isinstance(output, np.ndarray):
            kind = type(output).__name__
            raise ModelFailed(f'output "{tensor.name}": the model returned {kind}, expected an array of {tensor.datatype}')
        if spec.batchable:
            if not output.ndim:
                raise ModelFailed(f'output "{tensor.name}": the model returned a scalar for {wanted} rows')
            if output.shape[0] != wanted:
                raise ModelFailed(f'output "{tensor.name}": the model returned {output.shape[0]} rows for {wanted}')


def join_answers(pieces: Sequence[tuple[Answer, int, int]]) -> Answer:
    """One answer from the pieces of a split request, each (answer of its batch, first row in it, rows), in the request's order.

    Raises `ModelFailed` when the pieces' outputs differ in their dimensions behind the batch and so cannot stand in one tensor.
    """
    first = pieces[0][0]
    arrays: list[Array] = []
    for index, spec in enumerate(first.specs):
        parts = [answer.array(index, begin, count) for answer, begin, count in pieces]
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) != 1:
            listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise ModelFailed(f'output "{spec.name}": the pieces of a split request came back with different row shapes {listed}')
        arrays.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return Answer(first.specs, tuple(arrays), sum(count for _, _, count in pieces), first.batched)
