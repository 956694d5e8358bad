"""The adaptive mode through a lane: what is given up early is told so, by kind, and counted; answers are right meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from shoal.batcher import Batcher
from shoal.errors import DeadlineExceeded, Overloaded

MS = 1_000_000


def test_given_up_early() -> None:
    """Batches take 10 ms by a clock set by hand. Behind one of them an objective is Overloaded, a timeout DeadlineExceeded."""
    now = [0]
    hold = [False]

    async def main() -> None:
        entered, door = asyncio.Event(), asyncio.Event()

        async def model(items: list[int]) -> list[int]:
            if hold[0]:
                entered.set()
                await door.wait()
            now[0] += 10 * MS
            return [item + 1 for item in items]

        async with Batcher(model, mode="adaptive", slo_ms=25, max_batch_size=4, clock=lambda: now[0]) as batch:
            for size in (1, 2, 3, 1, 2, 3):  # what a batch takes is learned
                assert await asyncio.gather(*[batch(number) for number in range(size)]) == list(range(1, size + 1))
            hold[0] = True
            first = asyncio.ensure_future(batch(100))
            await entered.wait()
            late = asyncio.ensure_future(batch(1))
            own = asyncio.ensure_future(batch(2, timeout_ms=21))
            good = asyncio.ensure_future(batch(3, timeout_ms=1000))
            await asyncio.sleep(0)
            now[0] += 10 * MS  # the model adds its own 10 ms: 20 ms have gone when it returns, and 10 more are needed
            door.set()
            assert await first == 101
            with pytest.raises(Overloaded, match="objective cannot be met any more"):
                await late
            with pytest.raises(DeadlineExceeded, match="cannot be answered in time any more"):
                await own
            assert await good == 4
            assert batch.stats.dropped == 2

    asyncio.run(main())
