"""How long a batch takes: learned from batches that ran, asked for batches that might.

Pure arithmetic; whoever runs batches reports them, whoever plans them asks. Writing the knowledge to a file is the engine's
(`engine/latency_store`), which goes through `to_record` and `from_record`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

_FORGETTING: Final = 0.998  # weight of what is known, for each further batch
_SMOOTHING: Final = 0.03
_ENOUGH: Final = 20  # batches of one size after which their mean is better than the line
_MOST_SIZES: Final = 4096
_CLIP: Final = 3.0  # residuals count as at most so many standard deviations
_LEAST_SCATTER: Final = 0.02  # for clipping only: what is smaller is not told from chance
_LEAST_SPREAD: Final = 1e-3  # relative variance of the sizes below which no line can be drawn through them
_TOLERATED_ERROR: Final = 0.10
_KEPT_RATIOS: Final = 509
_LEAST_WORK: Final = 1e-6
_MOST_WORK: Final = 1e15  # and the longest time in nanoseconds: eleven days
_RECORD_VERSION: Final = 1


class _Line:
    """Batches of one length bucket: the line tau0 + alpha · work through them, and the means of single sizes."""

    __slots__ = ("alpha_ns", "batches", "means", "s0", "s1", "s2", "solid", "t0", "t1", "tau0_ns")

    def __init__(self) -> None:
        self.tau0_ns = 0.0
        self.alpha_ns = 0.0
        self.solid = False  # whether two sizes have been seen that a line can be drawn through
        self.batches = 0
        self.s0 = self.s1 = self.s2 = self.t0 = self.t1 = 0.0
        self.means: dict[float, list[float]] = {}  # work: [mean, batches]

    def at(self, work: float) -> float:
        """Expected nanoseconds; 0 before anything was seen."""
        known = self.means.get(work)
        if known is not None and known[1] >= _ENOUGH:
            return known[0]
        return self.tau0_ns + self.alpha_ns * work

    def learn(self, work: float, taken_ns: float, by_size: bool) -> None:
        """One more batch. The line stands still while all sizes of late are equal: nothing says then what others would take."""
        self.batches += 1
        keep = _FORGETTING
        if self.solid and self._spread(work) < _LEAST_SPREAD:
            keep = 1.0  # the memory of other sizes is not to fade while there are none
        self.s0 = keep * self.s0 + 1.0
        self.s1 = keep * self.s1 + work
        self.s2 = keep * self.s2 + work * work
        self.t0 = keep * self.t0 + taken_ns
        self.t1 = keep * self.t1 + work * taken_ns
        determinant = self.s0 * self.s2 - self.s1 * self.s1
        if determinant > _LEAST_SPREAD * self.s1 * self.s1:
            alpha_ns = (self.s0 * self.t1 - self.s1 * self.t0) / determinant
            tau0_ns = (self.t0 - alpha_ns * self.s1) / self.s0
            if alpha_ns < 0.0:
                alpha_ns, tau0_ns = 0.0, self.t0 / self.s0
            elif tau0_ns < 0.0:
                alpha_ns, tau0_ns = self.t1 / self.s2, 0.0
            self.alpha_ns, self.tau0_ns, self.solid = alpha_ns, tau0_ns, True
        elif not self.solid:
            self.alpha_ns = self.t0 / self.s1  # one size only: in proportion, the cautious guess for larger ones
        if by_size:
            self._learn_size(work, taken_ns)

    def _spread(self, work: float) -> float:
        mean = self.s1 / self.s0
        return max(self.s2 / self.s0 - mean * mean, (work - mean) ** 2) / (mean * mean)

    def _learn_size(self, work: float, taken_ns: float) -> None:
        known = self.means.get(work)
        if known is None:
            if len(self.means) >= _MOST_SIZES:
                self.means.clear()
            self.means[work] = [taken_ns, 1.0]
            return
        known[1] += 1.0
        known[0] += max(1.0 / known[1], _SMOOTHING) * (taken_ns - known[0])


def _bucket(length: int) -> int:
    """Lengths within a factor of √2 share a line: a model's time per token hardly changes within one."""
    return (length * length).bit_length()


class LatencyModel:
    """Expected and upper batch times, by work (rows, padded tokens, or summed cost) and longest row.

    One line tau0 + alpha · work for each length bucket, by least squares with forgetting; where lengths do not matter, the mean of
    a size once it was seen 20 times (real curves are staircases). The upper estimate adds `margin_sigmas` standard deviations of
    the relative residuals, and whatever the estimates have been off by beyond a tenth lately.

    `known`: whether estimates mean anything yet; until then they are 0.
    """

    __slots__ = (
        "_factor",
        "_latest",
        "_lines",
        "_margin_sigmas",
        "_plain",
        "_variance",
        "batches",
        "known",
        "ratios",
        "relative_error",
    )

    def __init__(self, *, margin_sigmas: float = 1.64) -> None:
        self._margin_sigmas = margin_sigmas
        self._plain = _Line()  # where lengths do not matter
        self._lines: dict[int, _Line] = {}
        self._latest = self._plain
        self._variance = 0.0
        self._factor = 1.0
        self.relative_error = 0.0
        self.ratios: deque[float] = deque(maxlen=_KEPT_RATIOS)
        """What recent batches took over what was expected, the extremes included."""
        self.batches = 0
        self.known = False

    # ---------------------------------------------------------------- learning

    def observe(self, work: float, length: int, taken_ns: int) -> None:
        """A batch of this work, whose longest row has `length` (0: lengths do not matter), took `taken_ns`.

        What cannot be is ignored: times and work that are not positive numbers, or beyond all measure.
        """
        if not (_LEAST_WORK <= work <= _MOST_WORK and 0 < taken_ns <= _MOST_WORK):
            return
        line = self._plain if not length else self._lines.get(_bucket(length))
        if line is None:
            line = self._lines[_bucket(length)] = _Line()
        expected_ns = line.at(work) if line.solid or self._enough(line, work) else 0.0
        seen_ns: float = taken_ns
        if expected_ns > 0.0:
            residual = taken_ns / expected_ns - 1.0
            self.ratios.append(1.0 + residual)
            clip = _CLIP * max(self.scatter, _LEAST_SCATTER)
            residual = min(max(residual, -clip), clip)  # a pause of the machine is not the model's time
            seen_ns = expected_ns * (1.0 + residual)
            self._variance += _SMOOTHING * (residual * residual - self._variance)
            self.relative_error += _SMOOTHING * (abs(residual) - self.relative_error)
            self._factor = 1.0 + self._margin_sigmas * math.sqrt(self._variance) + max(0.0, self.relative_error - _TOLERATED_ERROR)
        line.learn(work, seen_ns, by_size=not length)
        self._latest = line
        self.batches += 1
        if not self.known:
            self.known = line.solid or self._enough(line, work)

    @staticmethod
    def _enough(line: _Line, work: float) -> bool:
        known = line.means.get(work)
        return known is not None and known[1] >= _ENOUGH

    # ---------------------------------------------------------------- asking

    def _line(self, length: int) -> _Line:
        if not length:
            return self._plain
        bucket = _bucket(length)
        line = self._lines.get(bucket)
        if line is not None and line.solid:
            return line
        solid = [near for near, candidate in self._lines.items() if candidate.solid]
        if not solid:
            return line or self._plain
        return self._lines[min(solid, key=lambda near: abs(near - bucket))]

    def expected_ns(self, work: float, length: int = 0) -> int:
        """Nanoseconds that a batch takes on average; 0 while nothing is known."""
        return int(self._line(length).at(work)) if self.known else 0

    def upper_ns(self, work: float, length: int = 0) -> int:
        """Nanoseconds that most batches stay within; 0 while nothing is known."""
        return int((self._plain if not length else self._line(length)).at(work) * self._factor) if self.known else 0

    @property
    def scatter(self) -> float:
        """Standard deviation of the residuals, relative to the estimate."""
        return math.sqrt(self._variance)

    @property
    def tau0_ns(self) -> float:
        """The fixed part of a batch's time, in the length bucket seen last."""
        return self._latest.tau0_ns

    @property
    def alpha_ns(self) -> float:
        """The time per unit of work, in the length bucket seen last."""
        return self._latest.alpha_ns

    # ---------------------------------------------------------------- keeping

    def to_record(self) -> dict[str, Any]:
        """Everything that is worth keeping, as plain numbers for JSON; `from_record` takes it back."""
        lines = {"0": self._plain, **{str(bucket): line for bucket, line in self._lines.items()}}
        return {
            "format": _RECORD_VERSION,
            "scatter": self.scatter,
            "relative_error": self.relative_error,
            "batches": self.batches,
            "lines": {
                name: {
                    "tau0_ns": line.tau0_ns,
                    "alpha_ns": line.alpha_ns,
                    "sums": [line.s0, line.s1, line.s2, line.t0, line.t1],
                    "means_ns": {f"{work:g}": figures for work, figures in sorted(line.means.items())},
                }
                for name, line in lines.items()
                if line.solid
            },
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, margin_sigmas: float = 1.64) -> LatencyModel:
        """The model that `to_record` wrote down. Raises ValueError for anything else, whatever it is."""
        model = cls(margin_sigmas=margin_sigmas)
        try:
            if record["format"] != _RECORD_VERSION:
                raise ValueError("another format")
            for name, entry in record["lines"].items():
                line = model._plain if name == "0" else model._lines.setdefault(int(name), _Line())
                line.s0, line.s1, line.s2, line.t0, line.t1 = (_sane(value) for value in entry["sums"])
                line.tau0_ns, line.alpha_ns, line.solid = _sane(entry["tau0_ns"]), _sane(entry["alpha_ns"]), True
                line.means = {float(work): [_sane(mean), _sane(count)] for work, (mean, count) in entry["means_ns"].items()}
                if not line.s0 or not line.s1:
                    raise ValueError("sums of nothing")
                model._latest = line
            model._variance = _sane(record["scatter"]) ** 2
            model.relative_error = _sane(record["relative_error"])
            model.batches = int(_sane(record["batches"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a record of batch times: {error}") from None
        model.known = model._plain.solid or any(line.solid for line in model._lines.values())
        excess = max(0.0, model.relative_error - _TOLERATED_ERROR)
        model._factor = 1.0 + margin_sigmas * math.sqrt(model._variance) + excess
        return model


def _sane(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a figure of batch times")
    return float(value)
