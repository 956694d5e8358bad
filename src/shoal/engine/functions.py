"""Runners for plain Python functions over arbitrary objects: a list (or one stacked array) in, one result for each item out.

The function sees no context variables of any caller: every batch runs in a context of its own. What it returns is checked and taken
apart here, on the executor. No loop, no scheduler.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from shoal.core.ticket import Ticket
from shoal.engine.outcome import Result, model_error
from shoal.engine.quarantine import Contents
from shoal.errors import ModelFailed

__all__ = ["AsyncFunctionRunner", "FunctionRunner", "check_function", "item_contents", "one_result_each", "wants_array"]

_KNOWN_REFERENCES: Final = 4  # to a result that nobody else holds: the runner's name, two parameters, getrefcount's argument


def _gather(members: Sequence[Ticket], stack: bool) -> Any:
    items = [member.payload for member in members]
    return np.stack(items) if stack else items


def _name(value: Any) -> str:
    return type(value).__name__


def one_result_each(results: Any, count: int) -> Any:
    """What came back, as an array or a list of `count` results that nobody else holds.

    Raises ModelFailed if it is not one result for each item.
    """
    if (
        isinstance(results, str | bytes | bytearray | Mapping)
        or not hasattr(results, "__len__")
        or not hasattr(results, "__getitem__")
    ):
        if inspect.isawaitable(results):
            if inspect.iscoroutine(results):
                results.close()
            raise ModelFailed("the function returned an awaitable; declare it with `async def`")
        raise ModelFailed(f"the function returned a {_name(results)} for {count} items, expected a sequence of as many results")
    if isinstance(results, np.ndarray) and not results.ndim:
        raise ModelFailed(f"the function returned a scalar for {count} items, expected one result for each")
    if len(results) != count:
        raise ModelFailed(f"the function returned {len(results)} results for {count} items")
    if isinstance(results, np.ndarray):
        # The next batch may be running before these are read: a buffer that the function keeps must not be handed out.
        if results.base is not None or sys.getrefcount(results) > _KNOWN_REFERENCES:
            results = results.copy()
        if not results.dtype.hasobject:
            return results
    answer = list(results)
    if len(answer) != count:
        raise ModelFailed(f"the function returned {len(answer)} results for {count} items")
    return answer


def _take_apart(results: Any, members: Sequence[Ticket]) -> tuple[Any, dict[int, Exception] | None]:
    """(answer, errors of single items): `answer[row]` is a member's result, row being its first row in the batch."""
    answer = one_result_each(results, len(members))
    if not isinstance(answer, list):
        return _by_row(answer, members), None
    failures: dict[int, Exception] = {}
    for index, result in enumerate(answer):
        if isinstance(result, Exception):
            failures[index] = model_error(result)
    return _by_row(answer, members), failures or None


def _by_row(answer: Any, members: Sequence[Ticket]) -> Any:
    """Where every item is one row, its place is its row already."""
    if all(member.rows == 1 for member in members):
        return answer
    keyed: dict[int, Any] = {}
    row = 0
    for member, result in zip(members, answer, strict=True):
        keyed[row] = result
        row += member.rows
    return keyed


def check_function(function: Any) -> bool:
    """Whether it is asynchronous. Raises TypeError for what cannot be batched."""
    if not callable(function):
        raise TypeError(f"expected a function of a list of items, got a {type(function).__name__}")
    inner = function if inspect.isroutine(function) or isinstance(function, functools.partial) else type(function).__call__
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError("a generator cannot be batched: return a list of results")
    return inspect.iscoroutinefunction(inner)


def wants_array(function: Callable[..., Any]) -> bool:
    """Whether the first parameter is annotated as a numpy array."""
    try:
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
        parameters = list(inspect.signature(function).parameters)
    except Exception:
        return False  # annotations that cannot be resolved say nothing
    hint = hints.get(parameters[0]) if parameters else None
    return hint is np.ndarray or typing.get_origin(hint) is np.ndarray


def item_contents(item: Any) -> Contents | None:
    """What tells an item from others by its value: its bytes, or its hash; None where there is neither."""
    kind = type(item).__qualname__.encode()
    if isinstance(item, bytes | bytearray):
        return (kind, item)
    if isinstance(item, str):
        return (kind, item.encode(errors="surrogatepass"))
    if isinstance(item, np.ndarray | np.generic):
        if item.dtype.hasobject:
            return None
        array = np.ascontiguousarray(item)
        return (repr((item.shape, item.dtype.str)).encode(), array.reshape(-1).view(np.uint8).data)
    if not isinstance(item, Hashable) or type(item).__hash__ is object.__hash__:
        return None
    return (kind, hash(item).to_bytes(8, "little", signed=True))


class FunctionRunner:
    """Calls a function with the items of a batch."""

    def __init__(self, function: Callable[[Any], Any], stack: bool, clock: Callable[[], int]) -> None:
        self._function = function
        self._stack = stack
        self._clock = clock

    def run(self, members: Sequence[Ticket]) -> Result:
        """One call. Raises whatever the function raises."""
        clock = self._clock
        begun_ns = clock()
        items = _gather(members, self._stack)
        ready_ns = clock()
        results = contextvars.Context().run(self._function, items)
        returned_ns = clock()
        try:
            answer, failures = _take_apart(results, members)
        except ModelFailed as error:
            return Result(None, 0, 0, 0, refused=error)
        return Result(answer, ready_ns - begun_ns, returned_ns - ready_ns, clock() - returned_ns, failures)

    def contents(self, member: Ticket) -> Contents | None:
        """The item, where it can be told by value."""
        return item_contents(member.payload)

    def close(self) -> None:
        """Nothing to free."""


class AsyncFunctionRunner:
    """Awaits a function of the items of a batch. The task it runs in has an empty context."""

    def __init__(self, function: Callable[[Any], Awaitable[Any]], stack: bool, clock: Callable[[], int]) -> None:
        self._function = function
        self._stack = stack
        self._clock = clock

    async def run(self, members: Sequence[Ticket]) -> Result:
        """One call. Raises whatever the function raises."""
        clock = self._clock
        begun_ns = clock()
        items = _gather(members, self._stack)
        ready_ns = clock()
        results = await self._function(items)
        returned_ns = clock()
        try:
            answer, failures = _take_apart(results, members)
        except ModelFailed as error:
            return Result(None, 0, 0, 0, refused=error)
        return Result(answer, ready_ns - begun_ns, returned_ns - ready_ns, clock() - returned_ns, failures)

    def contents(self, member: Ticket) -> Contents | None:
        """The item, where it can be told by value."""
        return item_contents(member.payload)

    def close(self) -> None:
        """Nothing to free."""
