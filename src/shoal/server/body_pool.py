"""Memory for large request bodies, used again: fresh pages cost more than the copy into them. No sockets, no HTTP."""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np

__all__ = ["BodyPool"]

_ALIGNMENT_BYTES: Final = 64
_STEP_BYTES: Final = 16 << 10  # sizes are rounded up to this, so that bodies of nearly the same size share their memory


class BodyPool:
    """Hands out memory and takes it back. One per event loop; what is given back must not be used by anybody any more.

    At most `limit_bytes` are kept for later, the rest is freed. Memory that is never given back is freed as usual.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.kept_bytes = 0

    def take(self, length: int, aligned_at: int = 0) -> memoryview:
        """`length` bytes, laid so that the byte at `aligned_at` (where the first tensor begins) is aligned for any datatype."""
        size = -(-(length + _ALIGNMENT_BYTES) // _STEP_BYTES) * _STEP_BYTES
        free = self._free.get(size)
        if free:
            array = free.pop()
            self.kept_bytes -= size
            if not free:
                del self._free[size]
        else:
            array = np.empty(size, dtype=np.uint8)
        start = -(array.ctypes.data + aligned_at) % _ALIGNMENT_BYTES
        return array.data[start : start + length]

    def give(self, body: memoryview) -> None:
        """Take back what `take` has handed out."""
        array = cast("np.ndarray[Any, Any]", body.obj)
        size = array.nbytes
        if self.kept_bytes + size <= self._limit_bytes:
            self.kept_bytes += size
            self._free.setdefault(size, []).append(array)
