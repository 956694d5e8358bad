"""Gates: places inside a model where it stands still until a test lets it go. Makes concurrency in tests deterministic.

A model loaded from a file and the test that started the server meet here by name. Threads only; no sockets, no server.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Gate", "gate"]

_SAFETY_SECONDS = 30.0


class Gate:
    """Counts who comes by, and holds them until it is opened.

    The model calls `enter(note)`; the test waits with `wait_entered`, and lets one or several through with `let`, or all from now
    on with `open`. `notes` holds what the model noted at each call, in order. Nobody waits longer than 30 s: then a RuntimeError
    ends the model's call, and an AssertionError the test.
    """

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self._condition = threading.Condition()
        self._permits = 0
        self._is_open = False

    def enter(self, note: Any = None) -> None:
        """Called by the model: note something, and wait to be let through. Raises RuntimeError after 30 s."""
        with self._condition:
            self.notes.append(note)
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._is_open or self._permits > 0, _SAFETY_SECONDS):
                raise RuntimeError("nobody opened the gate")
            if not self._is_open:
                self._permits -= 1

    def wait_entered(self, calls: int = 1) -> None:
        """Return when the model has come here `calls` times in all. Raises AssertionError after 30 s."""
        with self._condition:
            if not self._condition.wait_for(lambda: len(self.notes) >= calls, _SAFETY_SECONDS):
                raise AssertionError(f"the model was called {len(self.notes)} times, expected {calls}")

    def let(self, calls: int = 1) -> None:
        """Let this many calls through, now or when they come."""
        with self._condition:
            self._permits += calls
            self._condition.notify_all()

    def open(self) -> None:
        """Let everybody through from now on."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def close(self) -> None:
        """Hold everybody who comes from now on."""
        with self._condition:
            self._is_open = False
            self._permits = 0


_gates: dict[str, Gate] = {}
_lock = threading.Lock()


def gate(name: str) -> Gate:
    """The gate of that name in this process, made on first use, closed."""
    with _lock:
        return _gates.setdefault(name, Gate())
