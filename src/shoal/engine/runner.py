"""The runner for tensor models: assemble, run the backend, check and keep its outputs for scattering. No threads, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.backends.base import Backend
from shoal.core.ticket import Ticket
from shoal.engine.execution import Result
from shoal.errors import ModelFailed
from shoal.tensors.assemble import Assembler, row_parameters
from shoal.tensors.scatter import BadElement, make_answer

__all__ = ["TensorRunner"]


class TensorRunner:
    """One executor's backend with the buffers that its batches are gathered in.

    A model that returns another number of rows than it was given is not asked again in smaller batches: whatever it returns, it has
    shown that its rows are not its callers' rows, and an answer that happens to have the right count might still be a neighbour's.
    """

    def __init__(self, backend: Backend, max_rows: int, clock: Callable[[], int]) -> None:
        self._backend = backend
        self._spec = backend.spec
        self._uses_parameters = backend.spec.uses_parameters
        self._assembler = Assembler(backend.spec, max_rows, share_single=backend.spec.reads_only)
        self._clock = clock

    def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members' rows as one tensor operation. Raises whatever the model raises."""
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

    def close(self) -> None:
        """Free the model."""
        self._backend.close()


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
