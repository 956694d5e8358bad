"""`Batcher` inside an asyncio program: who gets what, what an error reaches, and what it says when it is used wrongly."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import Batcher
from shoal.errors import DeadlineExceeded, Draining, ModelFailed, QueueFull, TooLarge
from shoal.testing.gates import Gate

Run = Callable[[Any], Any]


class Recording:
    """Doubles its items; notes every batch; can be held at a gate."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.batches: list[list[Any]] = []
        self.gate = gate

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        if self.gate is not None:
            self.gate.enter()
        return [2 * item for item in items]


async def entered(gate: Gate, calls: int) -> None:
    """Until the function has been called that often."""
    await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, calls)


async def started(*coroutines: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have got as far as they can."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_many_callers_share_calls_and_get_their_own_results(run: Run) -> None:
    """A hundred concurrent callers, at most 32 items in a call: four calls or so, everyone their own result."""

    async def main() -> None:
        double = Recording()
        async with Batcher(double, max_batch_size=32) as batch:
            assert await asyncio.gather(*[batch(i) for i in range(100)]) == [2 * i for i in range(100)]
            assert sum(map(len, double.batches)) == 100
            assert len(double.batches) == 4
            assert batch.stats.success.count == 100

    run(main())


def test_ten_thousand_concurrent_calls(run: Run) -> None:
    """More than the queue holds, with `wait`: all are answered, in their own order; nothing waits at the end."""

    async def main() -> None:
        async with Batcher(Recording(), max_queue_rows=1000, instances=2) as batch:
            assert await asyncio.gather(*[batch(i, wait=True) for i in range(10_000)]) == [2 * i for i in range(10_000)]
            assert batch.waiting == 0

    run(main())


@pytest.mark.parametrize("instances", [1, 3])
def test_an_async_function_is_awaited_on_the_loop(run: Run, instances: int) -> None:
    """It runs in the loop's own thread, in tasks, at most `instances` at a time."""

    async def main() -> None:
        running = peak = 0

        async def double(items: list[int]) -> list[int]:
            nonlocal running, peak
            assert asyncio.get_running_loop() is loop
            running += 1
            peak = max(peak, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return [2 * item for item in items]

        loop = asyncio.get_running_loop()
        async with Batcher(double, max_batch_size=4, instances=instances) as batch:
            assert await asyncio.gather(*[batch(i) for i in range(40)]) == [2 * i for i in range(40)]
            assert peak == instances

    run(main())


def test_an_inline_function_runs_in_the_loops_thread(run: Run) -> None:
    """With `inline` there is no thread at all."""
    import threading

    async def main() -> None:
        seen: set[int] = set()

        def double(items: list[int]) -> list[int]:
            seen.add(threading.get_ident())
            return [2 * item for item in items]

        async with Batcher(double, inline=True, max_batch_size=3) as batch:
            assert await asyncio.gather(*[batch(i) for i in range(10)]) == [2 * i for i in range(10)]
        assert seen == {threading.get_ident()}

    run(main())


def test_arrays_are_stacked_where_the_function_asks_for_one(run: Run) -> None:
    """By annotation or by `stack`: one array per call, only equal shapes and dtypes together, each caller its own row."""

    async def main() -> None:
        shapes: list[tuple[int, ...]] = []

        def annotated(rows: np.ndarray) -> np.ndarray:
            shapes.append(rows.shape)
            return rows.sum(axis=1)

        async with Batcher(annotated) as batch:
            items = [np.full(2 + i % 2, float(i)) for i in range(6)]
            assert await asyncio.gather(*[batch(item) for item in items]) == [item.sum() for item in items]
            assert sorted(shapes) == [(1, 2), (1, 2), (1, 2), (1, 3), (1, 3), (1, 3)]  # in order, no shape follows itself
            shapes.clear()
            await asyncio.gather(*[batch(np.ones(4)) for _ in range(5)])
            assert shapes == [(5, 4)]
            with pytest.raises(TypeError, match="stacks numpy arrays, but an item is a list"):
                await batch([1.0, 2.0])

        async with Batcher(lambda rows: rows * 2, stack=True) as plain:
            assert (await plain(np.arange(3))).tolist() == [0, 2, 4]

        async with Batcher(lambda items: [type(items)] * len(items)) as listed:
            assert await listed(np.arange(3)) is list

    run(main())


def test_an_exception_in_an_items_place_reaches_that_item_alone(run: Run) -> None:
    """The function returns an exception for one item: that call raises it; the others are answered; no second call."""

    async def main() -> None:
        calls = 0
        error = KeyError("three")

        def some(items: list[int]) -> list[Any]:
            nonlocal calls
            calls += 1
            return [error if item == 3 else item for item in items]

        async with Batcher(some) as batch:
            results = await asyncio.gather(*[batch(i) for i in range(6)], return_exceptions=True)
            assert results == [0, 1, 2, error, 4, 5]
            assert calls == 1
            assert (batch.stats.success.count, batch.stats.fail.count) == (5, 1)

    run(main())


@pytest.mark.parametrize("kind", ["sync", "async", "inline"])
def test_a_raised_exception_reaches_only_the_culprit_as_it_was_raised(run: Run, kind: str) -> None:
    """One bad item of sixteen: its caller gets the very exception that the function raised, the other fifteen their results."""

    class Rejected(Exception):
        def __init__(self, item: int, detail: str) -> None:
            super().__init__(item, detail)

    def picky(items: list[int]) -> list[int]:
        if 11 in items:
            raise Rejected(11, "no")
        return [2 * item for item in items]

    async def picky_async(items: list[int]) -> list[int]:
        return picky(items)

    async def main() -> None:
        function: Any = picky_async if kind == "async" else picky
        async with Batcher(function, inline=kind == "inline") as batch:
            results = await asyncio.gather(*[batch(i) for i in range(16)], return_exceptions=True)
            error = results.pop(11)
            assert type(error) is Rejected
            assert error.args == (11, "no")
            assert results == [2 * i for i in range(16) if i != 11]

    run(main())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1, 2], "returned 2 results for 3 items"),
        ([1, 2, 3, 4], "returned 4 results for 3 items"),
        ([], "returned 0 results for 3 items"),
        (np.zeros((2, 3)), "returned 2 results for 3 items"),
        (np.float64(1.0), "expected"),
        (None, "returned a NoneType"),
        ("abc", "returned a str"),
        ({0: 1, 1: 2, 2: 3}, "returned a dict"),
        ({1, 2, 3}, "returned a set"),
        (iter([1, 2, 3]), "returned a list_iterator"),
    ],
)
def test_a_result_that_does_not_match_fails_everyone_once(run: Run, result: Any, message: str) -> None:
    """Wrong counts and things that are no sequence: ModelFailed with the reason for all three callers, and no second call."""

    async def main() -> None:
        calls = 0

        def wrong(items: list[int]) -> Any:
            nonlocal calls
            calls += 1
            return result

        async with Batcher(wrong) as batch:
            errors = await asyncio.gather(*[batch(i) for i in range(3)], return_exceptions=True)
            assert [type(error) for error in errors] == [ModelFailed] * 3
            assert message in str(errors[0])
            assert calls == 1

    run(main())


def test_a_plain_function_that_returns_a_coroutine_is_told_so(run: Run) -> None:
    """A lambda around an async function: ModelFailed says what to do, and the coroutine is closed without a warning."""

    async def double(items: list[int]) -> list[int]:
        return items

    async def main() -> None:
        function: Any = lambda items: double(items)  # noqa: E731
        async with Batcher(function) as batch:
            with pytest.raises(ModelFailed, match="async def"):
                await batch(1)

    run(main())


@pytest.mark.parametrize("exception", [SystemExit(2), KeyboardInterrupt(), StopIteration()])
def test_exceptions_that_must_not_travel_through_a_future_are_wrapped(run: Run, exception: BaseException) -> None:
    """What would end the program, or cannot be raised from a future, is ModelFailed with the original as its cause."""

    async def main() -> None:
        def bad(items: list[int]) -> list[int]:
            raise exception

        async with Batcher(bad) as batch:
            with pytest.raises(ModelFailed, match=type(exception).__name__) as caught:
                await batch(1)
            assert caught.value.__cause__ is exception

    run(main())


def test_a_buffer_that_the_function_keeps_is_not_handed_out(run: Run) -> None:
    """The function returns the same array every time: what callers got of the first batch is not changed by the second."""

    async def main() -> None:
        buffer = np.zeros((4, 2))

        def reuse(items: list[float]) -> np.ndarray[Any, Any]:
            view = buffer[: len(items)]
            view[:] = np.array(items)[:, None]
            return view if items[0] != 3.0 else buffer

        async with Batcher(reuse, max_batch_size=4) as batch:
            first = await batch(1.0)
            whole = await asyncio.gather(*[batch(value) for value in (3.0, 4.0, 5.0, 6.0)])
            await batch(9.0)
            assert first.tolist() == [1.0, 1.0]
            assert [row.tolist() for row in whole] == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]

    run(main())


def test_cancelling_callers_leaves_their_batch_mates_alone(run: Run) -> None:
    """One running, one staged and one waiting caller are cancelled; the other three of the same batches are answered."""

    async def main() -> None:
        gate = Gate()
        double = Recording(gate)
        async with Batcher(double, max_batch_size=2) as batch:
            tasks = await started(*[batch(i) for i in range(6)])
            await entered(gate, 1)
            await asyncio.sleep(0)
            for index in (0, 2, 4):
                tasks[index].cancel()
            results = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            gate.open()
            got = await results
            assert [type(got[index]) for index in (0, 2, 4)] == [asyncio.CancelledError] * 3
            assert [got[index] for index in (1, 3, 5)] == [2, 6, 10]
            assert sorted(item for items in double.batches for item in items) == [0, 1, 3, 5]
            assert batch.stats.discarded == 1
            assert batch.stats.cancelled == 2

    run(main())


def test_case_4_a_size_callback_that_fails_fails_its_item_alone(run: Run) -> None:
    """ "ok", None, "ok" with `size=len`: success, error, success; the error is counted, and everything goes on."""

    async def main() -> None:
        async with Batcher(Recording(), size=len, max_batch_size=8) as batch:
            first, error, last = await asyncio.gather(batch("ok"), batch(None), batch("ok"), return_exceptions=True)
            assert (first, last) == ("okok", "okok")
            assert isinstance(error, TypeError)
            assert batch.stats.loop_errors == 1
            assert await batch("still") == "stillstill"

    run(main())


def test_sizes_count_as_rows(run: Run) -> None:
    """Batches hold at most 8 by `size`; everyone gets their own; an item above that is TooLarge at once; bad sizes are told."""

    async def main() -> None:
        double = Recording()
        async with Batcher(double, size=len, max_batch_size=8) as batch:
            items = ["abc", "de", "fgh", "ijklmnop", "q"]
            assert await asyncio.gather(*[batch(item) for item in items]) == [2 * item for item in items]
            assert double.batches == [["abc", "de", "fgh"], ["ijklmnop"], ["q"]]
            with pytest.raises(TooLarge, match="9 rows"):
                await batch("123456789")
            with pytest.raises(ValueError, match="positive integer"):
                await batch("")

    run(main())


def test_a_full_queue_refuses_or_lets_wait(run: Run) -> None:
    """Two places. The third caller is refused, or with `wait` comes in when there is room; nobody overtakes those who wait."""

    async def main() -> None:
        gate = Gate()
        double = Recording(gate)
        async with Batcher(double, max_batch_size=1, max_queue_rows=2) as batch:
            (running,) = await started(batch(0))
            await entered(gate, 1)
            queued = await started(batch(1), batch(2))
            with pytest.raises(QueueFull, match="2 of 2 rows"):
                await batch(3)
            waiting = await started(batch(4, wait=True), batch(5, wait=True))
            with pytest.raises(QueueFull):
                await batch(6)
            assert batch.waiting == 4
            gate.open()
            assert await asyncio.gather(running, *queued, *waiting) == [0, 2, 4, 8, 10]
            assert double.batches == [[0], [1], [2], [4], [5]]

    run(main())


def test_waiting_for_room_can_time_out_or_be_cancelled(run: Run) -> None:
    """Neither holds up who waits behind it."""

    async def main() -> None:
        gate = Gate()
        async with Batcher(Recording(gate), max_batch_size=1, max_queue_rows=1) as batch:
            (running,) = await started(batch(0))
            await entered(gate, 1)
            (queued,) = await started(batch(1))
            late, gone, patient = await started(batch(2, wait=True, timeout_ms=1), batch(3, wait=True), batch(4, wait=True))
            gone.cancel()
            with pytest.raises(DeadlineExceeded, match="no room"):
                await late
            gate.open()
            assert await asyncio.gather(running, queued, patient) == [0, 2, 8]
            assert gone.cancelled()

    run(main())


def test_a_call_expires_while_it_waits_to_be_run(run: Run) -> None:
    """`timeout_ms` of the call, or of the batcher: DeadlineExceeded while the function is still busy with another."""

    async def main() -> None:
        gate = Gate()
        double = Recording(gate)
        async with Batcher(double, max_batch_size=1) as batch:
            (running,) = await started(batch(0))
            await entered(gate, 1)
            with pytest.raises(DeadlineExceeded):
                await batch(1, timeout_ms=2)
            gate.open()
            assert await running == 0
        held = Gate()
        async with Batcher(Recording(held), max_batch_size=1, timeout_ms=2) as strict:
            (running,) = await started(strict(0))
            await entered(held, 1)
            with pytest.raises(DeadlineExceeded):
                await strict(1)
            held.open()
            assert await running == 0
        assert double.batches == [[0]]

    run(main())


@pytest.mark.parametrize("kind", ["sync", "async", "inline"])
def test_no_context_of_any_caller_is_seen_and_none_leaks_between_batches(run: Run, kind: str) -> None:
    """A variable set by the callers, by whoever opened the batcher, or by the function in an earlier batch, is not there."""
    who: ContextVar[str] = ContextVar("who", default="nobody")

    def look(items: list[int]) -> list[str]:
        seen = who.get()
        who.set("the batch before")
        return [seen] * len(items)

    async def look_async(items: list[int]) -> list[str]:
        return look(items)

    async def main() -> None:
        who.set("the opener")
        function: Any = look_async if kind == "async" else look
        async with Batcher(function, inline=kind == "inline") as batch:

            async def caller() -> str:
                who.set("a caller")
                seen: str = await batch(1)
                assert who.get() == "a caller"
                return seen

            for _ in range(2):
                assert await asyncio.gather(caller(), caller()) == ["nobody", "nobody"]

    run(main())


def test_leaving_the_block_answers_what_was_accepted(run: Run) -> None:
    """Callers that still wait when the block ends are answered; calls after that are refused with what to do."""

    async def main() -> None:
        gate = Gate()
        batch = Batcher(Recording(gate), max_batch_size=2)
        async with batch:
            tasks = await started(*[batch(i) for i in range(5)])
            await entered(gate, 1)
            gate.open()
        assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8]
        with pytest.raises(RuntimeError, match="async with"):
            await batch(1)
        await batch.close()
        async with batch:  # it may be opened again
            assert await batch(7) == 14
            with pytest.raises(RuntimeError, match="open already"):
                await batch.open()

    run(main())


def test_leaving_the_block_with_an_exception_does_not_run_what_waits(run: Run) -> None:
    """The running batch finishes; the waiting callers get Draining; the exception goes on."""

    async def main() -> None:
        gate = Gate()
        double = Recording(gate)
        tasks: list[asyncio.Task[Any]] = []

        async def fail() -> None:
            async with Batcher(double, max_batch_size=1, max_queue_rows=2) as batch:
                tasks.extend(await started(*[batch(i, wait=True) for i in range(5)]))
                await entered(gate, 1)
                gate.open()
                raise LookupError("ours")

        with pytest.raises(LookupError, match="ours"):
            await fail()
        first, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert first == 0
        assert [type(error) for error in others] == [Draining] * 4
        assert double.batches == [[0]]

    run(main())


def test_it_belongs_to_one_loop(run: Run) -> None:
    """Not open; opened on another loop; no loop at all: each says so."""
    batch = Batcher(Recording())

    async def one_call() -> Any:
        return await batch(1)

    with pytest.raises(RuntimeError, match="async with"):
        run(one_call())

    async def main() -> None:
        async with batch:
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.get_running_loop().run_in_executor(None, asyncio.run, one_call())

    run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        batch(1).send(None)  # type: ignore[attr-defined]


def test_a_batcher_that_is_never_closed_warns_and_ends_its_threads() -> None:
    """Thrown away while open: a ResourceWarning, and no thread is left (checked by the fixture)."""
    import threading

    async def main() -> None:
        batch = Batcher(Recording(), name="forgotten")
        await batch.open()

    with pytest.warns(ResourceWarning, match="forgotten> was never closed"):
        asyncio.run(main())
        gc.collect()
    for thread in threading.enumerate():
        if thread.name == "shoal-forgotten-0":
            thread.join(30.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be at least 1"),
        ({"max_batch_size": 2.5}, TypeError, "max_batch_size must be an integer"),
        ({"max_batch_size": True}, TypeError, "max_batch_size must be an integer"),
        ({"instances": 0}, ValueError, "instances must be at least 1"),
        ({"max_queue_rows": 0}, ValueError, "max_queue_rows must be at least 1"),
        ({"max_delay_ms": -1}, ValueError, "max_delay_ms must be 0 or more"),
        ({"max_delay_ms": float("nan")}, ValueError, "max_delay_ms must be 0 or more"),
        ({"max_delay_ms": "2"}, TypeError, "max_delay_ms must be a number"),
        ({"timeout_ms": float("inf")}, ValueError, "timeout_ms must be 0 or more"),
        ({"inline": True, "instances": 2}, ValueError, "inline"),
        ({"max_batch": 3}, TypeError, "max_batch"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each names the option."""
    with pytest.raises(error, match=message):
        Batcher(Recording(), **options)


def test_what_cannot_be_batched_is_refused() -> None:
    """No function, a generator, an async generator."""

    def generator(items: list[int]) -> Any:
        yield from items

    async def async_generator(items: list[int]) -> Any:
        yield items

    for function, message in ((3, "got a int"), (generator, "generator"), (async_generator, "generator")):
        wrong: Any = function
        with pytest.raises(TypeError, match=message):
            Batcher(wrong)


def test_partials_and_callable_objects_work(run: Run) -> None:
    """A partial of an async function is awaited; so is an object with an async `__call__`."""

    async def add(amount: int, items: list[int]) -> list[int]:
        return [item + amount for item in items]

    class Adder:
        async def __call__(self, items: list[int]) -> list[int]:
            return [item + 2 for item in items]

    async def main() -> None:
        async with Batcher(functools.partial(add, 1)) as one, Batcher(Adder()) as two:
            assert await asyncio.gather(one(1), two(1)) == [2, 3]

    run(main())


def test_the_package_exports_the_library_lazily() -> None:
    """`shoal.Batcher` and `shoal.batched` are there; other names are refused as usual."""
    assert shoal.Batcher is Batcher
    assert callable(shoal.batched)
    with pytest.raises(AttributeError, match="nothing"):
        _ = shoal.nothing
