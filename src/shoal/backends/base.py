"""What every backend promises. Backends know nothing of batches, tickets or requests: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.datatypes import ModelSpec

Array = np.ndarray[Any, np.dtype[Any]]


class Backend(Protocol):
    """A loaded model.

    `run` takes one contiguous array per input of `spec.inputs`, in that order, all with the same number of rows in front when
    `spec.batchable`, and returns one array per output in the order of `spec.outputs`. The outputs never share memory with the
    inputs, because input buffers are reused. It is called from one executor thread at a time; with several executors each has
    its own backend object (`clone`). `parameters` is given, one mapping per row, only when `spec.uses_parameters`.
    Whatever it raises is the model's fault and ends the rows it was given.
    """

    spec: ModelSpec

    def run(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Sequence[Array]:
        """Run rows together. Raises whatever the model raises."""
        ...

    def clone(self) -> Backend:
        """Another executor's own instance; may share read-only weights, or be the same object if that may run twice at once."""
        ...

    def close(self) -> None:
        """Free what the model holds. Never called while `run` is under way."""
        ...
