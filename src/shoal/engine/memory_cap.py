"""How many rows a batch may have when memory does not suffice for as many as the settings allow. Numbers only; no clock, no log."""

from __future__ import annotations

from typing import Final

__all__ = ["MemoryCap"]

_QUIET_NS: Final = 60_000_000_000


class MemoryCap:
    """Half of what did not fit; doubled for every minute in which everything fitted, until the settings alone count again.

    `rows` is the cap in force, None where there is none. It is asked now and then with the time; it sets no timer.
    """

    def __init__(self, most_rows: int, quiet_ns: int = _QUIET_NS) -> None:
        self.rows: int | None = None
        self._most_rows = most_rows
        self._quiet_ns = quiet_ns
        self._since_ns = 0

    def lower(self, unfitted_rows: int, now_ns: int) -> bool:
        """A run of so many rows did not fit. Whether the cap is lower now."""
        self._since_ns = now_ns
        rows = max(1, unfitted_rows // 2)
        if rows >= (self._most_rows if self.rows is None else self.rows):
            return False
        self.rows = rows
        return True

    def lift(self, now_ns: int) -> bool:
        """Whether the cap is higher now, or gone, because all has fitted for long enough."""
        if self.rows is None or now_ns - self._since_ns < self._quiet_ns:
            return False
        self._since_ns = now_ns
        self.rows = self.rows * 2 if self.rows * 2 < self._most_rows else None
        return True
