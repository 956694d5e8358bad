"""The runner for tensor models: assemble, run the backend, check and keep its outputs for scattering. No threads, no scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.backends.base import Backend
from shoal.core.ticket import Ticket
from shoal.engine.outcome import Result
from shoal.engine.quarantine import Contents
from shoal.errors import ModelFailed
from shoal.tensors.assemble import Assembler, Member, as_piece, row_parameters
from shoal.tensors.lengths import LengthPlan
from shoal.tensors.padding import Layout, PaddingAssembler, take_apart
from shoal.tensors.payload import Array, Payload
from shoal.tensors.scatter import BadElement, make_answer

__all__ = ["TensorRunner", "next_allowed", "payload_contents"]


@dataclass(frozen=True, slots=True)
class _Filler:
    """A row that is run again only to bring a batch to an allowed size; nobody is answered with it."""

    payload: Payload
    start_row: int
    rows: int = 1


class TensorRunner:
    """One executor's backend with the buffers that its batches are gathered in.

    A model that returns another number of rows than it was given is not asked again in smaller batches: whatever it returns, it has
    shown that its rows are not its callers' rows, and an answer that happens to have the right count might still be a neighbour's.

    With `lengths`, rows of different length are laid out as it says. With `allowed_sizes` (rising) a batch is run with as many rows
    as the next of them says: its last row is repeated, because nothing else is sure to be something that the model can take.
    """

    def __init__(
        self,
        backend: Backend,
        max_rows: int,
        clock: Callable[[], int],
        *,
        lengths: LengthPlan | None = None,
        allowed_sizes: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._spec = backend.spec
        self._uses_parameters = backend.spec.uses_parameters
        self._allowed_sizes = allowed_sizes
        self._lengths = lengths if lengths is not None and lengths.mixes else None
        self._assembler = Assembler(backend.spec, max_rows, share_single=backend.spec.reads_only)
        if self._lengths is not None:
            self._assembler = PaddingAssembler(self._lengths, max_rows, share_single=backend.spec.reads_only)
        self._clock = clock

    def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members' rows as one tensor operation. Raises whatever the model raises."""
        if self._lengths is not None or self._allowed_sizes:
            return self._run_padded(members)
        clock = self._clock
        begun_ns = clock()
        arrays = self._assembler.assemble(members)
        parameters = row_parameters(members) if self._uses_parameters else None
        ready_ns = clock()
        outputs = self._backend.run(arrays, parameters)
        inferred_ns = clock()
        rows = sum([member.rows for member in members])
        bad: dict[int, BadElement] = {}
        try:
            answer = make_answer(self._spec, outputs, rows, bad)
        except ModelFailed as error:
            return Result(None, 0, 0, 0, refused=error)
        failures = _owners(members, bad) if bad else None
        return Result(answer, ready_ns - begun_ns, inferred_ns - ready_ns, clock() - inferred_ns, failures)

    def _run_padded(self, members: Sequence[Ticket]) -> Result:
        """The same with rows that are made longer, or more, than they came."""
        clock = self._clock
        begun_ns = clock()
        own_rows = sum([member.rows for member in members])
        batch = self._filled_up(members, own_rows)
        layout: Layout | None = None
        if self._lengths is None:
            arrays = self._assembler.assemble(batch)
            rows = own_rows + len(batch) - len(members)
            tokens, padded_tokens = own_rows, rows
        else:
            layout = Layout(self._lengths, batch, len(members))
            arrays = self._lay_out(batch, layout)
            tokens, padded_tokens = layout.tokens, layout.padded_tokens
            rows = layout.rows
        parameters = row_parameters(batch) if self._uses_parameters else None
        ready_ns = clock()
        outputs = self._backend.run(arrays, parameters)
        inferred_ns = clock()
        bad: dict[int, BadElement] = {}
        answer: Any
        try:
            if self._lengths is None or layout is None:
                answer = make_answer(self._spec, outputs, rows, bad)
            else:
                answer = take_apart(self._lengths, layout, outputs, len(members), bad)
        except ModelFailed as error:
            return Result(None, 0, 0, 0, refused=error)
        bad = {row: error for row, error in bad.items() if row < own_rows}
        failures = _owners(members, bad) if bad else None
        result = Result(answer, ready_ns - begun_ns, inferred_ns - ready_ns, clock() - inferred_ns, failures)
        if isinstance(answer, list):
            result.answer, result.answers = None, answer
        result.tokens, result.padded_tokens = tokens, padded_tokens
        return result

    def _lay_out(self, batch: Sequence[Member], layout: Layout) -> list[Array]:
        assert isinstance(self._assembler, PaddingAssembler)
        return self._assembler.lay_out(batch, layout)

    def _filled_up(self, members: Sequence[Ticket], rows: int) -> Sequence[Member]:
        """The members, and as many repetitions of the last row as the next allowed size takes; none where there is no such size."""
        missing = next_allowed(self._allowed_sizes, rows) - rows
        if not missing:
            return members
        last = members[-1]
        filler = _Filler(last.payload, last.start_row + last.rows - 1)
        return [*members, *[filler] * missing]

    def contents(self, member: Ticket) -> Contents | None:
        """The rows that the member stands for, their shapes, and the parameters if the model sees them."""
        return payload_contents(member, self._uses_parameters)

    def close(self) -> None:
        """Free the model."""
        self._backend.close()


def next_allowed(sizes: Sequence[int], rows: int) -> int:
    """The smallest of `sizes` (rising) that takes so many rows; `rows` itself where there is none."""
    index = bisect_left(sizes, rows)
    return rows if index == len(sizes) else sizes[index]


def payload_contents(member: Ticket, with_parameters: bool) -> Contents:
    """The rows that a member stands for, as bytes, and their shapes."""
    payload: Payload = member.payload
    parts: list[bytes | bytearray | memoryview] = [repr(payload.row_shapes).encode()]
    if with_parameters:
        parts.append(repr(payload.parameters).encode())
    own = member.parent or member
    for data in payload.inputs:
        if isinstance(data, np.ndarray) and data.dtype.hasobject:
            rows = data.reshape(own.rows, -1)[member.start_row : member.start_row + member.rows]
            parts += [item if isinstance(item, bytes) else str(item).encode() for item in rows.reshape(-1).tolist()]
        else:
            size = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
            parts.append(as_piece(data, member.start_row, member.rows, size // own.rows))
    return parts


def _owners(members: Sequence[Ticket], bad: Mapping[int, BadElement]) -> dict[int, Exception]:
    """The first error of each member that has one, by index, from errors by row of the batch."""
    if len(members) == 1:  # also where there is no batch, and the rows are not the request's
        return {0: bad[min(bad)]}
    failures: dict[int, Exception] = {}
    row = 0
    for index, member in enumerate(members):
        error = next((bad[own] for own in range(row, row + member.rows) if own in bad), None)
        if error is not None:
            failures[index] = error
        row += member.rows
    return failures
