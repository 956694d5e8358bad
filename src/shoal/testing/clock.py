"""A clock that stands still until it is told to move. For tests of whatever takes the time as an argument or a function."""

from __future__ import annotations


class ManualClock:
    """Integer nanoseconds in `now_ns`, moved by hand. Calling it gives the time, as `time.monotonic_ns` does."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """The time in nanoseconds."""
        return self.now_ns

    def advance(self, *, ns: int = 0, ms: float = 0.0) -> int:
        """Move forward and return the new time. Raises ValueError for a step backwards: monotonic clocks take none."""
        step_ns = ns + round(ms * 1e6)
        if step_ns < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now_ns += step_ns
        return self.now_ns
