"""One batch on one executor: run it, and if that fails, find out who is to blame. No threads, no loop, no scheduler.

A *runner* turns members into one answer; `execute` and `execute_async` add what every runner needs: a failed batch is taken apart
(`isolate`) until only the culprits fail, model exceptions become `ModelFailed`, and nothing that a model raises gets out, be it
SystemExit or KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from shoal.core.ticket import Ticket
from shoal.errors import ClientError, ModelFailed, ShoalError

__all__ = ["AsyncRunner", "End", "Outcome", "Result", "Runner", "execute", "execute_async", "isolate", "model_error"]

End: TypeAlias = "tuple[Any, int] | Exception"
"""How one member ended: (answer, first row of the member in it), or the error."""

_MAX_MESSAGE: Final = 2000


class Result:
    """What a runner made of its members: one `answer` that holds all their rows in order, and how long its three steps took.

    `failures` are the errors of single members, by index, where the model named them. `refused` is set instead of an answer when
    what the model returned cannot be taken apart (wrong number of rows): then nobody is answered, and nothing is run again.
    `answers` takes the place of `answer` where every member has one of its own. `tokens` are the rows (times their length, where
    that differs) that members brought, `padded_tokens` what was run for them; both are 0 where nothing is ever padded.
    """

    __slots__ = ("answer", "answers", "failures", "infer_ns", "input_ns", "output_ns", "padded_tokens", "refused", "tokens")

    def __init__(
        self,
        answer: Any,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        failures: Mapping[int, Exception] | None = None,
        refused: Exception | None = None,
    ) -> None:
        self.answer = answer
        self.answers: Sequence[Any] | None = None
        self.input_ns = input_ns
        self.infer_ns = infer_ns
        self.output_ns = output_ns
        self.failures = failures
        self.refused = refused
        self.tokens = 0
        self.padded_tokens = 0


class Runner(Protocol):
    """One executor's way from members to answers. Called from one thread at a time."""

    def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members together. Raises whatever the model raises."""
        ...

    def close(self) -> None:
        """Free what the runner holds. Never called while `run` is under way."""
        ...


class AsyncRunner(Protocol):
    """The same for functions that are awaited on the loop."""

    async def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members together. Raises whatever the model raises."""
        ...

    def close(self) -> None:
        """Free what the runner holds."""
        ...


class Run:
    """One execution that gave an answer: rows, nanoseconds, and what padding cost (see `Result`)."""

    __slots__ = ("infer_ns", "input_ns", "output_ns", "padded_tokens", "rows", "tokens")

    def __init__(self, rows: int, result: Result) -> None:
        self.rows = rows
        self.input_ns = result.input_ns
        self.infer_ns = result.infer_ns
        self.output_ns = result.output_ns
        self.tokens = result.tokens
        self.padded_tokens = result.padded_tokens


class Outcome:
    """What became of a batch.

    Usually `answer` holds every member's rows in order and `ends` is None. After any failure `ends` has one entry per member.
    `runs` are the executions that gave an answer, `reruns` how often parts of the batch were run again, `cause` the exception that
    the model raised for the batch as a whole.
    """

    __slots__ = ("answer", "cause", "done_ns", "ends", "reruns", "runs")

    def __init__(self, answer: Any, ends: list[End] | None, runs: Sequence[Run], done_ns: int) -> None:
        self.answer = answer
        self.ends = ends
        self.runs = runs
        self.done_ns = done_ns
        self.reruns = 0
        self.cause: BaseException | None = None


def model_error(error: BaseException) -> ShoalError:
    """What the client may know of an exception of the model: its type and text, and the HTTP status that it asks for.

    A `ClientError` or `ModelFailed` raised by the model on purpose stays itself. The original is the `__cause__` otherwise.
    """
    if isinstance(error, ClientError | ModelFailed):
        return error
    status = getattr(error, "http_status", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        status = None
    try:
        text = str(error)
    except Exception:
        text = ""  # even an exception's own text may fail
    name = type(error).__name__
    failed = ModelFailed(f"{name}: {text[:_MAX_MESSAGE]}" if text else name, http_status=status)
    failed.__cause__ = error
    return failed


def _rows(members: Sequence[Ticket]) -> int:
    return sum([member.rows for member in members])


def _ends(members: Sequence[Ticket], result: Result) -> list[End]:
    """Every member's end, from a result that does not answer all of them alike."""
    if result.refused is not None:
        return [result.refused] * len(members)
    failures = result.failures or {}
    ends: list[End] = []
    row = 0
    for index, member in enumerate(members):
        error = failures.get(index)
        if error is not None:
            ends.append(error)
        else:
            ends.append((result.answer, row) if result.answers is None else (result.answers[index], 0))
        row += member.rows
    return ends


def _outcome(members: Sequence[Ticket], result: Result, done_ns: int) -> Outcome:
    if result.refused is not None:
        return Outcome(None, _ends(members, result), (), done_ns)
    runs = (Run(_rows(members), result),)
    each = bool(result.failures) or result.answers is not None
    return Outcome(result.answer, _ends(members, result) if each else None, runs, done_ns)


def execute(
    runner: Runner,
    members: Sequence[Ticket],
    clock: Callable[[], int],
    passing: tuple[type[BaseException], ...] = (),
) -> Outcome:
    """Run a batch. Raises nothing that the model raises, except what is `passing`. `clock` gives nanoseconds."""
    try:
        result = runner.run(members)
    except passing:
        raise
    except BaseException as error:
        search = isolate(members, _let_go(error))
    else:
        return _outcome(members, result, clock())
    del members
    try:
        group = next(search)
        while True:
            group = search.send(_tried(runner, group, passing))
    except StopIteration as stop:
        search = group = ()  # type: ignore[assignment]
        return _finished(stop.value, clock())


def _tried(runner: Runner, group: Sequence[Ticket], passing: tuple[type[BaseException], ...]) -> Result | BaseException:
    try:
        return runner.run(group)
    except passing:
        raise
    except BaseException as error:
        del group
        return _let_go(error)


def _let_go(error: BaseException) -> BaseException:
    """Empties the frames that an exception came through, except the one that caught it.

    They know the members of the batch, who will know the error that they ended with: only the garbage collector would free such a
    circle, and with it the requests' payloads. For the same reason the functions that catch delete what they know of members.
    """
    if error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__.tb_next)
    return error


def _finished(outcome: Outcome, done_ns: int) -> Outcome:
    outcome.done_ns = done_ns
    return outcome


async def execute_async(runner: AsyncRunner, members: Sequence[Ticket], clock: Callable[[], int]) -> Outcome:
    """The same for a runner whose `run` is awaited. Lets through what is meant for the task itself: its cancellation, Ctrl-C."""
    result = await _tried_async(runner, members)
    if isinstance(result, Result):
        return _outcome(members, result, clock())
    search = isolate(members, result)
    del members, result
    try:
        group = next(search)
        while True:
            group = search.send(await _tried_async(runner, group))
    except StopIteration as stop:
        search = group = ()  # type: ignore[assignment]
        return _finished(stop.value, clock())


async def _tried_async(runner: AsyncRunner, group: Sequence[Ticket]) -> Result | BaseException:
    try:
        return await runner.run(group)
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        del group
        return _let_go(error)  # something that the function awaited was cancelled, not we
    except BaseException as error:
        del group
        return _let_go(error)


def isolate(members: Sequence[Ticket], cause: BaseException) -> Generator[Sequence[Ticket], Result | BaseException, Outcome]:
    """Find the members that make a batch fail. Yields groups to be run, is sent what came of each, returns the outcome.

    Halves are tried, and the halves of those that fail; a member that fails alone is a culprit and gets its own exception. One
    culprit among n costs at most 2⌈log₂ n⌉ reruns. Where culprits turn out to be many, what is left is run one by one: never more
    than 1.5 n + 2⌈log₂ n⌉ + 5 reruns in all. If the first 2⌈log₂ n⌉ + 2 reruns and three single members from other places all fail,
    the model itself is taken to be broken, and whoever was not tried alone fails with the exception of the group it was in.
    """
    search = _Search(members)
    outcome = yield from search.run(cause)
    outcome.reruns = search.reruns
    outcome.cause = cause
    return outcome


class _Search:
    """One batch being taken apart."""

    def __init__(self, members: Sequence[Ticket]) -> None:
        count = len(members)
        self.members = members
        self.ends: list[End | None] = [None] * count
        self.reruns = 0
        self._runs: list[Run] = []
        self._patience = 2 * (count - 1).bit_length() + 2

    def run(self, cause: BaseException) -> Generator[Sequence[Ticket], Result | BaseException, Outcome]:
        count = len(self.members)
        failing: list[tuple[int, int, BaseException]] = [(0, count, cause)]
        broken: bool | None = None
        while failing:
            first, last, error = failing.pop()
            if last - first == 1:
                self.ends[first] = model_error(error)
                continue
            if broken is None and not self._runs and self.reruns >= self._patience:
                broken = yield from self._is_broken()
            if broken:
                shared = model_error(error)
                self.ends[first:last] = [end or shared for end in self.ends[first:last]]
                continue
            half = (first + last) // 2
            parts = [(first, half), (half, last)]
            if self.reruns > count // 2 + self._patience:
                parts = [(index, index + 1) for index in range(first, last)]
            for start, stop in parts:
                if stop - start == 1 and self.ends[start] is not None:
                    continue
                raised = yield from self._try(start, stop)
                if raised is not None:
                    failing.append((start, stop, raised))
        return Outcome(None, [end for end in self.ends if end is not None], self._runs, 0)

    def _is_broken(self) -> Generator[Sequence[Ticket], Result | BaseException, bool]:
        """Nothing has worked so far: does any of three members from other places work alone?"""
        count = len(self.members)
        for index in (0, count // 4, count // 2):  # the search begins at the other end
            if self.ends[index] is None:
                raised = yield from self._try(index, index + 1)
                if raised is None:
                    return False
                self.ends[index] = model_error(raised)
        return True

    def _try(self, first: int, last: int) -> Generator[Sequence[Ticket], Result | BaseException, BaseException | None]:
        """Run members `first` to `last`; the exception if that failed, else their ends are known."""
        group = self.members[first:last]
        self.reruns += 1
        tried = yield group
        if isinstance(tried, BaseException):
            return tried
        ends = _ends(group, tried)
        if tried.refused is None:
            self._runs.append(Run(_rows(group), tried))
        for index, end in enumerate(ends, start=first):
            if self.ends[index] is None:
                self.ends[index] = end
        return None
