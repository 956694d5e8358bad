"""Runners for functions with hooks: `decode` is called with each item before the function, `encode` with each result after it.

A hook's exception is its own item's failure and nobody else's: the others go on in the same run, and nothing is run again. Hooks
run where the function runs, in its context, one item after the other; asynchronous ones for all items at once. Everything else is
as in `functions.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.core.ticket import Ticket
from shoal.engine.functions import item_contents, one_result_each
from shoal.engine.outcome import Result, is_out_of_memory, model_error
from shoal.engine.quarantine import Contents
from shoal.errors import ModelFailed

__all__ = ["AsyncHookedRunner", "HookedRunner", "check_hook"]

Hook = Callable[[Any], Any] | None


def check_hook(name: str, hook: Any, is_async: bool) -> None:
    """Raise TypeError for a hook that cannot be used beside a function that is asynchronous or not."""
    if hook is None:
        return
    if not callable(hook):
        raise TypeError(f"{name} must be a function of one item, not a {type(hook).__name__}")
    inner = _inner(hook)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(f"{name} must return its result, but is a generator")
    if inspect.iscoroutinefunction(inner) and not is_async:
        raise TypeError(f"{name} is asynchronous, but the function is not, and runs where nothing can be awaited")


def _inner(hook: Any) -> Any:
    return hook if inspect.isroutine(hook) or isinstance(hook, type | functools.partial) else type(hook).__call__


class _Batch:
    """The items of a batch on their way from decoding to encoding. Those that fail on it stay behind.

    `places` are the members, by index, that are still with us, `items` what they have become.
    """

    def __init__(self, members: Sequence[Ticket]) -> None:
        self._members = members
        self._places: Sequence[int] = range(len(members))
        self._failures: dict[int, Exception] = {}
        self._model_rows = 0
        self.items: list[Any] = [member.payload for member in members]

    def keep(self, values: Sequence[Any]) -> None:
        """What a step made of each item that was left; an exception is its failure, but lack of memory is nobody's and gets out."""
        places, self._places = self._places, []
        self.items = []
        for place, value in zip(places, values, strict=True):
            if not isinstance(value, BaseException):
                self._places.append(place)
                self.items.append(value)
            elif is_out_of_memory(value):
                raise value
            else:
                self._failures[place] = model_error(value)

    def gathered(self, stack: bool) -> Any:
        """What the function is given."""
        return np.stack(self.items) if stack else self.items

    def take(self, results: Any) -> None:
        """What the function returned. Raises ModelFailed if it is not one result for each item."""
        results = one_result_each(results, len(self.items))
        self._model_rows = sum([self._members[place].rows for place in self._places])
        self.keep(results if isinstance(results, list) else list(results))

    def result(self, input_ns: int, infer_ns: int, output_ns: int) -> Result:
        """Every member's result or failure."""
        result = Result(None, input_ns, infer_ns, output_ns, self._failures or None)
        answers: list[Any] = [None] * len(self._members)
        for place, item in zip(self._places, self.items, strict=True):
            answers[place] = (item,)
        result.answers = answers
        result.model_rows = self._model_rows
        self.leave()
        return result

    def leave(self) -> None:
        """Forget everyone: a hook's exception knows the frame that knows this object, and the members will know the exception."""
        self._members = self._places = self.items = []
        self._failures = {}


def _attempt(hook: Callable[[Any], Any], item: Any) -> Any:
    try:
        return hook(item)
    except Exception as error:
        return error


class HookedRunner:
    """Calls a function, and its hooks, with the items of a batch."""

    def __init__(
        self, function: Callable[[Any], Any], stack: bool, clock: Callable[[], int], *, decode: Hook = None, encode: Hook = None
    ) -> None:
        self._function = function
        self._stack = stack
        self._clock = clock
        self._decode = decode
        self._encode = encode

    def run(self, members: Sequence[Ticket]) -> Result:
        """One call of the function, unless no item could be decoded. Raises whatever the function raises."""
        clock, call = self._clock, contextvars.Context().run
        begun_ns = clock()
        batch = _Batch(members)
        del members
        if self._decode is not None:
            batch.keep([call(_attempt, self._decode, item) for item in batch.items])
        if not batch.items:
            return batch.result(clock() - begun_ns, 0, 0)
        gathered = batch.gathered(self._stack)
        ready_ns = clock()
        results = call(self._function, gathered)
        returned_ns = clock()
        try:
            batch.take(results)
        except ModelFailed as error:
            batch.leave()
            return Result(None, 0, 0, 0, refused=error)
        if self._encode is not None:
            batch.keep([call(_attempt, self._encode, item) for item in batch.items])
        return batch.result(ready_ns - begun_ns, returned_ns - ready_ns, clock() - returned_ns)

    def contents(self, member: Ticket) -> Contents | None:
        """The item, where it can be told by value."""
        return item_contents(member.payload)

    def close(self) -> None:
        """Nothing to free."""


class AsyncHookedRunner:
    """The same for a function that is awaited; each hook may be asynchronous or not."""

    def __init__(
        self, function: Callable[[Any], Any], stack: bool, clock: Callable[[], int], *, decode: Hook = None, encode: Hook = None
    ) -> None:
        self._function = function
        self._stack = stack
        self._clock = clock
        self._decode = decode
        self._encode = encode

    async def run(self, members: Sequence[Ticket]) -> Result:
        """One call of the function, unless no item could be decoded. Raises whatever the function raises."""
        clock = self._clock
        begun_ns = clock()
        batch = _Batch(members)
        del members
        if self._decode is not None:
            batch.keep(await _attempt_all(self._decode, batch.items))
        if not batch.items:
            return batch.result(clock() - begun_ns, 0, 0)
        gathered = batch.gathered(self._stack)
        ready_ns = clock()
        results = await self._function(gathered)
        returned_ns = clock()
        try:
            batch.take(results)
        except ModelFailed as error:
            batch.leave()
            return Result(None, 0, 0, 0, refused=error)
        if self._encode is not None:
            batch.keep(await _attempt_all(self._encode, batch.items))
        return batch.result(ready_ns - begun_ns, returned_ns - ready_ns, clock() - returned_ns)

    def contents(self, member: Ticket) -> Contents | None:
        """The item, where it can be told by value."""
        return item_contents(member.payload)

    def close(self) -> None:
        """Nothing to free."""


async def _attempt_all(hook: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    if inspect.iscoroutinefunction(_inner(hook)):
        return await asyncio.gather(*[hook(item) for item in items], return_exceptions=True)
    return [_attempt(hook, item) for item in items]
