"""`decode` and `encode` of a `Batcher`: a hook's exception is its own caller's; poisoned items are run alone for a while."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal import Batcher, batched
from shoal.errors import BadRequest, ModelFailed

Run = Callable[[Any], Any]


class Teapot(Exception):
    """A fault of one item."""


def decode(item: str) -> int:
    """A number from text; "cold" is not for us."""
    if item == "cold":
        raise Teapot("decode")
    return int(item)


def encode(result: int) -> str:
    """Text from a number; 26 is not for us."""
    if result == 26:
        raise Teapot("encode")
    return f"<{result}>"


async def decode_later(item: str) -> int:
    """The same after a turn of the loop."""
    await asyncio.sleep(0)
    return decode(item)


async def encode_later(result: int) -> str:
    """The same after a turn of the loop."""
    await asyncio.sleep(0)
    return encode(result)


class Doubling:
    """Doubles numbers; notes the batches. Plain, or asynchronous."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def plain(self, items: list[int]) -> list[Any]:
        """One result each; 7 has an exception for it."""
        self.batches.append(list(items))
        return [Teapot("model") if item == 7 else 2 * item for item in items]

    async def later(self, items: list[int]) -> list[Any]:
        """The same after a turn of the loop."""
        await asyncio.sleep(0)
        return self.plain(items)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "threads": ("plain", {"decode": decode, "encode": encode}),
    "inline": ("plain", {"decode": decode, "encode": encode, "inline": True}),
    "async function, plain hooks": ("later", {"decode": decode, "encode": encode}),
    "async function, async hooks": ("later", {"decode": decode_later, "encode": encode_later}),
    "partial": ("later", {"decode": functools.partial(decode_later), "encode": functools.partial(encode)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_case_3_a_hooks_exception_is_its_own_callers(run: Run, way: str) -> None:
    """Of ten, one cannot be decoded, one cannot be encoded, one the function refuses; seven get theirs, from one run."""

    async def main() -> None:
        model = Doubling()
        name, options = WAYS[way]
        async with Batcher[Any, Any](getattr(model, name), max_batch_size=16, **options) as batch:
            items = ["1", "2", "cold", "13", "5", "6", "7", "8", "9", "10"]
            ends = await asyncio.gather(*[batch(item) for item in items], return_exceptions=True)
            for place, text in ((2, "decode"), (3, "encode"), (6, "model")):
                error = ends[place]
                assert isinstance(error, Teapot) and str(error) == text
            good = [end for place, end in enumerate(ends) if place not in (2, 3, 6)]
            assert good == ["<2>", "<4>", "<10>", "<12>", "<16>", "<18>", "<20>"]
            assert model.batches == [[1, 2, 13, 5, 6, 7, 8, 9, 10]]
            stats = batch.stats
            assert (stats.success.count, stats.fail.count, stats.reruns, stats.bisections) == (7, 3, 0, 0)
            assert (stats.executions, stats.inferences) == (1, 9)

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_the_function_is_not_called_for_nothing(run: Run, way: str) -> None:
    """Nobody could be decoded: everyone hears why, and the function never ran."""

    async def main() -> None:
        model = Doubling()
        name, options = WAYS[way]
        async with Batcher[Any, Any](getattr(model, name), **options) as batch:
            ends = await asyncio.gather(batch("cold"), batch("x"), return_exceptions=True)
            assert [type(end) for end in ends] == [Teapot, ValueError]
            assert model.batches == []
            assert (batch.stats.executions, batch.stats.fail.count) == (0, 2)

    run(main())


def test_what_is_decoded_is_stacked(run: Run) -> None:
    """Items are JSON texts; the function sees one array, `encode` each of its rows. `size` sees the text."""
    shapes: list[tuple[int, ...]] = []

    def model(x: np.ndarray[Any, Any]) -> Any:
        shapes.append(x.shape)
        return x.sum(axis=1)

    async def main() -> None:
        def array(text: str) -> Any:
            return np.array(json.loads(text), np.float64)

        async with Batcher[Any, Any](model, decode=array, encode=float, size=len, max_batch_size=64) as batch:
            sums = await asyncio.gather(batch("[1, 2, 3]"), batch("[10, 20, 30]"), batch("nonsense"), return_exceptions=True)
            assert sums[:2] == [6.0, 60.0] and type(sums[0]) is float
            assert isinstance(sums[2], json.JSONDecodeError)
            assert shapes == [(2, 3)]
            assert batch.stats.inferences == len("[1, 2, 3]") + len("[10, 20, 30]")

    run(main())


def test_errors_made_for_clients_pass_through_hooks(run: Run) -> None:
    """A hook may raise the library's own errors; a StopIteration, which no future takes, is told as `ModelFailed`."""

    async def main() -> None:
        errors = {"a": BadRequest("no picture"), "b": StopIteration(3)}

        def refuse(item: str) -> Any:
            raise errors[item]

        async with Batcher[Any, Any](lambda items: items, decode=refuse) as batch:
            ends = await asyncio.gather(batch("a"), batch("b"), return_exceptions=True)
            assert ends[0] is errors["a"]
            assert isinstance(ends[1], ModelFailed) and "StopIteration" in str(ends[1])
        async with Batcher[Any, Any](lambda items: [StopIteration(3) for _ in items]) as batch:
            with pytest.raises(ModelFailed, match="StopIteration"):
                await batch("c")

    run(main())


def test_a_wrong_number_of_results_is_everyones(run: Run) -> None:
    """Hooks or not: nobody is answered from a batch whose results cannot be told apart, and nothing is run again."""
    calls = 0

    def short(items: list[Any]) -> list[Any]:
        nonlocal calls
        calls += 1
        return items[1:]

    async def main() -> None:
        async with Batcher[Any, Any](short, decode=int) as batch:
            ends = await asyncio.gather(batch("1"), batch("2"), batch("x"), return_exceptions=True)
            assert {type(end) for end in ends} <= {ModelFailed, ValueError} and calls == 1
            assert str(ends[0]) == str(ends[1]) == "the function returned 1 results for 2 items"

    run(main())


def test_hooks_of_a_decorated_function(run: Run) -> None:
    """`@batched` takes the same options."""

    @batched(decode=int, encode=str)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    async def main() -> None:
        assert await double("21") == "42"  # type: ignore[arg-type, comparison-overlap]

    run(main())


async def ticking(items: list[Any]) -> list[Any]:
    """An asynchronous function."""
    return items


def generating(item: Any) -> Any:
    """A generator."""
    yield item


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": 3}, "decode must be a function of one item, not a int"),
        ({"encode": generating}, "encode must return its result, but is a generator"),
        ({"decode": decode_later}, "decode is asynchronous, but the function is not"),
    ],
)
def test_hooks_that_cannot_be_used_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    """When the batcher is made, in a sentence; beside an asynchronous function an asynchronous hook is right."""
    with pytest.raises(TypeError, match=message):
        Batcher[Any, Any](lambda items: items, **options)
    Batcher[Any, Any](ticking, decode=decode_later)


@pytest.mark.parametrize("way", ["threads", "inline", "async"])
@pytest.mark.parametrize("hook", ["decode", "encode"])
def test_lack_of_memory_in_a_hook_is_nobodys_fault(run: Run, way: str, hook: str) -> None:
    """There is no room for more than two items at a time: the batch is run in halves, and all six are answered."""
    room = 2

    def model(items: list[int]) -> list[int]:
        nonlocal room
        room = 2 if len(items) <= 2 else 0
        return items

    async def later(items: list[int]) -> list[int]:
        return model(items)

    def hungry(item: int) -> int:
        nonlocal room
        room -= 1
        if room < 0:
            room = 2
            raise MemoryError("no room")
        return item

    async def main() -> None:
        function: Any = later if way == "async" else model
        options: dict[str, Any] = {hook: hungry, "inline": way == "inline"}
        async with Batcher[Any, Any](function, **options) as batch:
            assert await asyncio.gather(*[batch(number) for number in range(6)]) == list(range(6))
            assert batch.stats.out_of_memory > 0 and batch.stats.fail.count == 0

    run(main())


# ---------------------------------------------------------------- poison


def poisoned(number: int) -> bool:
    """One in a hundred."""
    return number % 100 == 17


@pytest.mark.parametrize("way", ["threads", "two threads", "inline", "async"])
def test_ten_thousand_calls_one_in_a_hundred_poisoned_twice_over(run: Run, way: str) -> None:
    """All right, both times. The first time each poisoned item costs at most a search of its batch, the second time one run.

    Batches of 32 full ones: 2⌈log₂ 32⌉ reruns for each culprit bound the first round; the second has none at all.
    """

    def model(items: list[int]) -> list[int]:
        if any(poisoned(item) for item in items):
            raise ValueError(f"poisoned: {[item for item in items if poisoned(item)]}")
        return [item * item for item in items]

    async def later(items: list[int]) -> list[int]:
        return model(items)

    async def main() -> None:
        options: dict[str, Any] = {"inline": way == "inline", "instances": 2 if way == "two threads" else 1}
        function: Any = later if way == "async" else model
        async with Batcher[Any, Any](function, max_batch_size=32, max_queue_rows=None, **options) as batch:
            before = (0, 0, 0)
            for once in (True, False):
                ends = await asyncio.gather(*[batch(number) for number in range(10_000)], return_exceptions=True)
                for number, end in enumerate(ends):
                    if poisoned(number):
                        assert isinstance(end, ValueError) and str(end) == f"poisoned: [{number}]"
                    else:
                        assert end == number * number
                stats = batch.stats
                reruns, bisections, alone = stats.reruns - before[0], stats.bisections - before[1], stats.ran_alone - before[2]
                before = (stats.reruns, stats.bisections, stats.ran_alone)
                if once:
                    assert 100 < reruns <= 100 * 10 and 0 < bisections <= 100 and alone == 0
                else:
                    assert (reruns, bisections, alone) == (0, 0, 100)
            assert (stats.success.count, stats.fail.count) == (2 * 9_900, 200)

    run(main())


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (b"\x00bad", b"\x00good"),
        ("bad \ud800", "good"),
        (bytearray(b"bad"), bytearray(b"good")),
        (np.arange(5), np.arange(5.0)),
        (np.float32(3), np.float32(4)),
        (("bad", 1), ("good", 2)),
    ],
)
def test_items_that_are_remembered(run: Run, bad: Any, good: Any) -> None:
    """Bytes, text, arrays, numbers, anything hashable: known again by its value in another object of the same kind."""
    sizes: list[int] = []

    def same(one: Any, other: Any) -> bool:
        return repr(one) == repr(other)

    def model(items: list[Any]) -> list[Any]:
        sizes.append(len(items))
        if any(same(item, bad) for item in items):
            raise ValueError("bad")
        return items

    async def main() -> None:
        async with Batcher[Any, Any](model, stack=False) as batch:
            for _ in range(2):
                sizes.clear()
                ends = await asyncio.gather(batch(good), batch(copy.deepcopy(bad)), batch(good), return_exceptions=True)
                assert [type(end) is ValueError for end in ends] == [False, True, False]
            assert sizes == [2, 1] and batch.stats.ran_alone == 1

    run(main())


@pytest.mark.parametrize("make", [lambda: {"text": "bad"}, object, lambda: np.array([None])])
def test_items_that_cannot_be_told_are_found_each_time(run: Run, make: Callable[[], Any]) -> None:
    """Dictionaries, objects that are only equal to themselves, arrays of objects: nothing is remembered, and nothing breaks."""
    bad = make()

    def model(items: list[Any]) -> list[Any]:
        if any(item is bad for item in items):
            raise ValueError("bad")
        return items

    async def main() -> None:
        async with Batcher[Any, Any](model, stack=False) as batch:
            for _ in range(2):
                ends = await asyncio.gather(batch(1), batch(bad), batch(2), return_exceptions=True)
                assert ends[0] == 1 and ends[2] == 2 and isinstance(ends[1], ValueError)
            assert (batch.stats.ran_alone, batch.stats.bisections) == (0, 2)

    run(main())


def test_a_batch_too_large_for_memory_costs_nobody_an_answer(run: Run) -> None:
    """Twenty items fit; batches of 64 do not: everybody is answered, and later batches are small enough from the start."""

    def model(items: list[int]) -> list[int]:
        if len(items) > 20:
            raise MemoryError("no room")
        return [2 * item for item in items]

    async def main() -> None:
        async with Batcher[Any, Any](model, max_batch_size=64) as batch:
            assert await asyncio.gather(*[batch(number) for number in range(640)]) == [2 * number for number in range(640)]
            first = batch.stats.out_of_memory
            assert 2 <= first <= 4  # one more batch of 64 may have been ready by then
            assert await asyncio.gather(*[batch(number) for number in range(640)]) == [2 * number for number in range(640)]
            assert batch.stats.out_of_memory == first

    run(main())
