"""The classification extension: a tensor of scores becomes, row by row, the k best as `"value:index[:label]"`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shoal.errors import BadRequest
from shoal.protocols.oip_head import Array

__all__ = ["classify"]


def _descending(scores: Array) -> Array:
    """Sort keys that put the best first; equal scores keep their order, NaN comes last. `~` mirrors integers without overflow."""
    return -scores if scores.dtype.kind == "f" else ~scores


def classify(scores: Array, k: int, labels: Sequence[str] | None, batched: bool, name: str) -> Array:
    """Top-k of `scores`: object array of bytes, shape [rows, min(k, classes)], or [min(k, classes)] when there is no batch.

    Every row is taken as one flat list of classes. Values are printed with the fewest digits that tell them apart; the label is
    left out where there is none. Raises `BadRequest` for tensors that hold no numbers.
    """
    if scores.dtype.kind not in "fiub":
        raise BadRequest(f'outputs "{name}": classification needs a numeric output')
    rows = scores.shape[0] if batched and scores.ndim else 1
    flat = scores.reshape(rows, prod(scores.shape) // max(rows, 1))
    top = np.argsort(_descending(flat), axis=1, kind="stable")[:, :k]
    result = np.empty(top.shape, dtype=object)
    for row, indices in enumerate(top.tolist()):
        for rank, index in enumerate(indices):
            text = f"{flat[row, index]!s}:{index}"  # str, because formatting would widen a narrow float
            if labels is not None and index < len(labels):
                text = f"{text}:{labels[index]}"
            result[row, rank] = text.encode()
    return result if batched else result[0]
