"""A log that does not repeat itself: at most one full traceback a second per lane; what was left out is counted and said."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Final

__all__ = ["QuietLog"]

_INTERVAL_NS: Final = 1_000_000_000


class QuietLog:
    """Writes errors with their traceback, one in an interval. A model that fails a thousand times a second must not fill a disk."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], int], interval_ns: int = _INTERVAL_NS) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_ns = interval_ns
        self._next_ns = 0
        self.left_out = 0

    def error(self, message: str, *args: object, error: BaseException) -> None:
        """Log an error with the traceback of `error`, or count it as left out."""
        now_ns = self._clock()
        if self._next_ns and now_ns < self._next_ns:
            self.left_out += 1
            return
        self._next_ns = now_ns + self._interval_ns
        if self.left_out:
            message += " (and %d more errors since the last that was logged)"
            args = (*args, self.left_out)
            self.left_out = 0
        self._logger.error(message, *args, exc_info=(type(error), error, error.__traceback__))

    def exception(self, message: str, *args: object) -> None:
        """The same for the exception that is being handled."""
        error = sys.exception() if sys.version_info >= (3, 12) else sys.exc_info()[1]
        if error is not None:
            self.error(message, *args, error=error)
