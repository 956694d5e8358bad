"""The load-time probe of models whose batches hold rows of different length: padded (or end to end) must be the same as alone.

It takes the place of `backends/probe.py` for them, and goes the way that requests go: the same runner lays rows out and cuts
answers back, so a mask that the model does not heed, or an output that is not cut, shows here and not in an answer. Alone means
without any padding, also where buckets would pad. No loop, no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import msgspec
import numpy as np

from shoal.backends.base import Array, Backend
from shoal.backends.probe import ProbeReport, made_up_rows, row_difference
from shoal.config.settings import LengthSettings
from shoal.core.ticket import Ticket
from shoal.datatypes import DATATYPES
from shoal.engine.outcome import Result
from shoal.engine.runner import TensorRunner
from shoal.errors import ConfigError
from shoal.tensors.length_compile import compile_lengths
from shoal.tensors.lengths import ABSENT, LengthPlan, Role
from shoal.tensors.payload import InputData, Payload

__all__ = ["LengthProbe", "probe_lengths"]

_LENGTHS: Final = ((8, 3), (2, 1), (32, 12), (224, 80))
"""Long and short rows, tried in this order until the model takes both."""

_MAX_INPUT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class LengthProbe:
    """What was seen. `points` are (tokens run, longest row, nanoseconds) of batches, for the estimates of batch times."""

    report: ProbeReport
    points: tuple[tuple[int, int, int], ...] = ()


def probe_lengths(
    backend: Backend,
    plan: LengthPlan,
    settings: Mapping[str, LengthSettings],
    max_batch_size: int,
    clock: Callable[[], int],
    *,
    seed: int = 0,
) -> LengthProbe:
    """Run made-up rows of two lengths alone and together. Raises `ConfigError` where they differ; nothing else of the model's."""
    unpadded = {
        name: msgspec.structs.replace(entry, policy="pad", edges=(), ratio=None) if entry.policy == "bucket" else entry
        for name, entry in settings.items()
    }
    reference = compile_lengths(plan.model, unpadded)
    assert reference is not None
    problem = ""
    for lengths in dict.fromkeys(_within(plan, long, short) for long, short in _LENGTHS):
        probing = _Probing(backend, plan, reference, lengths, max_batch_size, clock, seed)
        try:
            probing.alone(0)
            probing.alone(1)
        except _Refused:
            raise
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            return probing.compare()
    warning = f"it was not probed with rows of different length, because it raised on made-up values: {problem}"
    return LengthProbe(ProbeReport(True, None, {}, None, (warning,)))


def _within(plan: LengthPlan, long: int, short: int) -> tuple[int, int]:
    """The two lengths, shortened to what all groups allow."""
    for group in plan.groups:
        for limit in (*group.edges[-1:], group.max_length):
            if limit is not None:
                long = min(long, limit)
    return long, min(short, max(1, long - 1))


class _Refused(ConfigError):
    """What the model does with rows of different length is wrong."""


class _Probing:
    """One probe under way, at one pair of lengths."""

    def __init__(
        self,
        backend: Backend,
        plan: LengthPlan,
        reference: LengthPlan,
        lengths: tuple[int, int],
        max_batch_size: int,
        clock: Callable[[], int],
        seed: int,
    ) -> None:
        self.plan = plan
        self.long, self.short = lengths
        self.seed = seed
        self.runner = TensorRunner(backend, max_batch_size, clock, lengths=plan)
        self.reference = TensorRunner(backend, 1, clock, lengths=reference)
        self.max_batch_size = max_batch_size
        self.found: dict[int, list[Array]] = {}
        self.points: list[tuple[int, int, int]] = []
        self.timings_ns: dict[int, int] = {}

    def row(self, number: int) -> Ticket:
        """Made-up row `number`, long or short by turns, the same in whatever company."""
        inputs: list[InputData] = []
        shapes: list[tuple[int, ...]] = []
        seen = {tensor.name: tensor for tensor in self.plan.spec.inputs}
        for index, (tensor, rule) in enumerate(zip(self.plan.model.inputs, self.plan.rules, strict=True)):
            if rule.role in (Role.MASK, Role.LENGTH, Role.OFFSETS):
                inputs.append(ABSENT)
                shapes.append(())
                continue
            shape = list(seen[tensor.name].shape)
            if rule.axis:
                shape[rule.axis] = self.length(number, rule.group)
            sized = replace(seen[tensor.name], shape=tuple(shape), symbols=())
            rows = made_up_rows(sized, 1, first=number, seed=self.seed + 7919 * index, variable_dim=self.long)
            inputs.append(rows)
            shapes.append(rows.shape[1:])
        return Ticket(1, payload=Payload(inputs, tuple(shapes), {}))

    def length(self, number: int, group: int) -> int:
        """Of a row, in one group; groups take turns, so that none hides behind another."""
        return self.long if (number + group) % 2 == 0 else self.short

    def alone(self, number: int) -> list[Array]:
        """What the model makes of a row that nothing is added to. Raises what the model raises."""
        if number not in self.found:
            self.found[number] = self._taken(self.reference.run([self.row(number)]), 0, 1)
        return self.found[number]

    def compare(self) -> LengthProbe:
        """All of it, once the model is known to take both lengths."""
        warnings: list[str] = []
        first = self.alone(0)
        del self.found[0]
        outputs = self.plan.spec.outputs
        deterministic = all(
            one.shape == two.shape and row_difference(one, two, tensor.datatype) is None
            for tensor, one, two in zip(outputs, first, self.alone(0), strict=True)
        )
        if not deterministic:
            warnings.append("the same row twice gave two answers, so rows alone and beside others were not compared")
        row_bytes = sum(prod(shape) * _itemsize(self.plan, index) for index, shape in enumerate(self.row(0).payload.row_shapes))
        largest = max(1, min(self.max_batch_size, _MAX_INPUT_BYTES // max(1, row_bytes)))
        for company in ([0], [1], [1, 0], [0, 1], *[list(range(rows)) for rows in sorted({3, largest}) if rows > 2]):
            if len(company) <= largest:
                self._together(company, deterministic)
        report = ProbeReport(True, None, self.timings_ns, deterministic, tuple(warnings))
        return LengthProbe(report, tuple(self.points))

    def _together(self, numbers: Sequence[int], deterministic: bool) -> None:
        """Rows in company, each against itself alone. Raises `ConfigError`."""
        result: Result | None = None
        for _ in range(2):  # the first touch of memory should not count
            try:
                result = self.runner.run([self.row(number) for number in numbers])
            except Exception as error:
                text = f"it raised on {self._described(numbers)}, though not on each alone: {type(error).__name__}: {error}"
                raise _refused(text) from None
            self.timings_ns[len(numbers)] = result.infer_ns
        assert result is not None
        longest = max(sum(self.length(number, group) for group in range(len(self.plan.groups))) for number in numbers)
        self.points.append((result.padded_tokens, longest, result.infer_ns))
        for place in sorted({0, 1, 2, len(numbers) - 1}):
            if place >= len(numbers):
                continue
            company = self._taken(result, place, len(numbers))
            if not deterministic:
                continue
            for tensor, alone, other in zip(self.plan.spec.outputs, self.alone(numbers[place]), company, strict=True):
                difference = row_difference(alone, other, tensor.datatype)
                if difference is not None:
                    length = self.length(numbers[place], 0)
                    what = f"output '{tensor.name}': a row of length {length} among {self._described(numbers)}"
                    raise _refused(f"{what} is not the same row alone ({difference})")

    def _described(self, numbers: Sequence[int]) -> str:
        lengths = sorted({self.length(number, 0) for number in numbers})
        return f"{len(numbers)} row{'s' if len(numbers) > 1 else ''} of length {' and '.join(map(str, lengths))}"

    def _taken(self, result: Result, place: int, rows: int) -> list[Array]:
        """One row of what came back, copied: a backend may write to it again."""
        if result.refused is not None:
            raise _refused(str(result.refused))
        if result.failures:
            raise _refused(str(next(iter(result.failures.values()))))
        answer, row = (result.answer, place) if result.answers is None else (result.answers[place], 0)
        return [np.array(answer.array(index, row, 1)[0]) for index in range(len(self.plan.spec.outputs))]


def _itemsize(plan: LengthPlan, index: int) -> int:
    return DATATYPES[plan.model.inputs[index].datatype].itemsize


def _refused(reason: str) -> _Refused:
    return _Refused(
        f"rows of different length cannot share its batches: {reason}. Mend the model or batching.lengths "
        '(is padding masked everywhere? are all outputs named that vary with the length?), or set policy = "exact"'
    )
