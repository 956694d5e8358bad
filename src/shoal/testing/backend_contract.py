"""What every backend must do, as tests that any backend can be put through. Nothing here is specific to one kind of model.

    class TestMyBackend(BackendContract):
        def make(self) -> Backend:
            return MyBackend(...)

pytest collects the inherited tests. The model should be deterministic and accept the made-up rows of `make_inputs`, which may be
overridden.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shoal.backends.base import Array, Backend
from shoal.backends.probe import made_up_rows, row_difference
from shoal.datatypes import DATATYPES

__all__ = ["BackendContract"]


class BackendContract:
    """Inherit, and override `make` (and `make_inputs` if the model is particular about its values)."""

    def make(self) -> Backend:
        """A freshly loaded backend, closed by the test that asked for it."""
        raise NotImplementedError

    def make_inputs(self, backend: Backend, rows: int, first: int = 0) -> list[Array]:
        """Rows `first … first + rows - 1` for every input of the spec; row k is always the same."""
        return [
            made_up_rows(tensor, rows, first=first, seed=index, variable_dim=4) for index, tensor in enumerate(backend.spec.inputs)
        ]

    def run(self, backend: Backend, inputs: Sequence[Array]) -> list[Array]:
        """Run with empty parameters where the model takes them."""
        parameters: list[dict[str, object]] | None = [{} for _ in range(len(inputs[0]))] if backend.spec.uses_parameters else None
        return list(backend.run(inputs, parameters))

    def assert_same(self, backend: Backend, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """All rows of all outputs agree within the probe's tolerance."""
        for tensor, one, two in zip(backend.spec.outputs, expected, got, strict=True):
            assert row_difference(one, two, tensor.datatype) is None, tensor.name

    def test_the_description_is_complete(self) -> None:
        """Names are unique, datatypes known, and the first dimension of a model that batches is variable."""
        backend = self.make()
        spec = backend.spec
        assert spec.platform
        assert spec.outputs
        for tensors in (spec.inputs, spec.outputs):
            names = [tensor.name for tensor in tensors]
            assert len(set(names)) == len(names)
            assert all(tensor.datatype in DATATYPES for tensor in tensors)
        assert spec.batchable
        assert spec.unbatchable_reason is None
        assert all(tensor.shape[0] == -1 for tensor in (*spec.inputs, *spec.outputs))
        assert set(spec.labels) <= {tensor.name for tensor in spec.outputs}
        backend.close()

    def test_outputs_come_in_order_with_declared_types_and_all_rows(self) -> None:
        """One contiguous array per output, of the declared dtype and row shape, with as many rows as went in."""
        backend = self.make()
        for rows in (1, 2, 5):
            outputs = self.run(backend, self.make_inputs(backend, rows))
            assert len(outputs) == len(backend.spec.outputs)
            for tensor, array in zip(backend.spec.outputs, outputs, strict=True):
                assert array.dtype == DATATYPES[tensor.datatype].numpy
                assert array.flags.c_contiguous
                assert array.shape[0] == rows
                assert array.ndim == len(tensor.shape)
                assert all(want in (-1, have) for want, have in zip(tensor.row_shape, array.shape[1:], strict=True))
                if tensor.datatype == "BYTES":
                    assert all(isinstance(item, bytes) for item in array.reshape(-1))
        backend.close()

    def test_a_row_in_company_is_the_row_alone(self) -> None:
        """Row k of a batch equals the answer to row k alone."""
        backend = self.make()
        together = self.run(backend, self.make_inputs(backend, 4))
        for row in range(4):
            alone = self.run(backend, self.make_inputs(backend, 1, first=row))
            self.assert_same(backend, alone, [array[row : row + 1] for array in together])
        backend.close()

    def test_results_outlive_the_inputs_and_the_next_run(self) -> None:
        """Outputs share no memory with inputs, and neither overwriting the inputs nor running again changes them."""
        backend = self.make()
        inputs = self.make_inputs(backend, 3)
        outputs = self.run(backend, inputs)
        assert not any(np.shares_memory(one, two) for one in outputs for two in inputs)
        kept = [array.copy() for array in outputs]
        others = self.make_inputs(backend, 3, first=50)
        for array, other in zip(inputs, others, strict=True):
            array[...] = other
        self.run(backend, inputs)
        self.assert_same(backend, kept, outputs)
        backend.close()

    def test_inputs_may_be_part_of_a_larger_buffer_or_read_only(self) -> None:
        """A slice of a reused buffer, and memory that may not be written, give the same answer as an array of one's own."""
        backend = self.make()
        expected = self.run(backend, self.make_inputs(backend, 2))
        self.assert_same(backend, expected, self.run(backend, [array[:2] for array in self.make_inputs(backend, 6)]))
        frozen = self.make_inputs(backend, 2)
        for array in frozen:
            array.flags.writeable = False
        self.assert_same(backend, expected, self.run(backend, frozen))
        backend.close()

    def test_clones_agree_and_live_apart(self) -> None:
        """A clone has the same description and answers, also after the original is closed, and the other way round."""
        first = self.make()
        expected = self.run(first, self.make_inputs(first, 2))
        second = first.clone()
        third = first.clone()
        assert second.spec == first.spec
        third.close()
        self.assert_same(first, expected, self.run(first, self.make_inputs(first, 2)))
        first.close()
        self.assert_same(second, expected, self.run(second, self.make_inputs(second, 2)))
        second.close()

    def test_clones_run_at_the_same_time(self) -> None:
        """Two threads, each with its own instance and its own rows: every answer is to the thread's own question."""
        backends = [first := self.make(), first.clone()]
        expected = [self.run(backend, self.make_inputs(backend, 2, first=10 * index)) for index, backend in enumerate(backends)]

        def work(index: int) -> None:
            for _ in range(50):
                got = self.run(backends[index], self.make_inputs(backends[index], 2, first=10 * index))
                self.assert_same(backends[index], expected[index], got)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, index) for index in range(2)]:
                done.result()
        for backend in backends:
            backend.close()
