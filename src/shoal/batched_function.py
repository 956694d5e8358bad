"""`@batched`: a function of a list becomes an awaitable function of one item, with a `Batcher` behind it for each event loop."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack, overload

import numpy as np

from shoal.batcher import Batcher, Options

__all__ = ["BatchedFunction", "batched"]

In = TypeVar("In")
Out = TypeVar("Out")
Array = np.ndarray[Any, np.dtype[Any]]


class BatchedFunction(Generic[In, Out]):
    """What `@batched` makes of a function: `await f(item)`. Each event loop has a batcher of its own, opened by its first call.

    It is closed with the loop (by `asyncio.run`, or whoever calls `loop.shutdown_asyncgens()`), or by `await f.close()` before.
    As a method, each instance has its own.
    """

    def __init__(self, function: Callable[[Any], Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Batcher[In, Out], AsyncGenerator[None, None]]]
        self._batchers = weakref.WeakKeyDictionary()
        self._attribute: str | None = None
        functools.update_wrapper(self, function)
        Batcher[In, Out](function, **options)  # what is wrong with them shows where they are written

    async def __call__(self, item: In, *, timeout_ms: float | None = None, wait: bool = False) -> Out:
        """One item's result; as `Batcher.__call__`."""
        opened = self._batchers.get(asyncio.get_running_loop())
        batcher = await self._open() if opened is None else opened[0]
        return await batcher(item, timeout_ms=timeout_ms, wait=wait)

    async def _open(self) -> Batcher[In, Out]:
        loop = asyncio.get_running_loop()
        batcher = Batcher[In, Out](self._function, **self._options)
        keeper = _keep(batcher)
        self._batchers[loop] = (batcher, keeper)
        await keeper.asend(None)  # the loop knows it from here on, and closes it at its own end
        return batcher

    async def close(self) -> None:
        """Answer what was accepted on this loop, and end its threads. The next call opens it again."""
        opened = self._batchers.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened[1].aclose()

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: object | None, owner: type | None = None) -> BatchedFunction[In, Out]:
        if instance is None:
            return self
        if isinstance(instance, type):
            raise TypeError("@batched does not work on class methods; use a static method or a function")
        bound = BatchedFunction[In, Out](self._function.__get__(instance, owner), self._options)
        try:
            instance.__dict__[self._attribute or self._function.__name__] = bound
        except AttributeError:
            raise TypeError(f"@batched methods need instances with a __dict__; {type(instance).__name__} has none") from None
        return bound


async def _keep(batcher: Batcher[Any, Any]) -> AsyncGenerator[None, None]:
    """Holds a batcher open until it is closed itself, which event loops do at their end with all asynchronous generators."""
    await batcher.open()
    try:
        yield
    finally:
        await batcher.close()


class _Decorator:
    """`@batched(...)` with its options, before it meets its function."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @overload
    def __call__(self, function: Callable[[list[In]], Awaitable[Sequence[Out]]], /) -> BatchedFunction[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[list[In]], Sequence[Out]], /) -> BatchedFunction[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[Array], Any], /) -> BatchedFunction[Array, Any]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[In]], Awaitable[Sequence[Out]]], /) -> BatchedFunction[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[In]], Sequence[Out]], /) -> BatchedFunction[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[Any, Array], Any], /) -> BatchedFunction[Array, Any]: ...
    def __call__(self, function: Any, /) -> Any:
        return BatchedFunction(function, self._options)


@overload
def batched(**options: Unpack[Options]) -> _Decorator: ...
@overload
def batched(function: Callable[[list[In]], Awaitable[Sequence[Out]]], /) -> BatchedFunction[In, Out]: ...
@overload
def batched(function: Callable[[list[In]], Sequence[Out]], /) -> BatchedFunction[In, Out]: ...
@overload
def batched(function: Callable[[Array], Any], /) -> BatchedFunction[Array, Any]: ...
def batched(function: Any = None, /, **options: Unpack[Options]) -> Any:
    """Decorator: the function of a list becomes a function of one item, batched behind the scenes. Options as for `Batcher`.

    Without options the parentheses may be left out.

    @batched(max_batch_size=32, max_delay_ms=2)
    def embed(texts: list[str]) -> list[Vector]: ...

    vector = await embed("one text")
    """
    return _Decorator(options) if function is None else _Decorator(options)(function)
