"""What a ticket carries to its executor: the input data of one request, in the model's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array", "InputData", "Payload"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
InputData: TypeAlias = bytes | bytearray | memoryview | Array


class Payload:
    """Inputs of one request.

    `inputs`: one per input of the model, in its order; little-endian contiguous bytes (a memoryview of them has format `B`), or an
    array of the datatype's dtype. BYTES inputs are arrays of objects. `row_shapes`: as in `Binding`; sizes are already checked.
    `parameters`: the request's parameters, or None. The owner does not write to the data until the request has ended.
    """

    __slots__ = ("inputs", "parameters", "row_shapes")

    def __init__(
        self,
        inputs: Sequence[InputData],
        row_shapes: tuple[tuple[int, ...], ...],
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.inputs = inputs
        self.row_shapes = row_shapes
        self.parameters = parameters
