"""The cap on rows after memory ran out: half of what did not fit, doubled for each quiet minute, gone at the settings' limit."""

from shoal.engine.memory_cap import MemoryCap

MINUTE = 60_000_000_000


def test_lowered_and_lifted() -> None:
    """64 rows did not fit: 32; 32 did not: 16; a quiet minute each gives 32, and then none. 64 again changes nothing."""
    cap = MemoryCap(64)
    assert cap.rows is None
    assert (cap.lower(64, 0), cap.rows) == (True, 32)
    assert (cap.lower(64, 1), cap.rows) == (False, 32)
    assert (cap.lower(32, 2), cap.rows) == (True, 16)
    assert (cap.lift(MINUTE + 1), cap.rows) == (False, 16)
    assert (cap.lift(MINUTE + 2), cap.rows) == (True, 32)
    assert (cap.lift(MINUTE + 3), cap.rows) == (False, 32)
    assert (cap.lift(2 * MINUTE + 2), cap.rows) == (True, None)
    assert not cap.lift(9 * MINUTE)


def test_a_single_row_that_does_not_fit() -> None:
    """There is no less than one row."""
    cap = MemoryCap(2)
    assert (cap.lower(2, 0), cap.rows) == (True, 1)
    assert (cap.lower(1, 1), cap.rows) == (False, 1)
