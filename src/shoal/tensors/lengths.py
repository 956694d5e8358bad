"""Rows of different length in one batch: what a request may bring, what it batches with, and how long it is for the scheduler.

A `LengthPlan` stands between what clients see of a model (`spec`) and what its backend takes (`model`): masks, lengths and offsets
that clients may leave out, or never see, are inputs of the backend all the same. It is made by `length_compile.py` and followed by
`padding.py`, which lays out batches and cuts answers back. Descriptions and shapes only; no rows are copied here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Final

import numpy as np

from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import BadRequest
from shoal.tensors.payload import InputData, Payload
from shoal.tensors.signature import Binding, TensorLike, check_tensor, match_names

__all__ = ["ABSENT", "InputRule", "LengthGroup", "LengthPlan", "Role"]

ABSENT: Final = b""
"""Stands in a payload for an input that the client left out; whatever a client sends has at least one element."""


class Role(Enum):
    """What becomes of one input of the model when rows of different length meet."""

    PLAIN = "plain"
    PADDED = "padded"
    RAGGED = "ragged"
    MASK = "mask"
    LENGTH = "length"
    OFFSETS = "offsets"


@dataclass(frozen=True, slots=True)
class InputRule:
    """One input: its role, the group of inputs with which it varies (-1: none), along which axis, and one element of padding.

    `axis` counts the client's dimensions, the batch as 0. `fill` is the element's bytes, empty for BYTES.
    """

    role: Role = Role.PLAIN
    group: int = -1
    axis: int = 0
    fill: bytes = b""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Inputs that are of one length in every request. `leader` is the place of one of them that clients cannot leave out."""

    policy: str
    name: str
    leader: int
    axis: int
    edges: tuple[int, ...] = ()
    ratio: float | None = None
    max_length: int | None = None

    def check(self, length: int) -> None:
        """Raise `BadRequest` for rows that are too long."""
        limit = self.edges[-1] if self.edges else None
        if self.max_length is not None:
            limit = self.max_length if limit is None else min(limit, self.max_length)
        if limit is not None and length > limit:
            raise BadRequest(f'input "{self.name}": rows are {length} long along axis {self.axis}, at most {limit} is allowed')

    def padded(self, longest: int) -> int:
        """How long rows are made when the longest of them is so long: its bucket's edge, or its own length."""
        if self.edges:
            edge = self.edges[bisect_left(self.edges, longest)]
        elif self.ratio is not None:
            power = max(0, int(math.log(longest) / math.log(self.ratio)) - 1)
            while (edge := math.ceil(self.ratio**power - 1e-9)) < longest:
                power += 1
        else:
            return longest
        return edge if self.max_length is None else min(edge, self.max_length)


class LengthPlan:
    """Length policies against one model.

    `rules` has one entry per input of `model`, `crops` one per output: its axes that are as long as a group's rows, as (axis,
    group). `mixes`: whether rows of different length can meet at all. `groups` are what varies independently of each other.
    """

    def __init__(
        self,
        model: ModelSpec,
        spec: ModelSpec,
        rules: Sequence[InputRule],
        groups: Sequence[LengthGroup],
        crops: Sequence[tuple[tuple[int, int], ...]],
    ) -> None:
        self.model = model
        self.spec = spec
        self.rules = tuple(rules)
        self.groups = tuple(groups)
        self.crops = tuple(crops)
        self.mixes = any(group.policy != "exact" for group in groups)
        self._leaders = tuple([(group.leader, group.axis - 1) for group in groups])
        seen = {tensor.name: place for place, tensor in enumerate(spec.inputs)}
        self._seen: tuple[tuple[int, TensorSpec] | None, ...] = tuple(
            [(seen[tensor.name], spec.inputs[seen[tensor.name]]) if tensor.name in seen else None for tensor in model.inputs]
        )
        self._told = tuple([place for place, rule in enumerate(rules) if rule.role is Role.LENGTH and self._seen[place]])

    def bind(self, tensors: Sequence[TensorLike], extra: Hashable = None) -> Binding:
        """As `signature.bind`, with one entry per input of the backend: -1 in `order` where the client left it out.

        Raises `BadRequest` also for inputs that should be of one length and are not, and for rows that are too long.
        """
        positions = match_names(self.spec, tensors)
        order: list[int] = []
        shapes: list[tuple[int, ...]] = []
        equal: list[Hashable] = []
        lengths = [0] * len(self.groups)
        rows = row_bytes = 0
        first = ""
        for rule, seen in zip(self.rules, self._seen, strict=True):
            position = -1 if seen is None else positions[seen[0]]
            order.append(position)
            if position < 0 or seen is None:
                shapes.append(())
                equal.append(None)
                continue
            expected, tensor = seen[1], tensors[position]
            check_tensor(expected, tensor, True)
            if not first:
                rows, first = tensor.shape[0], expected.name
            elif tensor.shape[0] != rows:
                raise BadRequest(f'input "{expected.name}": has {tensor.shape[0]} rows, but input "{first}" has {rows}')
            shape = tuple(tensor.shape[1:])
            shapes.append(shape)
            row_bytes += prod(shape) * DATATYPES[expected.datatype].itemsize
            if rule.axis:
                self._measure(rule, expected.name, shape[rule.axis - 1], lengths)
            equal.append(None if rule.role in (Role.MASK, Role.LENGTH) else self._equal(rule, shape))
        length = 0
        for group, own in zip(self.groups, lengths, strict=True):
            if group.policy != "exact":
                length += group.padded(own)
        signature = tuple(equal)
        return Binding(rows, signature if extra is None else (signature, extra), tuple(order), tuple(shapes), row_bytes, length)

    def _equal(self, rule: InputRule, shape: tuple[int, ...]) -> Hashable:
        """What of an input's row shape must be equal in one batch."""
        if rule.role is Role.PLAIN:
            return shape
        group = self.groups[rule.group]
        edge = group.padded(shape[rule.axis - 1]) if group.policy == "bucket" else 0
        return (*shape[: rule.axis - 1], edge, *shape[rule.axis :])

    def _measure(self, rule: InputRule, name: str, length: int, lengths: list[int]) -> None:
        known, group = lengths[rule.group], self.groups[rule.group]
        if not known:
            group.check(length)
        elif known != length:
            along = f'input "{group.name}", with which it varies, is {known}'
            raise BadRequest(f'input "{name}": is {length} long along axis {rule.axis}, but {along}')
        lengths[rule.group] = length

    def lengths_of(self, payload: Payload) -> tuple[int, ...]:
        """How long the rows of a request are, in each group."""
        shapes = payload.row_shapes
        return tuple([shapes[leader][axis] for leader, axis in self._leaders])

    def check_payload(self, payload: Payload) -> None:
        """Raise `BadRequest` where a length that the client sent says more than its rows hold."""
        for place in self._told:
            data = payload.inputs[place]
            if data is ABSENT:
                continue
            tensor = self.model.inputs[place]
            held = self.lengths_of(payload)[self.rules[place].group]
            values = _values(data, tensor)
            if int(values.min()) < 0 or int(values.max()) > held:
                wrong = int(values[(values < 0) | (values > held)][0])
                raise BadRequest(f'input "{tensor.name}": says {wrong}, but the rows are {held} long')


def _values(data: InputData, tensor: TensorSpec) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if isinstance(data, np.ndarray):
        return data.reshape(-1)
    return np.frombuffer(data, DATATYPES[tensor.datatype].numpy)
