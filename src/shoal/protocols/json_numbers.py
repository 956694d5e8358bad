"""Numbers of an array as JSON values: the length never changes, and what is read back equals what was there (all NaNs are one).

Non-finite floats become the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.

FP16 and FP32 are printed with the fewest digits that give the same narrow float back. A float x with the unit in the last place u
is what every decimal nearer than u/2 rounds to. Let q be the largest power of ten below u: rounding x to a multiple of q always
stays within u/2, and rounding it to a multiple of 10q finds a shorter decimal, where there is one. n/10^k with an integer
n < 2^53 and k ≤ 22 is the float64 nearest to that decimal, so an encoder of float64 prints the digits of n. (Exact powers of two
have only u/4 of room below them; they, and what is out of reach of 10^22, may keep all digits of their exact value: longer, never
wrong.)
"""

from __future__ import annotations

from math import ceil, frexp, log10
from typing import Any, Final

import numpy as np

from shoal.protocols.oip_head import Array

__all__ = ["json_values"]

_MAX_EXACT_POWER: Final = 22  # the largest power of ten that a float64 holds exactly
_FEW: Final = 24  # up to here a loop is faster than a dozen array operations


class _Scales:
    """By binary exponent: 1/(10q) and 1/q, in two forms.

    `few` is for a loop: by the exponent of `frexp` (negative ones count from the end, as Python's lists do it), with u/2 behind
    them. `many` is for arrays: two rows, by sign and biased exponent as they stand in the bits above `mantissa_bits`.
    Where a scale would not be exact, there is a power of two that makes an integer of every such float.
    """

    def __init__(self, narrow: type[np.floating[Any]], unsigned: type[np.unsignedinteger[Any]]) -> None:
        info = np.finfo(narrow)
        self.unsigned = unsigned
        self.mantissa_bits = int(info.nmant)
        smallest, largest = int(info.minexp), int(info.maxexp)
        self.few: list[tuple[float, float, float]] = [(1.0, 1.0, 0.0)] * (largest - smallest + self.mantissa_bits + 2)
        for exponent in range(smallest - self.mantissa_bits + 1, largest + 1):
            last_place = max(exponent - 1, smallest) - self.mantissa_bits
            self.few[exponent] = (*self._pair(last_place), 2.0 ** (last_place - 1))
        biased = range(1 << int(info.iexp))
        rows = [self.few[max(value, 1) + smallest] if value < biased[-1] else (1.0, 1.0, 0.0) for value in biased]
        self.many = np.array([[row[side] for row in rows] * 2 for side in (0, 1)])

    @staticmethod
    def _pair(last_place: int) -> tuple[float, float]:
        power = ceil(-last_place * log10(2.0))
        if last_place >= 0:
            return 1.0, 1.0
        if power > _MAX_EXACT_POWER:
            return 2.0**-last_place, 2.0**-last_place
        return 10.0 ** (power - 1), 10.0**power


_SCALES: Final = {2: _Scales(np.float16, np.uint16), 4: _Scales(np.float32, np.uint32)}


def _shorten_few(flat: Array) -> list[float]:
    scales = _SCALES[flat.itemsize].few
    values: list[float] = flat.tolist()
    for index, value in enumerate(values):
        mantissa, exponent = frexp(value)
        coarse, fine, half = scales[exponent]
        if mantissa in (0.5, -0.5, 0.0):
            continue
        short = round(value * coarse) / coarse
        values[index] = short if -half < short - value < half else round(value * fine) / fine
    return values


def _shorten_many(flat: Array) -> list[float]:
    scales = _SCALES[flat.itemsize]
    exponents = flat.view(scales.unsigned) >> scales.mantissa_bits
    scale = scales.many.take(exponents, axis=1)
    both = flat * scale
    np.rint(both, out=both)
    both /= scale
    coarse, fine = both
    good_coarse, good_fine = both.astype(flat.dtype) == flat  # nothing overflows: where that could be, the scale is exact
    result = np.where(good_coarse, coarse, fine)
    if b"\0" in good_fine.tobytes():
        result = np.where(good_coarse | good_fine, result, flat)
    values: list[float] = result.tolist()
    return values


def _finite_values(flat: Array) -> list[Any]:
    if flat.itemsize < 8:
        return _shorten_few(flat) if flat.size <= _FEW else _shorten_many(flat)
    values: list[Any] = flat.tolist()
    return values


def json_values(array: Array) -> list[Any]:
    """The elements in row-major order as Python values that a JSON encoder writes faithfully. Not for BYTES and BF16."""
    flat = array.reshape(-1)
    if flat.dtype.kind != "f":
        return flat.tolist()
    if flat.size <= _FEW and flat.itemsize < 8:
        try:
            return _shorten_few(flat)
        except (ValueError, OverflowError):
            pass  # NaN and infinity cannot be rounded to an integer
    finite = np.isfinite(flat)
    if b"\0" not in finite.tobytes():
        return _finite_values(flat)
    values = _finite_values(np.where(finite, flat, flat.dtype.type(0)))
    for index in np.flatnonzero(~finite).tolist():
        value = flat[index]
        values[index] = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return values
