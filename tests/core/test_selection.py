"""Sizes and runs against brute force, and the rules for allowed sizes by hand."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.rules import FOREVER
from shoal.core.selection import best_run, cutoff_of_several, largest_in_time, round_to_allowed


def span(rows):
    """A law of batch times."""
    return 10 + 3 * rows


@given(dues=st.lists(st.integers(0, 150), max_size=40), limit=st.integers(1, 30))
def test_the_largest_batch_in_time(dues, limit):
    """The largest b for which b deadlines are late enough, as trying all of them finds it."""
    dues.sort()
    found = largest_in_time(lambda key: len(dues) - bisect_left(dues, key), limit, 0, span)
    assert found == max([b for b in range(1, limit + 1) if sum(due >= span(b) for due in dues) >= b], default=0)


@given(requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), max_size=20), limit=st.integers(6, 20))
def test_requests_of_several_rows(requests, limit):
    """Whoever has the deadline that is returned, or a later one, is in time for a batch of the size that is returned."""
    latest = sorted(requests, reverse=True)
    size, cutoff = cutoff_of_several(latest, limit, 0, span)
    if size:
        assert cutoff == span(size)
        assert sum(rows for due, rows in latest if due >= cutoff) >= size
        assert size <= limit
    else:
        assert all(due < span(min(rows, limit)) for due, rows in latest[:1])


def test_allowed_sizes():
    """l = 10 + 3 b: five rows are padded to eight (34 / 5 < 22 / 4 is false: 6.8 > 5.5), so four go; seven are padded (4.86)."""
    assert [round_to_allowed(rows, (1, 2, 4, 8), span) for rows in (1, 3, 4, 5, 7, 8, 9)] == [1, 3, 4, 4, 7, 8, 8]
    assert [round_to_allowed(rows, (4, 8), None) for rows in (2, 5, 6, 9)] == [2, 4, 6, 8]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    head=st.integers(0, 24),
    limit=st.integers(1, 8),
    tokens=st.one_of(st.just(FOREVER), st.integers(40, 120)),
)
def test_runs_hold_the_head_and_their_budget(lengths, head, limit, tokens):
    """A run contains the head, keeps both limits, is never slower than its requests alone; twice the same is the same."""
    lengths.sort()
    head %= len(lengths)

    def law(rows, length):
        return 20 + rows * length

    first, last = best_run(lengths, [1] * len(lengths), head, limit, tokens, law)
    assert first <= head < last
    assert last - first <= limit
    assert (last - first) * lengths[last - 1] <= tokens
    assert law(last - first, lengths[last - 1]) <= sum(law(1, length) for length in lengths[first:last])


def test_where_batches_do_not_pay_the_head_goes_alone():
    """A law by which two rows take more than twice as long as one keeps every batch at one row."""
    assert best_run([5, 5, 5], [1, 1, 1], 1, 8, FOREVER, lambda rows, length: rows * rows * length) == (1, 2)
