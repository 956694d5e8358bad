"""Lays rows of different length out as one batch, as a `LengthPlan` says, and cuts what the model answers back to their lengths.

Short rows are joined with stretches of ready padding, so that a batch of single rows is one C call and not an operation per row;
what is large goes into memory that is kept. Masks, lengths and offsets that no client sent are made here. No tickets, no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from shoal.datatypes import DATATYPES, TensorSpec
from shoal.errors import ModelFailed
from shoal.tensors.assemble import Assembler, Member, as_piece
from shoal.tensors.lengths import ABSENT, LengthPlan, Role
from shoal.tensors.payload import Array, InputData
from shoal.tensors.scatter import Answer, BadElement, check_outputs, fit_output

__all__ = ["Layout", "PaddingAssembler", "take_apart"]

_JOIN_BYTES: Final = 64 << 10  # up to here fresh memory is cheaper than writing row by row
_RELEASE_BYTES: Final = 1 << 20  # from here a copy lets other threads run
_KEPT_BYTES: Final = 256 << 20  # of one input; larger batches get memory of their own


class Layout:
    """How long the rows of one batch are, and how long they are made.

    For each group of the plan: `lengths` of every member's rows, `padded` to which they are brought (ragged: the longest), and
    whether they are `even`, that is, nothing is padded. `counts` are the rows of every member, `rows` their sum. `tokens` is rows
    times length as the first `own` members brought it, `padded_tokens` what the model is given; members behind those only fill up.
    """

    __slots__ = ("counts", "even", "lengths", "padded", "padded_tokens", "rows", "tokens")

    def __init__(self, plan: LengthPlan, members: Sequence[Member], own: int) -> None:
        self.counts = counts = [member.rows for member in members]
        self.rows = rows = sum(counts)
        self.lengths: list[list[int]] = [list(each) for each in zip(*[plan.lengths_of(member.payload) for member in members])]  # noqa: B905
        self.padded: list[int] = []
        self.even: list[bool] = []
        self.tokens = self.padded_tokens = 0
        for group, lengths in zip(plan.groups, self.lengths, strict=True):
            padded = group.padded(max(lengths))
            self.padded.append(padded)
            self.even.append(min(lengths) == padded)
            if group.policy == "exact":
                continue
            each = [count * length for count, length in zip(counts, lengths, strict=True)]
            self.tokens += sum(each[:own])
            self.padded_tokens += sum(each) if group.policy == "ragged" else rows * padded

    def row_lengths(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The length of every row."""
        lengths = np.array(self.lengths[group], np.int64)
        return lengths if self.rows == len(self.counts) else np.repeat(lengths, self.counts)


class PaddingAssembler(Assembler):
    """An `Assembler` for members whose rows differ in length: `lay_out` takes the place of `assemble`, and all else holds too."""

    def __init__(self, plan: LengthPlan, max_rows: int, *, share_single: bool = False) -> None:
        super().__init__(plan.model, max_rows, share_single=share_single)
        self._plan = plan
        self._tensors = plan.model.inputs
        self._padding = [memoryview(b"") for _ in self._tensors]
        self._ones = [memoryview(b"") for _ in self._tensors]
        self._rooms: dict[int, Array] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that are kept for the next batches."""
        return self._kept_bytes + sum([room.nbytes for room in self._rooms.values()])

    def lay_out(self, members: Sequence[Member], layout: Layout) -> list[Array]:
        """One array per input of the backend."""
        arrays: list[Array] = []
        shapes = members[0].payload.row_shapes
        for index, rule in enumerate(self._plan.rules):
            role = rule.role
            if role is Role.PLAIN or (role is Role.PADDED and layout.even[rule.group]):
                arrays.append(self._plain(members, index, layout.rows, shapes))
            elif role is Role.PADDED:
                data = [member.payload.inputs[index] for member in members]
                arrays.append(self._pad(members, data, index, layout, shapes[index]))
            elif role is Role.MASK:
                arrays.append(self._mask(members, index, layout))
            elif role is Role.RAGGED:
                arrays.append(self._lay_end_to_end(members, index, layout, shapes[index]))
            elif role is Role.LENGTH:
                arrays.append(self._lengths(members, index, layout))
            else:
                ends = np.cumsum(layout.row_lengths(rule.group))
                arrays.append(np.concatenate(([0], ends)).astype(self._dtypes[index]))
        return arrays

    # ---------------------------------------------------------------- rows

    def _pad(
        self, members: Sequence[Member], data: Sequence[InputData], index: int, layout: Layout, row_shape: tuple[int, ...]
    ) -> Array:
        """Rows brought to one length. `row_shape` is that of any member: only the padded axis differs."""
        rule = self._plan.rules[index]
        dtype, lengths, padded = self._dtypes[index], layout.lengths[rule.group], layout.padded[rule.group]
        before, after = row_shape[: rule.axis - 1], row_shape[rule.axis :]
        shape = (layout.rows, *before, padded, *after)
        if dtype.hasobject:
            return _pad_objects(members, data, lengths, rule.axis, shape)
        lines, unit = prod(before), prod(after) * dtype.itemsize  # a line is padded as a whole
        wide = padded * unit
        padding = self._padding_of(index, wide - min(lengths) * unit)
        total_bytes = layout.rows * lines * wide
        if total_bytes > _JOIN_BYTES:
            room = self._room(index, total_bytes)
            self._write(members, data, lengths, room, lines, unit, wide, padding)
            return room[:total_bytes].view(dtype).reshape(shape)
        pieces: list[bytes | bytearray | memoryview] = []
        for member, own, length in zip(members, data, lengths, strict=True):
            count, narrow = member.rows * lines, length * unit
            piece = as_piece(own, member.start_row, member.rows, lines * narrow)
            if count == 1:
                pieces.append(piece)
                pieces.append(padding[: wide - narrow])
            else:
                block = np.empty((count, wide), np.uint8)
                _fill(block, piece, narrow, padding)
                pieces.append(block.reshape(-1).data)
        return np.frombuffer(bytearray().join(pieces), dtype).reshape(shape)

    @staticmethod
    def _write(
        members: Sequence[Member],
        data: Sequence[InputData],
        lengths: Sequence[int],
        room: Array,
        lines: int,
        unit: int,
        wide: int,
        padding: memoryview,
    ) -> None:
        view = room.data
        position = 0
        for member, own, length in zip(members, data, lengths, strict=True):
            count, narrow = member.rows * lines, length * unit
            piece = as_piece(own, member.start_row, member.rows, lines * narrow)
            end = position + count * wide
            if count == 1 and narrow < _RELEASE_BYTES:
                view[position : position + narrow] = piece
                view[position + narrow : end] = padding[: wide - narrow]
            else:
                _fill(room[position:end].reshape(count, wide), piece, narrow, padding)
            position = end

    def _lay_end_to_end(self, members: Sequence[Member], index: int, layout: Layout, row_shape: tuple[int, ...]) -> Array:
        dtype, lengths = self._dtypes[index], layout.lengths[self._plan.rules[index].group]
        tail = row_shape[1:]
        if dtype.hasobject:
            parts = [
                member.payload.inputs[index].reshape(-1, length, *tail)[member.start_row : member.start_row + member.rows]
                for member, length in zip(members, lengths, strict=True)
            ]
            return np.concatenate([part.reshape(-1, *tail) for part in parts])
        unit = prod(tail) * dtype.itemsize
        pieces = [
            as_piece(member.payload.inputs[index], member.start_row, member.rows, length * unit)
            for member, length in zip(members, lengths, strict=True)
        ]
        total_bytes = sum(map(len, pieces))
        if total_bytes <= _JOIN_BYTES:
            return np.frombuffer(bytearray().join(pieces), dtype).reshape(-1, *tail)
        room = self._room(index, total_bytes)
        position = 0
        for piece in pieces:
            end = position + len(piece)
            room[position:end] = np.frombuffer(piece, np.uint8)
            position = end
        return room[:total_bytes].view(dtype).reshape(-1, *tail)

    # ---------------------------------------------------------------- what tells the model

    def _mask(self, members: Sequence[Member], index: int, layout: Layout) -> Array:
        group, dtype = self._plan.rules[index].group, self._dtypes[index]
        one = _one(self._tensors[index])
        padded, lengths = layout.padded[group], layout.lengths[group]
        data = [member.payload.inputs[index] for member in members]
        if all(own is ABSENT for own in data):
            inside = np.arange(padded) < layout.row_lengths(group)[:, np.newaxis]
            mask: Array = inside * np.frombuffer(one, dtype)[0]
            return mask
        size = max([member.rows * length for member, length in zip(members, lengths, strict=True)]) * len(one)
        if len(self._ones[index]) < size:
            self._ones[index] = memoryview(one * (size // len(one)))
        ones = self._ones[index]
        data = [
            ones[: member.rows * length * len(one)] if own is ABSENT else own
            for member, length, own in zip(members, lengths, data, strict=True)
        ]
        return self._pad(members, data, index, layout, (padded,))

    def _lengths(self, members: Sequence[Member], index: int, layout: Layout) -> Array:
        dtype = self._dtypes[index]
        array = layout.row_lengths(self._plan.rules[index].group).astype(dtype)
        row = 0
        for member in members:
            data = member.payload.inputs[index]
            if data is not ABSENT:
                array[row : row + member.rows] = np.frombuffer(as_piece(data, member.start_row, member.rows, dtype.itemsize), dtype)
            row += member.rows
        return array.reshape(-1, *([1] * (len(self._tensors[index].shape) - 1)))

    # ---------------------------------------------------------------- memory

    def _padding_of(self, index: int, size: int) -> memoryview:
        """At least so many bytes of padding for an input."""
        padding = self._padding[index]
        if len(padding) < size:
            fill = self._plan.rules[index].fill or bytes(self._dtypes[index].itemsize)
            padding = self._padding[index] = memoryview(fill * (2 * size // len(fill)))
        return padding

    def _room(self, index: int, size: int) -> Array:
        """Memory of at least this size, which the next batch may be given again."""
        room = self._rooms.get(index)
        if room is None or room.nbytes < size:
            room = np.empty(size if size > _KEPT_BYTES else 1 << (size - 1).bit_length(), np.uint8)
            if size <= _KEPT_BYTES:
                self._rooms[index] = room
        return room


def _one(tensor: TensorSpec) -> bytes:
    return b"\x80\x3f" if tensor.datatype == "BF16" else np.ones(1, DATATYPES[tensor.datatype].numpy).tobytes()


def _fill(block: Array, piece: bytes | bytearray | memoryview, narrow: int, padding: memoryview) -> None:
    """Lines of `narrow` bytes into the wider lines of `block`, and padding behind each."""
    block[:, :narrow] = np.frombuffer(piece, np.uint8).reshape(-1, narrow)
    block[:, narrow:] = np.frombuffer(padding[: block.shape[1] - narrow], np.uint8)


def _pad_objects(
    members: Sequence[Member], data: Sequence[InputData], lengths: Sequence[int], axis: int, shape: tuple[int, ...]
) -> Array:
    """BYTES: always into a fresh array, so that no element outlives its request."""
    array = np.full(shape, b"", dtype=object)
    row = 0
    for member, own, length in zip(members, data, lengths, strict=True):
        end = row + member.rows
        rows = np.asarray(own).reshape(-1, *shape[1:axis], length, *shape[axis + 1 :])
        array[(slice(row, end), *[slice(None)] * (axis - 1), slice(length))] = rows[
            member.start_row : member.start_row + member.rows
        ]
        row = end
    return array


def take_apart(
    plan: LengthPlan, layout: Layout, outputs: Sequence[Any], own: int, bad: dict[int, BadElement]
) -> Answer | list[Answer]:
    """What the first `own` members are answered: one `Answer` for all where no output needs cutting, else one for each.

    Rows with an unusable element are noted in `bad`. Raises `ModelFailed` as `make_answer` does, and where an output is not as long
    as the rows that the model was given.
    """
    spec, crops = plan.model, plan.crops
    ragged = [any(plan.groups[group].policy == "ragged" for _, group in axes) for axes in crops]
    wanted = [
        sum([count * length for count, length in zip(layout.counts, layout.lengths[axes[0][1]], strict=True)])
        if end_to_end
        else layout.rows
        for axes, end_to_end in zip(crops, ragged, strict=True)
    ]
    check_outputs(spec, outputs, wanted)
    cut = [
        any(not layout.even[group] for _, group in axes) and not end_to_end for axes, end_to_end in zip(crops, ragged, strict=True)
    ]
    whole: list[Array | None] = []
    for tensor, output, axes, end_to_end, narrowed in zip(spec.outputs, outputs, crops, ragged, cut, strict=True):
        if end_to_end:
            whole.append(_fit_ragged(tensor, output, layout.row_lengths(axes[0][1]), bad))
            continue
        for axis, group in axes:
            if output.ndim <= axis or output.shape[axis] != layout.padded[group]:
                length = f"as long as the rows of input '{plan.groups[group].name}' ({layout.padded[group]})"
                raise ModelFailed(f'output "{tensor.name}": has shape {list(output.shape)}, but its axis {axis} should be {length}')
        whole.append(None if narrowed else fit_output(tensor, output, bad))
    if not any(ragged) and not any(cut):
        return Answer(plan.spec.outputs, tuple([array for array in whole if array is not None]), layout.rows, True)
    answers: list[Answer] = []
    row = 0
    starts = [0] * len(crops)
    for member, count in enumerate(layout.counts[:own]):
        arrays: list[Array] = []
        for index, array in enumerate(whole):
            axes = crops[index]
            if array is None:
                arrays.append(_cut(spec.outputs[index], outputs[index], axes, layout, member, row, bad))
            elif ragged[index]:
                own_length = layout.lengths[axes[0][1]][member]
                end = starts[index] + count * own_length
                arrays.append(array[starts[index] : end].reshape(count, own_length, *array.shape[1:]))
                starts[index] = end
            else:
                arrays.append(array[row : row + count])
        answers.append(Answer(plan.spec.outputs, tuple(arrays), count, True))
        row += count
    return answers


def _cut(
    tensor: TensorSpec,
    output: Array,
    axes: Sequence[tuple[int, int]],
    layout: Layout,
    member: int,
    row: int,
    bad: dict[int, BadElement],
) -> Array:
    """A member's rows of an output, each as long as it came."""
    where = [slice(None)] * output.ndim
    where[0] = slice(row, row + layout.counts[member])
    for axis, group in axes:
        where[axis] = slice(layout.lengths[group][member])
    own: dict[int, BadElement] = {}
    array = fit_output(tensor, output[tuple(where)], own)
    for index, error in own.items():
        bad.setdefault(row + index, error)
    return array


def _fit_ragged(
    tensor: TensorSpec, output: Array, lengths: np.ndarray[tuple[int], np.dtype[np.int64]], bad: dict[int, BadElement]
) -> Array:
    own: dict[int, BadElement] = {}
    array = fit_output(tensor, output, own)
    if own:
        ends = np.cumsum(lengths)
        for place, error in own.items():
            bad.setdefault(int(np.searchsorted(ends, place, side="right")), error)
    return array
