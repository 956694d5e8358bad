"""How fast the queue drains, and from that how long a refused client should stay away.

Arithmetic only: no clock, no dice, no enforcing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

BIN_NS: Final = 100_000_000
_NS_PER_MS: Final = 1_000_000
_MAX_HINT_MS: Final = 60_000


class DrainRate:
    """Rows served per second while there was a backlog: a moving average over bins of 100 ms.

    Time counts only while rows waited behind what was served: an idle server serves slowly because little is asked of it, which
    says nothing about how fast it could. So a bin that was busy for 10 ms counts for 10 ms, and an idle one not at all. The most
    recent `bins` bins that count are kept, however old: a rate that was measured is a better guess than none.
    """

    __slots__ = ("_bins", "_keep", "_last_ns", "_open", "_rows", "_span_ns", "ms_per_row")

    def __init__(self, bins: int = 10) -> None:
        self._keep = bins
        self._bins: deque[list[int]] = deque()  # [bin number, rows, nanoseconds with a backlog]
        self._rows = 0
        self._span_ns = 0
        self._last_ns = 0  # of the previous report
        self.ms_per_row: float | None = None  # the same as `rows_per_second`, for those who ask very often
        self._open = False  # whether a backlog remained after the previous report

    def record(self, rows: int, backlog_rows: int, now_ns: int) -> None:
        """`rows` were served just now, and `backlog_rows` still wait or run. Call it at every completion; O(1)."""
        if self._open and now_ns > self._last_ns:
            self._add(now_ns // BIN_NS, rows, now_ns - self._last_ns)
        elif self._open and self._bins:  # a second completion at the same instant
            self._add(now_ns // BIN_NS, rows, 0)
        self._open = backlog_rows > 0
        self._last_ns = now_ns

    def backlog_began(self, now_ns: int) -> None:
        """Work came to an idle server: what is served from here on is served with a backlog."""
        if not self._open:
            self._open = True
            self._last_ns = now_ns

    def _add(self, number: int, rows: int, span_ns: int) -> None:
        bins = self._bins
        if not bins or bins[-1][0] != number:
            bins.append([number, 0, 0])
            if len(bins) > self._keep:
                _, old_rows, old_span_ns = bins.popleft()
                self._rows -= old_rows
                self._span_ns -= old_span_ns
        bins[-1][1] += rows
        bins[-1][2] += span_ns
        self._rows += rows
        self._span_ns += span_ns
        self.ms_per_row = self._span_ns / (self._rows * 1e6) if self._rows > 0 and self._span_ns > 0 else None

    def rows_per_second(self) -> float | None:
        """The average, or None before anything was served behind a backlog."""
        if self._rows <= 0 or self._span_ns <= 0:
            return None
        return self._rows * 1e9 / self._span_ns

    def retry_after_ms(self, backlog_rows: int, now_ns: int, *, busy_until_ns: int = 0, jitter: float = 0.0) -> int | None:
        """When the backlog of now will be gone: backlog ÷ rate, rounded up, 1 ms to 60 s; None while the rate is unknown.

        `busy_until_ns`: before then nothing waiting can start (the running batch). `jitter` in [0, 1) lengthens the hint by up to
        that share of it: the caller draws it, so that the refused do not all come back at once. Raises ValueError for others.
        """
        if not 0.0 <= jitter < 1.0:
            raise ValueError("jitter must be in [0, 1)")
        if self._rows <= 0 or self._span_ns <= 0:
            return None
        drain_ns = -(-backlog_rows * self._span_ns // self._rows) + max(0, busy_until_ns - now_ns)
        if jitter:
            drain_ns += int(drain_ns * jitter)
        return min(max(1, -(-drain_ns // _NS_PER_MS)), _MAX_HINT_MS)
