"""Memory of large bodies: aligned, used again, bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.server.body_pool import BodyPool


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 300_000), st.integers(0, 5_000))
def test_body_is_of_its_length_and_its_tensor_aligned(length: int, aligned_at: int) -> None:
    """The view has exactly the length asked for, fresh or used again, and the byte at `aligned_at` lies on a multiple of 64."""
    pool = BodyPool(1 << 20)
    for _ in range(2):
        body = pool.take(length, aligned_at)
        assert len(body) == length
        address = np.frombuffer(body, np.uint8).ctypes.data if length else -aligned_at
        assert (address + aligned_at) % 64 == 0
        pool.give(body)


def test_memory_is_used_again_and_never_twice_at_once() -> None:
    """What was given back is handed out again, but two bodies in use never share memory."""
    pool = BodyPool(1 << 20)
    first, second = pool.take(100_000), pool.take(100_000)
    assert first.obj is not second.obj
    pool.give(first)
    third, fourth = pool.take(100_010), pool.take(100_000)
    assert third.obj is first.obj
    assert fourth.obj is not first.obj and fourth.obj is not second.obj
    assert pool.kept_bytes == 0


def test_no_more_is_kept_than_allowed() -> None:
    """Beyond the limit memory is freed; the count of what is kept stays exact."""
    pool = BodyPool(300_000)
    bodies = [pool.take(100_000) for _ in range(5)]
    size = bodies[0].obj.nbytes  # type: ignore[attr-defined]
    for body in bodies:
        pool.give(body)
    assert pool.kept_bytes == 2 * size <= 300_000
    for _ in range(2):
        pool.take(100_000)
    assert pool.kept_bytes == 0
