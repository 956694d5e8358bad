"""One batch on one executor: run it, and if that fails, find out who is to blame. No threads, no loop, no scheduler.

A *runner* turns members into one answer; `execute` and `execute_async` add what every runner needs: inputs that are known to make
the model raise are run alone (`quarantine.py`), a failed batch is taken apart until only the culprits fail (`isolation.py`), model
exceptions become `ModelFailed`, and nothing that a model raises gets out, be it SystemExit or KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.core.ticket import Ticket
from shoal.engine.isolation import Search, isolate, set_apart
from shoal.engine.outcome import Outcome, Result, ends_of, runs_of
from shoal.engine.quarantine import Contents, Quarantine

__all__ = ["AsyncRunner", "Runner", "execute", "execute_async"]


class Runner(Protocol):
    """One executor's way from members to answers. Called from one thread at a time."""

    def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members together. Raises whatever the model raises."""
        ...

    def contents(self, member: Ticket) -> Contents | None:
        """All that the model sees of a member, as bytes; None where that cannot be told."""
        ...

    def close(self) -> None:
        """Free what the runner holds. Never called while `run` is under way."""
        ...


class AsyncRunner(Protocol):
    """The same for functions that are awaited on the loop."""

    async def run(self, members: Sequence[Ticket]) -> Result:
        """Run the members together. Raises whatever the model raises."""
        ...

    def contents(self, member: Ticket) -> Contents | None:
        """All that the function sees of a member, as bytes; None where that cannot be told."""
        ...

    def close(self) -> None:
        """Free what the runner holds."""
        ...


def execute(
    runner: Runner,
    members: Sequence[Ticket],
    clock: Callable[[], int],
    quarantine: Quarantine | None = None,
    passing: tuple[type[BaseException], ...] = (),
) -> Outcome:
    """Run a batch. Raises nothing that the model raises, except what is `passing`. `clock` gives nanoseconds."""
    suspects = quarantine.suspects(members, runner.contents, clock()) if quarantine else ()
    search: Search
    if suspects:
        search = set_apart(members, suspects)
    else:
        try:
            result = runner.run(members)
        except passing:
            raise
        except BaseException as error:
            search = isolate(members, _let_go(error))
        else:
            try:
                return _outcome(members, result, clock())
            finally:
                members = result = ()  # type: ignore[assignment]
    try:
        group = next(search)
        while True:
            group = search.send(_tried(runner, group, passing))
    except StopIteration as stop:
        try:
            return _finished(stop.value, runner, members, suspects, clock(), quarantine)
        finally:
            search = group = members = ()  # type: ignore[assignment]


def _tried(runner: Runner, group: Sequence[Ticket], passing: tuple[type[BaseException], ...]) -> Result | BaseException:
    try:
        return runner.run(group)
    except passing:
        raise
    except BaseException as error:
        return _let_go(error)
    finally:
        del group


async def execute_async(
    runner: AsyncRunner, members: Sequence[Ticket], clock: Callable[[], int], quarantine: Quarantine | None = None
) -> Outcome:
    """The same for a runner whose `run` is awaited. Lets through what is meant for the task itself: its cancellation, Ctrl-C."""
    suspects = quarantine.suspects(members, runner.contents, clock()) if quarantine else ()
    if suspects:
        search = set_apart(members, suspects)
    else:
        result = await _tried_async(runner, members)
        if isinstance(result, Result):
            try:
                return _outcome(members, result, clock())
            finally:
                members = result = ()  # type: ignore[assignment]
        search = isolate(members, result)
        del result
    try:
        group = next(search)
        while True:
            group = search.send(await _tried_async(runner, group))
    except StopIteration as stop:
        try:
            return _finished(stop.value, runner, members, suspects, clock(), quarantine)
        finally:
            search = group = members = ()  # type: ignore[assignment]


async def _tried_async(runner: AsyncRunner, group: Sequence[Ticket]) -> Result | BaseException:
    try:
        return await runner.run(group)
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _let_go(error)  # something that the function awaited was cancelled, not we
    except BaseException as error:
        return _let_go(error)
    finally:
        del group


def _let_go(error: BaseException) -> BaseException:
    """Empties the frames that an exception came through, except the one that caught it.

    They know the members of the batch, who will know the error that they ended with: only the garbage collector would free such a
    circle, and with it the requests' payloads. For the same reason the functions here delete what they know of members in the end.
    """
    if error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__.tb_next)
    return error


def _outcome(members: Sequence[Ticket], result: Result, done_ns: int) -> Outcome:
    """Of a batch that was run as a whole."""
    if result.refused is not None:
        return Outcome(None, ends_of(members, result), (), done_ns)
    each = bool(result.failures) or result.answers is not None
    return Outcome(result.answer, ends_of(members, result) if each else None, runs_of(members, result), done_ns)


def _finished(
    outcome: Outcome,
    runner: Runner | AsyncRunner,
    members: Sequence[Ticket],
    suspects: Sequence[int],
    done_ns: int,
    quarantine: Quarantine | None,
) -> Outcome:
    """Of a batch that was run in parts: what it taught is kept."""
    outcome.done_ns = done_ns
    if quarantine is not None:
        cleared = [members[index] for index in suspects if index not in outcome.culprits]
        quarantine.learn([members[index] for index in outcome.culprits], cleared, runner.contents, done_ns)
    return outcome
