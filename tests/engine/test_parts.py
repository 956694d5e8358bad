"""Batches that are run in parts: known suspects alone, what is too large for memory in halves; each ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.ticket import Ticket
from shoal.engine.execution import execute, execute_async
from shoal.engine.outcome import End, Outcome, Result, is_out_of_memory
from shoal.engine.quarantine import Contents, Quarantine
from shoal.errors import BadRequest, ModelFailed

_NS_PER_S = 1_000_000_000


class Scripted:
    """A runner whose answers are its members' payloads, one for each row, unless `fault` has an exception for them."""

    def __init__(self, fault: Callable[[Sequence[Ticket]], BaseException | None]) -> None:
        self.fault = fault
        self.groups: list[list[int]] = []

    def run(self, members: Sequence[Ticket]) -> Result:
        """Note the group; raise or answer."""
        self.groups.append([member.payload for member in members])
        error = self.fault(members)
        if error is not None:
            raise error
        return Result([member.payload for member in members for _ in range(member.rows)], 1, 1, 1)

    def contents(self, member: Ticket) -> Contents | None:
        """The payload's digits."""
        return (str(member.payload).encode(),)

    def close(self) -> None:
        """Nothing."""


class Awaited:
    """The same, awaited."""

    def __init__(self, inner: Scripted) -> None:
        self.inner = inner
        self.contents = inner.contents
        self.close = inner.close

    async def run(self, members: Sequence[Ticket]) -> Result:
        """After one turn of the loop."""
        await asyncio.sleep(0)
        return self.inner.run(members)


def tickets(rows: Sequence[int], first: int = 0) -> list[Ticket]:
    """Tickets of these sizes, numbered from `first` by their payloads."""
    return [Ticket(count, payload=index) for index, count in enumerate(rows, start=first)]


def poison(bad: set[int]) -> Callable[[Sequence[Ticket]], BaseException | None]:
    """Fails whenever one of these is among the members."""

    def fault(members: Sequence[Ticket]) -> BaseException | None:
        found = [member.payload for member in members if member.payload in bad]
        return ValueError(f"item {min(found)}") if found else None

    return fault


def too_large(limit: int, error: BaseException | None = None) -> Callable[[Sequence[Ticket]], BaseException | None]:
    """Out of memory for more rows than `limit`."""

    def fault(members: Sequence[Ticket]) -> BaseException | None:
        return (error or MemoryError("no room")) if sum(member.rows for member in members) > limit else None

    return fault


def in_threads(inner: Scripted, members: Sequence[Ticket], quarantine: Quarantine | None = None, now_ns: int = 0) -> Outcome:
    """As thread and inline executors run it."""
    return execute(inner, members, lambda: now_ns, quarantine)


def on_loop(inner: Scripted, members: Sequence[Ticket], quarantine: Quarantine | None = None, now_ns: int = 0) -> Outcome:
    """As asynchronous functions are run."""
    return asyncio.run(execute_async(Awaited(inner), members, lambda: now_ns, quarantine))


both = pytest.mark.parametrize("way", [in_threads, on_loop])


def ends_of(outcome: Outcome, members: Sequence[Ticket]) -> list[End]:
    """One end for each member, whatever form the outcome has."""
    if outcome.ends is not None:
        assert len(outcome.ends) == len(members)
        return outcome.ends
    rows = [member.rows for member in members]
    return [(outcome.answer, sum(rows[:index])) for index in range(len(members))]


def check_ends(outcome: Outcome, members: Sequence[Ticket], failing: set[int]) -> None:
    """Members whose payload is in `failing` have an error, all others their own rows."""
    for member, end in zip(members, ends_of(outcome, members), strict=True):
        if member.payload in failing:
            assert isinstance(end, ModelFailed), member.payload
        else:
            assert not isinstance(end, Exception), (member.payload, end)
            answer, row = end
            assert answer[row : row + member.rows] == [member.payload] * member.rows


def log2_up(count: int) -> int:
    """⌈log₂ count⌉."""
    return (count - 1).bit_length()


def bound(count: int) -> float:
    """What is promised for any batch."""
    return 1.5 * count + 2 * log2_up(count) + 5


# ---------------------------------------------------------------- poisoned inputs


@both
def test_a_culprit_costs_a_search_once_and_then_one_run(way: Callable[..., Outcome]) -> None:
    """32 members, one bad: found by halving. The same input later: the 31 others in one run, it in another, nothing run again."""
    quarantine = Quarantine()
    first = Scripted(poison({13}))
    outcome = way(first, tickets([1] * 32), quarantine)
    check_ends(outcome, tickets([1] * 32), {13})
    assert (outcome.culprits, outcome.apart, len(quarantine)) == ([13], 0, 1)
    assert 0 < outcome.reruns <= 10
    second = Scripted(poison({13}))
    members = tickets([1] * 32)
    outcome = way(second, members, quarantine, 299 * _NS_PER_S)
    check_ends(outcome, members, {13})
    assert second.groups == [[index for index in range(32) if index != 13], [13]]
    assert (outcome.reruns, outcome.apart, outcome.culprits) == (0, 1, [13])


@both
def test_a_suspect_that_does_no_harm_is_forgotten(way: Callable[..., Outcome]) -> None:
    """The fault was passing: run alone it is answered, and the next time it is in company again."""
    quarantine = Quarantine()
    way(Scripted(poison({2})), tickets([1, 2, 1, 3]), quarantine)
    assert len(quarantine) == 1
    members = tickets([1, 2, 1, 3])
    outcome = way(Scripted(poison(set())), members, quarantine)
    check_ends(outcome, members, set())
    assert (outcome.apart, len(quarantine)) == (1, 0)
    healthy = Scripted(poison(set()))
    way(healthy, tickets([1, 2, 1, 3]), quarantine)
    assert healthy.groups == [[0, 1, 2, 3]]


def test_a_broken_model_puts_nobody_aside() -> None:
    """Whoever fails while nobody is answered may be as good as any: neither in company nor alone is it remembered."""
    quarantine = Quarantine()
    in_threads(Scripted(poison(set(range(16)))), tickets([1] * 16), quarantine)
    in_threads(Scripted(poison({0})), tickets([1]), quarantine)
    assert len(quarantine) == 0


def test_a_suspect_alone_in_its_batch_stays_one() -> None:
    """It fails again with nobody else there: it is remembered for another five minutes from then on."""
    quarantine = Quarantine()
    in_threads(Scripted(poison({1})), tickets([1, 1]), quarantine, 0)
    in_threads(Scripted(poison({1})), tickets([1], first=1), quarantine, 200 * _NS_PER_S)
    again = Scripted(poison({1}))
    in_threads(again, tickets([1, 1]), quarantine, 499 * _NS_PER_S)
    assert again.groups == [[0], [1]]


def test_it_is_forgotten_after_five_minutes() -> None:
    """Not a nanosecond later than promised, and then the memory is empty again, which is all that is asked."""
    quarantine = Quarantine()
    in_threads(Scripted(poison({1})), tickets([1, 1, 1]), quarantine, 5)
    assert quarantine.suspects(tickets([1, 1, 1]), Scripted(poison(set())).contents, 300 * _NS_PER_S + 4) == [1]
    assert quarantine.suspects(tickets([1, 1, 1]), Scripted(poison(set())).contents, 300 * _NS_PER_S + 5) == []
    assert not quarantine


def test_the_memory_is_bounded_and_keeps_the_newest() -> None:
    """Of 3,000 culprits the last 1,024 are known; nothing but fixed-size hashes is kept."""
    quarantine = Quarantine()
    runner = Scripted(poison(set()))
    for index in range(3000):
        quarantine.learn(tickets([1], first=index), (), runner.contents, index)
    assert len(quarantine) == 1024
    assert quarantine.suspects(tickets([1] * 3000), runner.contents, 3000) == list(range(3000 - 1024, 3000))
    assert len(quarantine._glances) == 1024
    assert {len(digest) for digest in quarantine._inputs} == {16}


def test_likeness_alone_puts_nobody_aside() -> None:
    """Two large inputs that differ in one byte, which no glance sees: only the one that failed is a suspect."""
    one, other = bytearray(100_000), bytearray(100_000)
    other[77] = 1
    quarantine = Quarantine()
    members = [Ticket(1, payload=bytes(one)), Ticket(1, payload=bytes(other))]

    def contents(member: Ticket) -> Contents:
        return (member.payload,)

    quarantine.learn(members[:1], (), contents, 0)
    assert quarantine.suspects(members, contents, 1) == [0]
    quarantine.learn(members[1:], (), contents, 1)
    assert quarantine.suspects(members, contents, 2) == [0, 1]
    quarantine.learn((), members[:1], contents, 2)
    assert quarantine.suspects(members, contents, 3) == [1]


def test_inputs_that_cannot_be_told_are_never_suspects() -> None:
    """No contents, or contents that cannot be had: nothing is remembered, and nothing is raised."""
    quarantine = Quarantine()

    def broken(member: Ticket) -> Contents | None:
        if member.payload:
            raise RuntimeError("an item of the caller's own class")
        return None

    quarantine.learn(tickets([1, 1]), tickets([1, 1]), broken, 0)
    assert len(quarantine) == 0
    quarantine.learn(tickets([1]), (), lambda member: (b"x",), 0)
    assert quarantine.suspects(tickets([1, 1]), broken, 1) == []


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=24, unique=True), min_size=2, max_size=6), st.data())
def test_whatever_comes_again_everyone_ends_as_they_would_alone(batches: list[list[int]], data: st.DataObject) -> None:
    """Batches of recurring inputs, some of them bad: every member ends as alone, once, with its own rows; reruns are bounded.

    Where nothing succeeded at all, whoever is good may have failed with the others, as a broken model's.
    """
    bad = data.draw(st.sets(st.integers(0, 30), max_size=6))
    quarantine = Quarantine()
    known: set[int] = set()
    for numbers in batches:
        members = [Ticket(1 + number % 3, payload=number) for number in numbers]
        runner = Scripted(poison(bad))
        outcome = in_threads(runner, members, quarantine)
        assert outcome.reruns <= bound(len(members))
        suspects = known.intersection(numbers)
        assert outcome.apart == len(suspects)
        check_ends(outcome, members, bad if outcome.runs else set(numbers))
        fresh = bad.intersection(numbers) - suspects
        if not fresh:
            assert outcome.reruns == 0
        assert all(runner.groups.count([number]) == 1 for number in suspects)
        if outcome.runs:
            known |= bad.intersection(numbers)
        assert len(quarantine) == len(known)


# ---------------------------------------------------------------- memory


@both
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 31, 32, 63])
def test_a_batch_too_large_for_memory_is_halved_until_it_fits(way: Callable[..., Outcome], limit: int) -> None:
    """64 rows where `limit` fit: all are answered, no size that does not fit is tried twice, and it is reported."""
    runner, members = Scripted(too_large(limit)), tickets([1] * 64)
    outcome = way(runner, members)
    check_ends(outcome, members, set())
    sizes = [len(group) for group in runner.groups]
    unfitted = [size for size in sizes if size > limit]
    assert sorted(set(unfitted), reverse=True) == unfitted
    assert outcome.oom_runs == len(unfitted)
    assert limit < outcome.oom_rows <= 2 * limit
    assert outcome.reruns == len(sizes) - 1 <= log2_up(64) + 2 * 64 / limit
    assert outcome.culprits == [] and isinstance(outcome.cause, MemoryError)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=48), st.integers(1, 60), st.sets(st.integers(0, 47), max_size=3))
def test_nobody_fails_for_memory_unless_alone(rows: list[int], limit: int, bad: set[int]) -> None:
    """Any sizes, any limit, some bad inputs besides: who fits alone and is good is answered, unless nothing could be at all."""
    members = tickets(rows)
    size_fault, own_fault = too_large(limit), poison(bad)
    runner = Scripted(lambda group: size_fault(group) or own_fault(group))
    quarantine = Quarantine()
    outcome = in_threads(runner, members, quarantine)
    assert outcome.reruns <= bound(len(rows))
    failing = {index for index, count in enumerate(rows) if count > limit or index in bad}
    if outcome.runs:
        check_ends(outcome, members, failing)
        assert len(quarantine) == len(failing)
    else:
        assert len(quarantine) == 0
    if outcome.oom_rows:
        assert outcome.oom_rows > limit
        assert all(run.rows <= limit for run in outcome.runs)


@both
def test_one_input_that_needs_all_memory_is_its_own_fault(way: Callable[..., Outcome]) -> None:
    """Alone it does not fit, while many others do together: it fails, is remembered, and the model's batches stay as they are."""

    def fault(members: Sequence[Ticket]) -> BaseException | None:
        return MemoryError() if any(member.payload == 5 for member in members) else None

    quarantine = Quarantine()
    members = tickets([1] * 16)
    outcome = way(Scripted(fault), members, quarantine)
    check_ends(outcome, members, {5})
    assert (outcome.culprits, outcome.oom_rows, len(quarantine)) == ([5], 0, 1)
    again = Scripted(fault)
    outcome = way(again, members, quarantine)
    assert (outcome.reruns, outcome.oom_rows, len(again.groups)) == (0, 0, 2)


def test_a_request_alone_that_does_not_fit_says_how_large_it_was() -> None:
    """Nothing to halve: it fails, and the lane learns that so many rows are too many."""
    outcome = in_threads(Scripted(too_large(4)), tickets([6]))
    assert isinstance(ends_of(outcome, tickets([6]))[0], ModelFailed)
    assert (outcome.oom_runs, outcome.oom_rows, outcome.reruns) == (1, 6, 0)


def test_memory_that_sufficed_for_as_many_blames_no_size() -> None:
    """Half of the batch fits, the other half at first does not: four rows are not too many, eight may be."""
    faults = iter([MemoryError(), None, MemoryError()])
    outcome = in_threads(Scripted(lambda members: next(faults, None)), tickets([1] * 8))
    check_ends(outcome, tickets([1] * 8), set())
    assert (outcome.oom_runs, outcome.oom_rows, outcome.reruns) == (2, 8, 4)


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


class Fail(Exception):
    """As ONNX Runtime's exceptions, which have no base but `Exception`."""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MemoryError, ""),
        (OutOfMemoryError, "CUDA: tried to allocate 20 GiB"),
        (Fail, "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 17179869184"),
        (Fail, "[ONNXRuntimeError] : 1 : FAIL : std::bad_alloc"),
        (RuntimeError, "CUDA error: out of memory"),
        (RuntimeError, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_what_libraries_raise_for_lack_of_memory(kind: type[Exception], text: str) -> None:
    """By class, by name or by words: halved, and everyone is answered."""
    error = kind(text)
    assert is_out_of_memory(error)
    outcome = in_threads(Scripted(too_large(3, error)), tickets([1] * 8))
    check_ends(outcome, tickets([1] * 8), set())
    assert outcome.oom_rows == 4


def test_numpys_own_error_is_one() -> None:
    """An array that no machine has room for."""
    with pytest.raises(MemoryError) as caught:
        np.empty((1 << 50,), np.float64)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [ValueError("a bad row"), BadRequest("no more than 8: out of memory"), ModelFailed("bad_alloc")])
def test_what_is_not_lack_of_memory(error: Exception) -> None:
    """Other faults, and what a model says to its client on purpose."""
    assert not is_out_of_memory(error)


def test_nobody_is_run_again_after_ending() -> None:
    """While the model seems broken three members are tried alone; the one that is answered then is left out of its group's run."""
    bad = {0, 7, 11, 12, 13, 14}
    members, runner = tickets([1] * 15), Scripted(poison(bad))
    outcome = in_threads(runner, members)
    check_ends(outcome, members, bad)
    answered = [number for group in runner.groups if not bad.intersection(group) for number in group]
    assert sorted(answered) == sorted(set(range(15)) - bad)
