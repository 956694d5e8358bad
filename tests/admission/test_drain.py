"""The drain rate and the retry hint that follows from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.admission.drain import DrainRate

MS = 1_000_000


def steady(rows=10, every_ms=20, count=20, rate=None):
    """A rate fed with `rows` rows every `every_ms`, always with a backlog; returns it and the time of the last report."""
    rate = rate or DrainRate()
    now_ns = 0
    for index in range(count):
        now_ns = (index + 1) * every_ms * MS
        rate.record(rows, 100, now_ns)
    return rate, now_ns


def test_unknown_before_anything_was_served_behind_a_backlog():
    """No rate and no hint from an idle server: serving what comes says nothing about what could be served."""
    rate = DrainRate()
    assert rate.retry_after_ms(100, 0) is None
    for index in range(10):
        rate.record(1, 0, index * 100 * MS)
    assert rate.rows_per_second() is None
    assert rate.retry_after_ms(100, 0) is None


def test_case_22_hint_is_backlog_over_rate_rounded_up():
    """10 rows every 20 ms is 500 rows a second: a backlog of 101 rows drains in 202 ms; one row in 2 ms, never 0."""
    rate, now_ns = steady()
    assert rate.rows_per_second() == 500.0
    assert rate.retry_after_ms(101, now_ns) == 202
    assert rate.retry_after_ms(1, now_ns) == 2
    assert rate.retry_after_ms(0, now_ns) == 1


def test_rounding_is_up_to_the_next_millisecond():
    """3 rows at 7 rows a second is 428.57 ms: 429."""
    rate, now_ns = steady(rows=7, every_ms=1000, count=3)
    assert rate.retry_after_ms(3, now_ns) == 429


def test_clamped_to_a_minute():
    """However deep the queue, nobody is sent away for more than 60 s."""
    rate, now_ns = steady()
    assert rate.retry_after_ms(10**9, now_ns) == 60_000


def test_running_batch_is_added():
    """Before the running batch ends nothing that waits can start."""
    rate, now_ns = steady()
    assert rate.retry_after_ms(50, now_ns, busy_until_ns=now_ns + 30 * MS) == 130
    assert rate.retry_after_ms(50, now_ns, busy_until_ns=now_ns - 30 * MS) == 100


def test_jitter_lengthens_by_its_share():
    """Jitter 0.5 adds half; values outside [0, 1) are a mistake of the caller."""
    rate, now_ns = steady()
    assert rate.retry_after_ms(50, now_ns, jitter=0.5) == 150
    for jitter in (-0.1, 1.0):
        with pytest.raises(ValueError, match="jitter"):
            rate.retry_after_ms(50, now_ns, jitter=jitter)


def test_idle_time_does_not_lower_the_rate():
    """An idle minute between two stretches of backlog counts for nothing."""
    rate, now_ns = steady()
    rate.record(10, 0, now_ns + 20 * MS)
    later_ns = now_ns + 60_000 * MS
    rate.backlog_began(later_ns)
    rate.record(10, 5, later_ns + 20 * MS)
    assert rate.rows_per_second() == 500.0


def test_old_bins_are_forgotten():
    """After ten bins of a new speed the old speed is gone."""
    rate, now_ns = steady(rows=10)
    for _ in range(60):
        now_ns += 20 * MS
        rate.record(40, 100, now_ns)
    assert rate.rows_per_second() == 2000.0


def test_several_executors_at_one_instant():
    """Batches of two executors that end together count both."""
    rate = DrainRate()
    for index in range(10):
        rate.record(5, 100, index * 10 * MS)
        rate.record(5, 100, index * 10 * MS)
    assert rate.rows_per_second() == pytest.approx(1000.0, rel=0.12)


@settings(deadline=None, max_examples=200)
@given(
    reports=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 50), st.integers(0, 300 * MS)), max_size=60),
    backlog=st.integers(0, 10**6),
)
def test_hint_is_always_in_range_and_grows_with_the_backlog(reports, backlog):
    """Whatever is reported: None or 1 ms … 60 s, never less for a deeper queue, and sums never drift."""
    rate = DrainRate()
    now_ns = 0
    for rows, waiting, gap_ns in reports:
        now_ns += gap_ns
        rate.record(rows, waiting, now_ns)
    hint = rate.retry_after_ms(backlog, now_ns)
    assert (hint is None) == (rate.rows_per_second() is None)
    if hint is not None:
        assert 1 <= hint <= 60_000
        assert rate.retry_after_ms(backlog + 1000, now_ns) >= hint
    assert rate._rows == sum(entry[1] for entry in rate._bins)
    assert rate._span_ns == sum(entry[2] for entry in rate._bins)
    assert len(rate._bins) <= 10
