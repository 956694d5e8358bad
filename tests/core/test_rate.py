"""The arrival rate that headway goes by: what it averages over, and how fast it follows."""

import pytest

from shoal.core.starting import Arrivals

MS = 1_000_000


def feed(arrivals, begin_ns, count, gap_ns, rows=1, single_ns=MS):
    """So many requests, evenly apart, the rate brought up to date after each; when the next would come."""
    for index in range(count):
        arrivals.add(begin_ns + index * gap_ns, rows)
        arrivals.update(begin_ns + index * gap_ns, single_ns)
    return begin_ns + count * gap_ns


def test_an_even_stream_has_its_exact_rate():
    """One request each 0.5 ms: 2e-6 rows per nanosecond, and three times that with three rows each."""
    for rows in (1, 3):
        arrivals = Arrivals()
        feed(arrivals, MS, 1000, MS // 2, rows)
        assert arrivals.rate_per_ns == pytest.approx(rows * 2e-6)
        assert arrivals.rows_each == pytest.approx(rows)
        assert arrivals.count == 1000


def test_nothing_is_said_before_a_whole_epoch():
    """An epoch needs 16 requests and 16 times a batch of one row; the first one only begins the count."""
    few, short = Arrivals(), Arrivals()
    feed(few, 100 * MS, 31, 100 * MS)
    assert few.rate_per_ns == 0.0
    feed(few, 3200 * MS, 1, 100 * MS)
    assert few.rate_per_ns == pytest.approx(1e-8)
    feed(short, 0, 10_000, 1000)  # 10 ms of 16
    assert short.rate_per_ns == 0.0


def test_the_rate_follows_by_a_twentieth_per_epoch():
    """After 200 even epochs the next one, twice as dense, moves the rate by 0.05 of the difference, 14 make up half of it."""
    arrivals = Arrivals()
    next_ns = feed(arrivals, MS, 16 * 201, MS)
    assert arrivals.rate_per_ns == pytest.approx(1e-6)
    next_ns = feed(arrivals, next_ns, 32, MS // 2)
    assert arrivals.rate_per_ns == pytest.approx(1.05e-6, rel=0.003)
    feed(arrivals, next_ns, 32 * 13, MS // 2)
    assert arrivals.rate_per_ns == pytest.approx((2 - 0.95**14) * 1e-6, rel=0.003)


def test_an_epoch_of_more_than_is_kept_counts_every_row():
    """Slow batches make long epochs: 20,000 requests of 4 rows in one of them are 80,000 rows, though fewer times are kept."""
    arrivals = Arrivals()
    next_ns = feed(arrivals, 1600 * MS, 16, 0, single_ns=100 * MS)
    for index in range(20_000):
        arrivals.add(next_ns + index * 100_000, 4)
    arrivals.update(next_ns + 2000 * MS, 100 * MS)
    assert arrivals.rate_per_ns == pytest.approx(80_000 / (2000 * MS))
    assert arrivals.rows_each == 4.0
    assert len(arrivals.times_ns) < 20_000
