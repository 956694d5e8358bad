"""Numbers of an array as JSON values: the length never changes, and what is read back equals what was there (all NaNs are one).

Non-finite floats become the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shoal.protocols.oip_head import Array

__all__ = ["json_values"]

_MAX_EXACT_POWER: Final = 22  # the largest power of ten that a float64 holds exactly
_FEW: Final = 64  # up to here printing one by one is faster than a dozen array operations
# By itemsize: from the number of digits that survives in any such decimal, to the one that tells all floats of that size apart.
_DIGITS: Final = {2: (3, 4, 5), 4: (6, 7, 8, 9)}


def _shorten(array: Array) -> Array:
    """float64 values that print with few digits and still round to the same element of the narrow `array` (all finite).

    n/10^k with an integer n < 2^53 and k ≤ 22 is the float64 nearest to that decimal, so it prints with the digits of n. Elements
    for which no candidate works, or whose exponent is out of reach, keep all digits of their exact value: longer, never wrong.
    """
    wide = array.astype(np.float64)
    result = wide.copy()
    with np.errstate(all="ignore"):
        exponents = np.floor(np.log10(np.abs(wide)))
        todo = np.flatnonzero(np.isfinite(exponents) & (np.abs(exponents) <= 12) & (wide != np.trunc(wide)))
        for digits in _DIGITS[array.itemsize]:
            if not todo.size:
                break
            places = digits - 1 - exponents[todo]
            scale = 10.0 ** np.minimum(np.abs(places), _MAX_EXACT_POWER)
            values = wide[todo]
            candidates = np.where(places >= 0, np.rint(values * scale) / scale, np.rint(values / scale) * scale)
            good = candidates.astype(array.dtype) == array[todo]
            result[todo[good]] = candidates[good]
            todo = todo[~good]
    return result


def _finite_values(flat: Array) -> list[Any]:
    if flat.itemsize < 8:
        if flat.size <= _FEW:
            return [float(str(value)) for value in flat]  # numpy prints the fewest digits that give the same narrow float back
        flat = _shorten(flat)
    values: list[Any] = flat.tolist()
    return values


def json_values(array: Array) -> list[Any]:
    """The elements in row-major order as Python values that a JSON encoder writes faithfully. Not for BYTES and BF16."""
    flat = array.reshape(-1)
    if flat.dtype.kind != "f":
        return flat.tolist()
    finite = np.isfinite(flat)
    if finite.all():
        return _finite_values(flat)
    values = _finite_values(np.where(finite, flat, flat.dtype.type(0)))
    for index in np.flatnonzero(~finite).tolist():
        value = flat[index]
        values[index] = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return values
