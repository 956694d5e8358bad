"""How large a batch should be, and which rows go well together: pure arithmetic on sorted numbers. Knows no tickets, no queue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from shoal.core.rules import FOREVER

Span = Callable[[int], int]
"""Nanoseconds that a batch of so many rows takes, on the safe side; rises with the rows."""


def largest_in_time(count_from: Callable[[int], int], limit: int, start_ns: int, span: Span) -> int:
    """The largest b ≤ limit for which at least b waiting rows have a deadline of `start_ns` + span(b) or later; 0 if there is none.

    `count_from` says how many have a deadline of at least its argument. Both sides are monotone, so b is found by halving.
    """
    low, high = 0, limit  # low is possible, everything above high is not
    while low < high:
        middle = (low + high + 1) >> 1
        if count_from(start_ns + span(middle)) >= middle:
            low = middle
        else:
            high = middle - 1
    return low


def cutoff_of_several(due_rows: Sequence[tuple[int, int]], limit: int, start_ns: int, span: Span) -> tuple[int, int]:
    """The same for requests of several rows: (rows of the batch, earliest deadline that may be in it); (0, FOREVER) for none.

    `due_rows`: (deadline, rows) of the requests with the latest deadlines, latest first, until their rows reach the limit or all
    are there. Of all starts the one that serves most rows in time; where the limit can be filled in time, everything that still can
    wait for a full batch counts.
    """
    best = (0, FOREVER)
    total = 0
    for due_ns, rows in due_rows:
        total += rows
        size = min(total, limit)
        finish_ns = start_ns + span(size)
        if due_ns < finish_ns and total > rows:
            break
        if due_ns >= finish_ns:
            best = (size, finish_ns)
        if total >= limit:
            break
    return best


def round_to_allowed(rows: int, allowed: Sequence[int], span: Span | None) -> int:
    """How many of `rows` rows to run where batches are padded up to allowed sizes (rising).

    All of them, padded up, if that is cheaper per row than to run the next smaller allowed size and to keep the rest; without
    a model of time, if at least half of what is added would not be padding. More than the largest size are cut down to it.
    """
    index = bisect_left(allowed, rows)
    if index < len(allowed) and allowed[index] == rows:
        return rows
    down = allowed[index - 1] if index else 0
    if not down:
        return rows
    if index == len(allowed):
        return down
    up = allowed[index]
    if span is None:
        return rows if 2 * (rows - down) >= up - down else down
    return rows if span(up) * down < span(down) * rows else down


_SIZES_TRIED: Final = 6


def best_run(
    lengths: Sequence[int],
    rows: Sequence[int],
    head: int,
    limit_rows: int,
    limit_tokens: float,
    span: Callable[[int, int], int],
) -> tuple[int, int]:
    """Which contiguous run of requests, sorted by rising length, is worth most; as (first, last + 1). It holds `head`.

    Worth is what its requests would take one by one over what they take together, padded to the longest: `span(rows, length)`
    nanoseconds, 0 where nothing is known (then the most rows in the least padding win). A batch that is slower than its requests
    one by one is worth less than the head alone, which is how lengths that do not batch well are kept apart. `limit_tokens` bounds
    longest · rows; the head alone may exceed nothing.
    """
    low = max(0, head - limit_rows)
    lengths, rows, head = lengths[low : head + limit_rows], rows[low : head + limit_rows], head - low
    known = span(1, lengths[head]) > 0
    alone: list[float] = [0.0]
    before: list[int] = [0]
    for length, own in zip(lengths, rows, strict=True):
        alone.append(alone[-1] + (span(own, length) if known else length * own))
        before.append(before[-1] + own)
    best_worth, best = 1.0, (head, head + 1)
    for last in range(head, len(lengths)):
        longest = lengths[last]
        most = limit_rows if limit_tokens == FOREVER else min(limit_rows, int(limit_tokens // max(longest, 1)))
        if before[last + 1] - before[head] > most:
            break
        end = last + 1
        if end < len(lengths) and lengths[end] == longest and before[end + 1] - before[head] <= most:
            continue  # with the next one, as long as this one, the run is worth more
        first = bisect_left(before, before[end] - most, 0, head)
        for step in range(_SIZES_TRIED):
            begin = head - ((head - first) >> step)
            total = before[end] - before[begin]
            real = alone[end] - alone[begin]
            worth = real / max(1, span(total, longest)) if known else real / max(1, longest * total) * total**0.5
            if worth > best_worth:
                best_worth, best = worth, (begin, end)
            if begin == head:
                break
    return best[0] + low, best[1] + low
