"""The runner for Python models with `decode` or `encode`: both request by request, what is between them for the whole batch.

A hook's exception is its own request's failure: it is left out, and the others go on in the same run. Nothing is run again for it.
No threads, no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from shoal.backends.base import Backend
from shoal.backends.python import PythonBackend
from shoal.backends.python_hooks import Hooks, Raw
from shoal.core.ticket import Ticket
from shoal.engine.execution import Runner
from shoal.engine.outcome import Result, is_out_of_memory, model_error
from shoal.engine.quarantine import Contents
from shoal.engine.runner import TensorRunner, next_allowed, payload_contents
from shoal.errors import ConfigError, ModelFailed
from shoal.tensors.assemble import Assembler
from shoal.tensors.lengths import LengthPlan
from shoal.tensors.payload import Array
from shoal.tensors.scatter import Answer, make_answer

__all__ = ["HookedTensorRunner", "make_runner", "refuse_lengths"]


def make_runner(
    backend: Backend, max_rows: int, clock: Callable[[], int], *, lengths: LengthPlan | None, allowed_sizes: Sequence[int]
) -> Runner:
    """The runner that a backend needs."""
    if isinstance(backend, PythonBackend) and backend.hooks is not None:
        return HookedTensorRunner(backend, backend.hooks, max_rows, clock, allowed_sizes=allowed_sizes)
    return TensorRunner(backend, max_rows, clock, lengths=lengths, allowed_sizes=allowed_sizes)


def refuse_lengths(name: str, backend: Backend, lengths: LengthPlan | None) -> None:
    """Raise `ConfigError` for a model with hooks whose rows were to be padded or laid end to end: hooks see rows as they came."""
    if lengths is not None and lengths.mixes and isinstance(backend, PythonBackend) and backend.hooks is not None:
        raise ConfigError(
            f'model "{name}" has decode() or encode(), which work on single requests, so rows of different length are not padded '
            'for it: take `lengths` out of its settings (or make them "exact"), and bring rows to one length in decode()'
        )


class _Request(NamedTuple):
    """What hooks need of a member, and its place in the batch."""

    place: int
    rows: int
    parameters: Mapping[str, Any] | None


class HookedTensorRunner:
    """One executor's Python model, its hooks, and the buffers that its batches are gathered in."""

    def __init__(
        self,
        backend: PythonBackend,
        hooks: Hooks,
        max_rows: int,
        clock: Callable[[], int],
        *,
        allowed_sizes: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._hooks = hooks
        self._spec = backend.spec
        self._assembler = Assembler(backend.spec, max_rows)
        self._clock = clock
        self._allowed_sizes = allowed_sizes

    def run(self, members: Sequence[Ticket]) -> Result:
        """One call of the model with the rows of all requests that could be decoded. Raises whatever it raises."""
        clock = self._clock
        begun_ns = clock()
        arrays = self._assembler.assemble(members)
        requests = [_Request(place, member.rows, member.payload.parameters) for place, member in enumerate(members)]
        # A hook's exception knows this frame, and those whose failure it is will know the exception: nothing here may know them.
        del members
        result = Result(None, 0, 0, 0, {})
        result.answers = [None] * len(requests)
        try:
            if self._hooks.decodes:
                requests, decoded = _sorted(result, requests, self._decoded(arrays, requests))
                arrays = [np.concatenate(column) for column in zip(*decoded, strict=True)]
            result.model_rows = rows = sum([request.rows for request in requests])
            if not requests:
                return result
            parameters = [dict(request.parameters or {}) for request in requests for _ in range(request.rows)]
            missing = next_allowed(self._allowed_sizes, rows) - rows
            if missing:
                arrays = [np.concatenate((array, np.repeat(array[-1:], missing, axis=0))) for array in arrays]
                parameters += [dict(parameters[-1]) for _ in range(missing)]
                result.tokens, result.padded_tokens = rows, rows + missing
            ready_ns = clock()
            raw = self._backend.infer(arrays, parameters if self._spec.uses_parameters else None)
            inferred_ns = clock()
            try:
                raw.check(rows + missing)
            except ModelFailed as error:
                return Result(None, 0, 0, 0, refused=error)
            requests, answers = _sorted(result, requests, self._encoded(raw, requests))
            for request, answer in zip(requests, answers, strict=True):
                result.answers[request.place] = answer
            result.input_ns, result.infer_ns, result.output_ns = ready_ns - begun_ns, inferred_ns - ready_ns, clock() - inferred_ns
            return result
        finally:
            del result

    def _decoded(self, arrays: Sequence[Array], requests: Sequence[_Request]) -> list[Any]:
        """What the model is given for each request, or why it is not."""
        ends = accumulate([request.rows for request in requests])
        return [
            self._decode([array[end - request.rows : end] for array in arrays], request.parameters)
            for end, request in zip(ends, requests, strict=True)
        ]

    def _decode(self, own: Sequence[Array], parameters: Mapping[str, Any] | None) -> list[Array] | Exception:
        try:
            return self._hooks.decode(own, parameters)
        except Exception as error:
            return _own_failure(error)

    def _encoded(self, raw: Raw, requests: Sequence[_Request]) -> list[Any]:
        """What each request is answered, or why it is not."""
        ends = accumulate([request.rows for request in requests])
        return [self._encode(raw, end - request.rows, request) for end, request in zip(ends, requests, strict=True)]

    def _encode(self, raw: Raw, first: int, request: _Request) -> Answer | Exception:
        try:
            outputs = self._hooks.encode(raw, first, request.rows, request.parameters)
            return make_answer(self._spec, outputs, request.rows)
        except Exception as error:
            return _own_failure(error)

    def contents(self, member: Ticket) -> Contents | None:
        """The rows that the member stands for, their shapes, and its parameters, which hooks may see."""
        return payload_contents(member, with_parameters=True)

    def close(self) -> None:
        """Free the model."""
        self._backend.close()


def _own_failure(error: Exception) -> Exception:
    """What a hook raised, as its request's failure. Lack of memory is nobody's, and gets out."""
    if is_out_of_memory(error):
        raise error
    return model_error(error)


def _sorted(result: Result, requests: Sequence[_Request], values: Sequence[Any]) -> tuple[list[_Request], list[Any]]:
    """Those requests that have a value, with it; failures of the others go into the result."""
    failures = {request.place: value for request, value in zip(requests, values, strict=True) if isinstance(value, Exception)}
    result.failures = {**(result.failures or {}), **failures}
    kept = [request for request in requests if request.place not in failures]
    return kept, [value for value in values if not isinstance(value, Exception)]
