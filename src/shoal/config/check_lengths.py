"""Rules of `batching.lengths` that need no model: what a policy needs, and what has no meaning with it.

Whether the inputs, axes and outputs exist is judged when the model is loaded (`tensors/length_compile.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shoal.config.settings import LengthSettings

__all__ = ["MASK_MISSING", "length_faults"]

MASK_MISSING = (
    "is missing; a model that is not told what is padding takes it for data: name the input that tells it, "
    'with mask or with length, or choose policy = "exact"'
)

_MIN_RATIO = 1.01
"""Finer buckets would hold a single length each, up to lengths that nobody has."""


def length_faults(lengths: Mapping[str, LengthSettings]) -> Iterator[tuple[str, str]]:
    """(setting below `lengths`, what is wrong and what to change) for every fault, in the order of the entries."""
    told = any(entry.mask is not None or entry.length is not None for entry in lengths.values())
    for name, entry in lengths.items():
        for field, message in _entry_faults(entry):
            yield f"{name}.{field}", message
        if entry.policy == "ragged" and entry.offsets is None and not told:
            text = (
                "is missing; ragged rows need the input that says where each begins, or length = the one that says how long each is"
            )
            yield f"{name}.offsets", text
        elif entry.policy in ("pad", "bucket") and not told:
            yield f"{name}.mask", MASK_MISSING


def _entry_faults(entry: LengthSettings) -> Iterator[tuple[str, str]]:
    policy = entry.policy
    if entry.axis < 1:
        yield "axis", f"is {entry.axis}; axis 0 is the batch, so the axis of the length is 1 or more"
    if entry.max_length is not None and entry.max_length < 1:
        yield "max_length", f"is {entry.max_length}, must be 1 or more"
    yield from _bucket_faults(entry)
    if entry.offsets is not None and policy != "ragged":
        yield "offsets", f'has no meaning with policy = "{policy}"; only "ragged" has offsets'
    if policy == "exact":
        for field in ("pad_value", "mask", "length"):
            if getattr(entry, field) is not None:
                yield field, 'has no meaning with policy = "exact", which pads nothing; choose "pad" or "bucket"'
        if entry.outputs:
            yield "outputs", 'has no meaning with policy = "exact", which cuts nothing back'
    elif policy == "ragged":
        for field in ("pad_value", "mask"):
            if getattr(entry, field) is not None:
                yield field, 'has no meaning with policy = "ragged", which pads nothing'
        if entry.axis > 1:
            yield "axis", f"is {entry.axis}; ragged rows are laid end to end, so their length is axis 1"
    elif entry.pad_value is None:
        yield "pad_value", f'is missing; policy = "{policy}" needs what to pad with, for example pad_value = 0'
    elif not math.isfinite(entry.pad_value):
        yield "pad_value", f"is {entry.pad_value}, must be a finite number"
    for name, axes in entry.outputs.items():
        if any(axis < 1 for axis in axes) or len(set(axes)) != len(axes):
            yield f"outputs.{name}", f"is {list(axes)}, must list different axes of 1 or more (0 is the batch)"
        elif policy == "ragged" and axes not in ((), (1,)):
            yield f"outputs.{name}", f"is {list(axes)}; of ragged rows only axis 1 can be as long as the row, so [1] or []"


def _bucket_faults(entry: LengthSettings) -> Iterator[tuple[str, str]]:
    if entry.policy != "bucket":
        for field in ("edges", "ratio"):
            if getattr(entry, field):
                yield field, f'has no meaning with policy = "{entry.policy}"; only "bucket" has edges or a ratio'
        return
    if bool(entry.edges) == (entry.ratio is not None):
        yield "edges", 'and ratio: policy = "bucket" needs one of the two, for example edges = [32, 64, 128] or ratio = 1.25'
    if list(entry.edges) != sorted(set(entry.edges)) or any(edge < 1 for edge in entry.edges):
        yield "edges", f"is {list(entry.edges)}, must rise from 1 or more, each number once"
    if entry.ratio is not None and not (math.isfinite(entry.ratio) and entry.ratio >= _MIN_RATIO):
        yield "ratio", f"is {entry.ratio:g}, must be {_MIN_RATIO:g} or more: each bucket is that much longer than the one before"
