"""The load-time probe: before a model may answer for several users at once, it shows that their rows stay apart.

It runs made-up rows in batches of 1, 2, 3 and the maximum, and checks that every output has as many rows as went in, and that a
row in company is the row alone. What a model fails here it would do to real users: shifted, missing or blended answers. The
same runs warm the model up, and their times are reported. A model that cannot be judged (it raises on made-up values, or answers
differently each time) is let through with a warning. Nothing here knows of queues or requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shoal.backends.base import Array, Backend
from shoal.datatypes import DATATYPES, TensorSpec
from shoal.errors import ConfigError

__all__ = ["TOLERANCE", "ProbeReport", "made_up_rows", "probe", "require_batchable", "row_difference"]

TOLERANCE: Final[Mapping[str, float]] = {"FP64": 1e-9, "FP32": 1e-4, "FP16": 1e-2, "BF16": 5e-2}
"""How far a row in company may be from the same row alone, relative to the row's largest magnitude (at least 0.1). Other kernels
and another order of sums are used for other batch sizes; that costs some units of the last place, more in deep networks.
Integers, booleans and bytes must agree exactly."""

_VARIABLE_DIMS: Final = (8, 2, 32, 224, 1)
"""Tried in this order for all variable dimensions at once, until the model takes one row of it."""

_MAX_INPUT_BYTES: Final = 64 << 20
_REPEAT_BELOW_NS: Final = 50_000_000
"""Batches faster than this are run twice, so that their time is not that of the first touch of memory."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe saw.

    `batchable` is False with a `reason` when rows were wrong. `timings_ns` gives the time of a run by its number of rows.
    `deterministic` is False if the same row twice gave two answers, None if that was not found out. `warnings` are for the log.
    """

    batchable: bool
    reason: str | None = None
    timings_ns: Mapping[int, int] = field(default_factory=dict)
    deterministic: bool | None = None
    warnings: tuple[str, ...] = ()


class _Refuted(Exception):
    """The rows are wrong; the message says how."""


def probe(
    backend: Backend,
    max_batch_size: int,
    *,
    seed: int = 0,
    max_input_bytes: int = _MAX_INPUT_BYTES,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> ProbeReport:
    """Run the model on made-up rows and report. Raises nothing of the model's.

    The largest batch is `max_batch_size` rows, or as many as fit into `max_input_bytes` of input. With a maximum of 1, or a model
    without a batch dimension, one run warms it up and nothing is compared.
    """
    spec = backend.spec
    probing = _Probing(backend, seed, clock_ns)
    if not spec.batchable:
        warning = probing.start(whole=True)
        return ProbeReport(False, spec.unbatchable_reason, probing.timings_ns, None, (warning,) if warning else ())
    warning = probing.start()
    if warning:
        return ProbeReport(True, None, {}, None, (warning,))
    row_bytes = max(1, sum(array.nbytes for array in probing.rows(1, 0)))
    largest = max(1, min(max_batch_size, max_input_bytes // row_bytes))
    warnings: list[str] = []
    if largest < max_batch_size:
        warnings.append(f"probed up to {largest} rows only, not {max_batch_size}: more would need over {max_input_bytes >> 20} MiB")
    try:
        deterministic = probing.alone_twice()
        if not deterministic:
            warnings.append("the same row twice gave two answers, so rows alone and in company were not compared")
        for rows in sorted({2, 3, largest}):
            if rows <= largest and rows > 1:
                probing.company(rows, compare=deterministic)
    except _Refuted as error:
        return ProbeReport(False, str(error), probing.timings_ns, probing.deterministic, tuple(warnings))
    return ProbeReport(True, None, probing.timings_ns, deterministic, tuple(warnings))


def require_batchable(report: ProbeReport, name: str, max_batch_size: int) -> None:
    """Raise `ConfigError` if rows were wrong and the settings would batch them nevertheless.

    A model whose description already says that it has no batch dimension is not touched: its requests run alone anyway. (The
    caller knows that from `spec.batchable`.)
    """
    if not report.batchable and max_batch_size > 1:
        raise ConfigError(
            f"model '{name}' cannot be batched: {report.reason}. Mend the model, or set max_batch_size = 1 to run one row at a time"
        )


class _Probing:
    """One probe under way: the sizes chosen for variable dimensions, the answers of rows alone, the times."""

    def __init__(self, backend: Backend, seed: int, clock_ns: Callable[[], int]) -> None:
        self.backend = backend
        self.seed = seed
        self.clock_ns = clock_ns
        self.timings_ns: dict[int, int] = {}
        self.deterministic: bool | None = None
        self.variable_dim = _VARIABLE_DIMS[0]
        self.alone: dict[int, list[Array]] = {}

    def rows(self, count: int, first: int) -> list[Array]:
        """`count` made-up rows of every input, from number `first` on; row k is the same in whatever company it is asked for."""
        return [
            made_up_rows(tensor, count, first=first, seed=self.seed + 7919 * index, variable_dim=self.variable_dim)
            for index, tensor in enumerate(self.backend.spec.inputs)
        ]

    def start(self, *, whole: bool = False) -> str | None:
        """Find sizes of the variable dimensions that the model takes. The text of a warning if there are none."""
        variable = any(-1 in (tensor.shape if whole else tensor.row_shape) for tensor in self.backend.spec.inputs)
        problem = ""
        for self.variable_dim in _VARIABLE_DIMS if variable else _VARIABLE_DIMS[:1]:
            try:
                self._run(self._whole() if whole else self.rows(1, 0), 1)
            except Exception as error:
                problem = problem or _shown(error)
            else:
                return None
        return f"it was not probed, because it raised on made-up values: {problem}"

    def _whole(self) -> list[Array]:
        wrapped = [TensorSpec(tensor.name, tensor.datatype, (-1, *tensor.shape)) for tensor in self.backend.spec.inputs]
        return [made_up_rows(tensor, 1, first=0, seed=self.seed, variable_dim=self.variable_dim)[0] for tensor in wrapped]

    def alone_twice(self) -> bool:
        """Row 0 twice: the same answer both times?"""
        first, second = self._single(0), self._single(0)
        self.deterministic = all(
            one.shape == two.shape and row_difference(one[0], two[0], tensor.datatype) is None
            for tensor, one, two in zip(self.backend.spec.outputs, first, second, strict=True)
        )
        return self.deterministic

    def company(self, rows: int, *, compare: bool) -> None:
        """A batch of `rows`; if `compare`, its first rows and its last against themselves alone. Raises `_Refuted`."""
        outputs = self._checked(self.rows(rows, 0), rows)
        if not compare:
            return
        for row in sorted({0, 1, 2, rows - 1}):
            if row >= rows:
                continue
            if row not in self.alone:
                self.alone[row] = self._single(row)
            for tensor, alone, company in zip(self.backend.spec.outputs, self.alone[row], outputs, strict=True):
                difference = row_difference(alone[0], company[row], tensor.datatype)
                if difference is not None:
                    raise _Refuted(
                        f"output '{tensor.name}': row {row} of a batch of {rows} is not the same row alone ({difference})"
                    )

    def _single(self, row: int) -> list[Array]:
        # Copied, because a backend may hand out memory that its next run overwrites: then rows would seem to agree.
        return [array.copy() for array in self._checked(self.rows(1, row), 1)]

    def _checked(self, inputs: list[Array], rows: int) -> Sequence[Array]:
        try:
            outputs = self._run(inputs, rows)
        except Exception as error:
            fewer = max(self.timings_ns, default=0)
            hint = "" if rows <= 3 else "; a smaller max_batch_size may do"
            raise _Refuted(f"it raised on {rows} rows, though not on {fewer}{hint}: {_shown(error)}") from None
        spec = self.backend.spec
        if len(outputs) != len(spec.outputs):
            raise _Refuted(f"it returned {len(outputs)} outputs, declared are {len(spec.outputs)}")
        for tensor, array in zip(spec.outputs, outputs, strict=True):
            got = array.shape[0] if array.ndim else "no"
            if got != rows:
                raise _Refuted(f"output '{tensor.name}' has {got} rows for a batch of {rows}")
        return outputs

    def _run(self, inputs: list[Array], rows: int) -> Sequence[Array]:
        parameters: list[Mapping[str, object]] | None = [{} for _ in range(rows)] if self.backend.spec.uses_parameters else None
        outputs, took = self._timed(inputs, parameters)
        if rows not in self.timings_ns and took < _REPEAT_BELOW_NS:
            outputs, took = self._timed(inputs, parameters)
        self.timings_ns[rows] = min(took, self.timings_ns.get(rows, took))
        return outputs

    def _timed(self, inputs: list[Array], parameters: list[Mapping[str, object]] | None) -> tuple[Sequence[Array], int]:
        own = [array.copy() for array in inputs]  # models may change their inputs in place
        started = self.clock_ns()
        outputs = self.backend.run(own, parameters)
        return outputs, self.clock_ns() - started


def made_up_rows(tensor: TensorSpec, rows: int, *, first: int, seed: int, variable_dim: int) -> Array:
    """Seeded rows `first … first + rows - 1` of an input: shape `(rows, *row_shape)` with `variable_dim` for each -1.

    Floats lie in [0, 1), in odd rows in [0, 0.5), so that what is scaled over the whole batch shows. Integers are 0 or 1, which
    are valid as token, type, mask and class ids; bytes are short decimal numbers.
    """
    shape = tuple(variable_dim if dim == -1 else dim for dim in tensor.row_shape)
    datatype = DATATYPES[tensor.datatype]
    array: Array = np.empty((rows, *shape), dtype=datatype.numpy)
    for row in range(rows):
        random = np.random.default_rng((seed, first + row))
        if tensor.datatype == "BYTES":
            values = np.empty(shape, dtype=object)
            values.reshape(-1)[:] = [b"%d" % number for number in random.integers(0, 1000, values.size)]
            array[row, ...] = values
        elif tensor.datatype in TOLERANCE:
            floats = random.random(shape, dtype=np.float32) * (1.0 if (first + row) % 2 == 0 else 0.5)
            array[row] = np.asarray(floats, np.float32).view(np.uint32) >> 16 if tensor.datatype == "BF16" else floats
        else:
            array[row] = random.integers(0, 2, shape)
    return array


def row_difference(alone: Array, company: Array, datatype: str) -> str | None:
    """How one row differs from another beyond `TOLERANCE`, in words; None if it does not. NaN equals NaN."""
    if alone.shape != company.shape:
        return f"shape {list(company.shape)} instead of {list(alone.shape)}"
    tolerance = TOLERANCE.get(datatype)
    if tolerance is None:
        different = int(np.count_nonzero(alone != company))
        return f"{different} of {alone.size} values differ" if different else None
    one, two = _as_double(alone, datatype), _as_double(company, datatype)
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    if same.all():
        return None
    finite = np.isfinite(one)
    if not (np.isfinite(two) == finite).all() or not same[~finite].all():
        return "infinite or NaN in one of them"
    scale = max(0.1, float(np.max(np.abs(one[finite]))))
    worst = float(np.max(np.abs(one[finite] - two[finite]))) / scale
    return None if worst <= tolerance else f"they differ by {worst:.2g} of the largest value, allowed is {tolerance:g}"


def _as_double(array: Array, datatype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if datatype == "BF16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64)


def _shown(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
