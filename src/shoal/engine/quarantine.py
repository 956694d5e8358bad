"""Inputs that made a model raise, remembered for a while: when one comes again it is run alone, and takes no batch down any more.

Only hashes are kept, made with a key of this process, never what a client sent. Bounded in number and in time; the time is given
by the caller. Shared by the executors of one lane: all methods may be called from any thread. Runs nothing and decides nothing.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from shoal.core.ticket import Ticket

__all__ = ["Contents", "Quarantine"]

Contents: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
"""All that a model sees of one member. Memoryviews are of single bytes, in one dimension."""

_KEEP_NS: Final = 300_000_000_000
_MAX_INPUTS: Final = 1024
_SAMPLES: Final = 32
_DIGEST_BYTES: Final = 16


class Quarantine:
    """False while it remembers nothing, which is all that most batches ask.

    Every member is looked up by a *glance*, a hash of a few bytes from all over its input: about 1 µs whatever its size. Where that
    is known the whole input is hashed (1 ms for each megabyte), so that likeness alone puts nobody aside.

    The `max_inputs` seen last are kept, each for `keep_ns` after it failed last.
    """

    def __init__(self, max_inputs: int = _MAX_INPUTS, keep_ns: int = _KEEP_NS) -> None:
        self._max_inputs = max_inputs
        self._keep_ns = keep_ns
        self._key = os.urandom(_DIGEST_BYTES)
        self._inputs: dict[bytes, tuple[int, int]] = {}  # digest → (glance, when it is forgotten); the next to be forgotten first
        self._glances: dict[int, int] = {}  # how many inputs have it
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many inputs are remembered."""
        return len(self._inputs)

    def suspects(self, members: Sequence[Ticket], contents: Callable[[Ticket], Contents | None], now_ns: int) -> list[int]:
        """The members, by index, whose input is remembered."""
        with self._lock:
            while self._inputs and self._inputs[oldest := next(iter(self._inputs))][1] <= now_ns:
                self._drop(oldest)
        return [
            index
            for index, member in enumerate(members)
            if (parts := _parts(member, contents)) is not None
            and _glance(parts) in self._glances
            and self._digest(parts) in self._inputs
        ]

    def learn(
        self,
        culprits: Iterable[Ticket],
        cleared: Iterable[Ticket],
        contents: Callable[[Ticket], Contents | None],
        now_ns: int,
    ) -> None:
        """Remember the inputs of `culprits` from now on, and those of `cleared`, who did no harm this time, no longer."""
        for member in cleared:
            parts = _parts(member, contents)
            if parts is not None:
                digest = self._digest(parts)
                with self._lock:
                    self._drop(digest)
        for member in culprits:
            parts = _parts(member, contents)
            if parts is not None:
                digest, glance = self._digest(parts), _glance(parts)
                with self._lock:
                    self._drop(digest)
                    self._inputs[digest] = (glance, now_ns + self._keep_ns)
                    self._glances[glance] = self._glances.get(glance, 0) + 1
                    if len(self._inputs) > self._max_inputs:
                        self._drop(next(iter(self._inputs)))

    def _drop(self, digest: bytes) -> None:
        known = self._inputs.pop(digest, None)
        if known is not None:
            glance = known[0]
            self._glances[glance] -= 1
            if not self._glances[glance]:
                del self._glances[glance]

    def _digest(self, parts: Contents) -> bytes:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._key)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def _parts(member: Ticket, contents: Callable[[Ticket], Contents | None]) -> Contents | None:
    try:
        return contents(member)
    except Exception:
        return None  # what an item of the caller's own class raises when it is hashed


def _glance(parts: Contents) -> int:
    return hash(tuple([(len(part), bytes(part[:: len(part) // _SAMPLES + 1])) for part in parts]))
