"""Gathers the rows of a batch into one contiguous array per input, with at most one copy of each row.

Small batches are joined into fresh memory, because one C call beats a slice assignment per row; large ones are copied into buffers
that are kept and used again, because fresh pages cost more than the copy. Knows payloads and rows; no tickets, no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any, Final, Protocol

import numpy as np

from shoal.datatypes import DATATYPES, ModelSpec
from shoal.tensors.payload import Array, InputData, Payload

__all__ = ["Assembler", "Member", "as_piece", "row_parameters"]

_JOIN_BYTES: Final = 64 << 10  # up to here one join is faster than a slice assignment per member
_RELEASE_BYTES: Final = 1 << 20  # from here a copy lets other threads run
_KEPT_SHAPES: Final = 4
_KEPT_BYTES: Final = 512 << 20


class Member(Protocol):
    """A request in a batch, or a piece of one: rows `start_row` to `start_row + rows` of its payload."""

    @property
    def rows(self) -> int:
        """How many rows."""
        ...

    @property
    def start_row(self) -> int:
        """First row of the payload."""
        ...

    @property
    def payload(self) -> Any:
        """The `Payload`."""
        ...


class _Buffer:
    """Room for `max_rows` rows of one input: as an array, and the same memory as plain bytes."""

    __slots__ = ("array", "view")

    def __init__(self, dtype: np.dtype[Any], max_rows: int, row_shape: tuple[int, ...]) -> None:
        self.array: Array = np.empty((max_rows, *row_shape), dtype=dtype)
        self.view: memoryview = self.array.reshape(-1).view(np.uint8).data


def _size(kept: tuple[_Buffer | None, ...] | None) -> int:
    return sum([buffer.view.nbytes for buffer in kept if buffer is not None]) if kept else 0


def _as_bytes(data: InputData) -> bytes | bytearray | memoryview:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return data


def row_parameters(members: Sequence[Member]) -> list[dict[str, Any]]:
    """The request parameters of every row of the batch, in order, for models that use them.

    Each row gets a copy of its own: equal requests share one decoded head, and what a model writes must reach nobody else.
    """
    result: list[dict[str, Any]] = []
    for member in members:
        parameters = member.payload.parameters or {}
        result.extend([dict(parameters) for _ in range(member.rows)])
    return result


class Assembler:
    """Assembles batches of one model, for one executor thread.

    The arrays of one call may use the memory of the call before: they are valid until the next `assemble`. They are contiguous,
    aligned and writable. With `share_single`, a member that is alone may be handed over without a copy: its array may then be
    read-only, and the backend must not write to its inputs. `max_rows` is the size that kept buffers have; larger batches get
    memory of their own. Buffers are kept for the last few combinations of row shapes only, and within `_KEPT_BYTES`.
    """

    def __init__(self, spec: ModelSpec, max_rows: int, *, share_single: bool = False) -> None:
        self._batchable = spec.batchable
        self._dtypes = tuple([DATATYPES[tensor.datatype].numpy for tensor in spec.inputs])
        self._indices = range(len(self._dtypes))
        self._max_rows = max_rows if spec.batchable else 1
        self._share_single = share_single
        self._kept: OrderedDict[tuple[tuple[int, ...], ...], tuple[_Buffer | None, ...]] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that are kept for the next batches."""
        return self._kept_bytes

    def assemble(self, members: Sequence[Member]) -> list[Array]:
        """One array per input of the model, with the members' rows in order. All members have equal row shapes."""
        payload: Payload = members[0].payload
        row_shapes = payload.row_shapes
        rows = members[0].rows if len(members) == 1 else sum([member.rows for member in members])
        return [self._plain(members, index, rows, row_shapes) for index in self._indices]

    def _plain(self, members: Sequence[Member], index: int, rows: int, row_shapes: tuple[tuple[int, ...], ...]) -> Array:
        """One input whose rows have equal shapes."""
        dtype = self._dtypes[index]
        row_shape = row_shapes[index]
        shape = (rows, *row_shape) if self._batchable else row_shape
        if dtype.hasobject:
            return self._gather_objects(members, index, shape)
        row_bytes = prod(row_shape) * dtype.itemsize
        total_bytes = rows * row_bytes
        if total_bytes <= _JOIN_BYTES:
            return np.frombuffer(_join(members, index, row_bytes, total_bytes), dtype=dtype).reshape(shape)
        pieces = [as_piece(member.payload.inputs[index], member.start_row, member.rows, row_bytes) for member in members]
        if self._share_single and len(pieces) == 1:
            shared = np.frombuffer(pieces[0], dtype=dtype)
            if shared.flags.aligned:
                return shared.reshape(shape)
        return self._copy(pieces, index, rows, row_shapes, shape)

    def _copy(
        self,
        pieces: Sequence[bytes | bytearray | memoryview],
        index: int,
        rows: int,
        row_shapes: tuple[tuple[int, ...], ...],
        shape: tuple[int, ...],
    ) -> Array:
        buffer = self._buffer(row_shapes, index) if rows <= self._max_rows else None
        if buffer is None:
            buffer = _Buffer(self._dtypes[index], rows if self._batchable else 1, row_shapes[index])
        view = buffer.view
        position = 0
        for piece in pieces:
            end = position + len(piece)
            if end - position < _RELEASE_BYTES:
                view[position:end] = piece
            else:
                np.copyto(np.frombuffer(view[position:end], np.uint8), np.frombuffer(piece, np.uint8))
            position = end
        return buffer.array[:rows] if self._batchable else buffer.array.reshape(shape)

    def _buffer(self, row_shapes: tuple[tuple[int, ...], ...], index: int) -> _Buffer | None:
        """The kept buffer of an input, made if there is room for it; None where it is too large to be kept."""
        kept = self._kept.get(row_shapes)
        if kept is not None:
            self._kept.move_to_end(row_shapes)
            buffer = kept[index]
            if buffer is not None:
                return buffer
        size = self._max_rows * prod(row_shapes[index]) * self._dtypes[index].itemsize
        own_bytes = _size(kept)
        if own_bytes + size > _KEPT_BYTES:
            return None
        self._kept[row_shapes] = kept = kept or (None,) * len(self._dtypes)
        while len(self._kept) > _KEPT_SHAPES or self._kept_bytes + size > _KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= _size(dropped)
        buffer = _Buffer(self._dtypes[index], self._max_rows, row_shapes[index])
        self._kept[row_shapes] = (*kept[:index], buffer, *kept[index + 1 :])
        self._kept_bytes += size
        return buffer

    def _gather_objects(self, members: Sequence[Member], index: int, shape: tuple[int, ...]) -> Array:
        """BYTES: always into a fresh array, so that no element outlives its request in a kept buffer."""
        if not self._batchable:
            return np.array(members[0].payload.inputs[index], dtype=object).reshape(shape)
        array = np.empty(shape, dtype=object)
        row = 0
        for member in members:
            end = row + member.rows
            data = member.payload.inputs[index].reshape(-1, *shape[1:])
            array[row:end] = data[member.start_row : member.start_row + member.rows]
            row = end
        return array


def _join(members: Sequence[Member], index: int, row_bytes: int, total_bytes: int) -> bytearray:
    """The members' bytes of one input, one behind the other.

    Data is never shorter than the rows that its member stands for, so when the whole of everything has the wanted size, nothing had
    to be cut: the usual case, told by two calls. Arrays (whose length is not their size) and split members go the long way.
    """
    pieces = [member.payload.inputs[index] for member in members]
    if sum(map(len, pieces)) == total_bytes:
        try:
            joined = bytearray().join(pieces)
        except TypeError:  # an array that is not contiguous; with the rows' bytes for its length, one of small elements
            joined = bytearray()
        if len(joined) == total_bytes:
            return joined
    return bytearray().join(
        [as_piece(piece, member.start_row, member.rows, row_bytes) for piece, member in zip(pieces, members, strict=True)]
    )


def as_piece(data: InputData, start_row: int, rows: int, row_bytes: int) -> bytes | bytearray | memoryview:
    """Bytes of the rows that a member stands for; views wherever possible."""
    flat = _as_bytes(data)
    if len(flat) == rows * row_bytes:
        return flat
    return memoryview(flat)[start_row * row_bytes : (start_row + rows) * row_bytes]
