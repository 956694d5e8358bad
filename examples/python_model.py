"""Models in plain Python. Serve one of them with

    shoal serve examples/python_model.py:Standardize
    shoal serve examples/python_model.py:vector_length

A model says what goes in and out, row by row: datatype and shape *without* the batch dimension, -1 for a dimension that varies.
It is called with one array per input, by name, that has the batch in front, and must return as many rows as it was given. Whether
it gets one row or many is Shoal's affair; write for many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


class Standardize:
    """Four measurements to their distance from the mean, in standard deviations, and the largest of those."""

    inputs = {"x": ("FP32", (4,))}  # noqa: RUF012
    outputs = {"z": ("FP32", (4,)), "largest": ("FP32", (1,))}  # noqa: RUF012

    def load(self) -> None:
        """Called once before the first batch: read weights and the like here, not while importing."""
        self.mean = np.array([5.8, 3.1, 3.8, 1.2], np.float32)
        self.deviation = np.array([0.8, 0.4, 1.8, 0.8], np.float32)

    def __call__(self, x: Rows) -> dict[str, Rows]:
        """[N, 4] to [N, 4] and [N, 1]."""
        z = (x - self.mean) / self.deviation
        return {"z": z, "largest": np.abs(z).max(axis=1, keepdims=True)}


def vector_length(x: Rows) -> Rows:
    """A plain function with the same two attributes is a model too: [N, 3] to [N, 1]."""
    length: Rows = np.sqrt((x * x).sum(axis=1, keepdims=True))
    return length


vector_length.inputs = {"x": ("FP32", (3,))}  # type: ignore[attr-defined]
vector_length.outputs = {"length": ("FP32", (1,))}  # type: ignore[attr-defined]
