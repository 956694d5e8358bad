"""`@batched`: functions and methods, one batcher for each loop, closed with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal import batched

Run = Callable[[Any], Any]


def threads(name: str) -> list[str]:
    """Names of executor threads of one batcher."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"shoal-{name}-")]


def test_a_decorated_function_batches_and_is_closed_with_its_loop(run: Run) -> None:
    """Called with single items, run with lists; opened anew on every loop; no thread is left when the loop has ended."""
    batches: list[list[int]] = []

    @batched(max_batch_size=8)
    def double(items: list[int]) -> list[int]:
        """Doubles."""
        batches.append(items)
        return [2 * item for item in items]

    async def main() -> None:
        assert await asyncio.gather(*[double(i) for i in range(16)]) == [2 * i for i in range(16)]
        assert threads("double") == ["shoal-double-0"]

    for _ in range(2):
        batches.clear()
        run(main())
        assert [len(items) for items in batches] == [8, 8]
        assert threads("double") == []
    assert double.__doc__ == "Doubles."
    assert double.__name__ == "double"


def test_it_can_be_closed_before_and_opens_again(run: Run) -> None:
    """`await f.close()` ends the threads; the next call starts new ones; closing what is not open does nothing."""

    @batched()
    def same(items: list[int]) -> list[int]:
        return items

    async def main() -> None:
        await same.close()
        assert await same(1) == 1
        await same.close()
        assert threads("same") == []
        assert await same(2) == 2

    run(main())


def test_many_first_calls_at_once_open_one_batcher(run: Run) -> None:
    """The calls that come while it is being opened use the same one."""
    sizes: list[int] = []

    @batched()
    def same(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    async def main() -> None:
        assert await asyncio.gather(*[same(i) for i in range(10)]) == list(range(10))
        assert len(threads("same")) == 1
        assert sum(sizes) == 10

    run(main())


def test_async_functions_arrays_and_options_work_as_with_a_batcher(run: Run) -> None:
    """An async function with an array parameter; `wait` and `timeout_ms` are passed on."""

    @batched(max_batch_size=4)
    async def total(rows: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        return rows.sum(axis=1)

    async def main() -> None:
        assert await asyncio.gather(*[total(np.full(3, i), wait=True, timeout_ms=30_000) for i in range(6)]) == [
            3 * i for i in range(6)
        ]

    run(main())


def test_each_instance_has_its_own(run: Run) -> None:
    """A decorated method batches the calls on one object, and never mixes two objects."""

    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor
            self.batches: list[list[int]] = []

        @batched(max_batch_size=8)
        async def scale(self, items: list[int]) -> list[int]:
            self.batches.append(items)
            return [self.factor * item for item in items]

        @staticmethod
        @batched()
        async def same(items: list[int]) -> list[int]:
            return items

    async def main() -> None:
        two, three = Model(2), Model(3)
        results = await asyncio.gather(two.scale(1), three.scale(1), two.scale(5), Model.same(9), two.same(8))
        assert results == [2, 3, 10, 9, 8]
        assert (two.batches, three.batches) == ([[1, 5]], [[1]])
        assert two.scale is two.scale

    run(main())


def test_where_it_cannot_work_it_says_so(run: Run) -> None:
    """Class methods, objects without a dict, generators and wrong options."""

    class Bad:
        @classmethod
        @batched()
        def shared(cls, items: list[int]) -> list[int]:
            return items

    class Slotted:
        __slots__ = ()

        @batched()
        def own(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="class methods"):
        _ = Bad.shared
    with pytest.raises(TypeError, match="__dict__"):
        _ = Slotted().own
    with pytest.raises(TypeError, match="generator"):

        @batched()
        def generator(items: list[int]) -> Any:
            yield items

    with pytest.raises(ValueError, match="max_batch_size"):

        @batched(max_batch_size=0)
        def none(items: list[int]) -> list[int]:
            return items
