"""Batches are smaller for a while after memory did not suffice, and grow again; nobody notices but the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.settings import BatchingSettings
from shoal.core.invariants import violations
from shoal.engine.memory_cap import MemoryCap
from shoal.testing.gates import Gate
from shoal.testing.lanes import Endings, FakeBackend, answer_values, open_lane, tagged_ticket

Run = Callable[[Any], Any]
_NS_PER_S = 1_000_000_000


def test_half_of_what_did_not_fit_and_double_after_each_quiet_minute() -> None:
    """64 do not fit: 32; 32 neither: 16. A minute later 32, another later 64 again, that is, no cap."""
    cap = MemoryCap(64)
    assert cap.lower(64, 0) and cap.rows == 32
    assert cap.lower(32, 10 * _NS_PER_S) and cap.rows == 16
    assert not cap.lift(70 * _NS_PER_S - 1)
    assert cap.lift(70 * _NS_PER_S) and cap.rows == 32
    assert not cap.lift(71 * _NS_PER_S)
    assert cap.lift(130 * _NS_PER_S) and cap.rows is None
    assert not cap.lift(1000 * _NS_PER_S)


def test_what_ran_before_the_cap_was_lowered_does_not_raise_it() -> None:
    """Another executor's larger batch fails a moment later: the lower cap stays, and the minute begins anew."""
    cap = MemoryCap(64)
    cap.lower(16, 0)
    assert not cap.lower(64, 5 * _NS_PER_S) and cap.rows == 8
    assert not cap.lift(60 * _NS_PER_S)
    assert cap.lift(65 * _NS_PER_S)


@given(st.integers(0, 64), st.lists(st.tuples(st.integers(1, 100), st.integers(0, 200)), max_size=20))
def test_the_cap_is_between_one_row_and_the_settings(most: int, steps: list[tuple[int, int]]) -> None:
    """Whatever fails whenever; where batches have one row at most there is never a cap."""
    cap, now_ns = MemoryCap(most), 0
    for rows, seconds in steps:
        now_ns += seconds * _NS_PER_S
        cap.lift(now_ns)
        cap.lower(rows, now_ns)
        assert cap.rows is None or 1 <= cap.rows < most


@pytest.mark.parametrize("inline", [False, True])
def test_a_lane_learns_what_fits_and_forgets_it(run: Run, caplog: pytest.LogCaptureFixture, inline: bool) -> None:
    """Sixteen requests in a batch where five fit: all answered. The next are run four at a time, a minute later eight (which do
    not fit either: four again), and with enough memory eight, then sixteen. Each change is one line of the log.
    """
    caplog.set_level(logging.INFO, "shoal.engine")
    now_ns = 1
    most = 5

    def model(x: Any) -> Any:
        if len(x) > most:
            raise MemoryError("no room")
        return 2 * x + 1

    async def main() -> None:
        nonlocal now_ns, most
        backend = FakeBackend(model)
        batching = BatchingSettings(max_batch_size=16)
        async with open_lane([backend], batching=batching, clock=lambda: now_ns, inline=inline) as lane:

            async def sixteen() -> list[int]:
                """Sixteen requests; the sizes of the runs that answered them."""
                before = len(backend.calls)
                endings = Endings()
                for value in range(16):
                    lane.submit(tagged_ticket([float(value)], endings))
                for ticket in await endings.wait(16):
                    assert answer_values(ticket)[0] % 2 == 1
                assert violations(lane._scheduler) == []
                return [len(call) for call in backend.calls[before:]]

            sizes = await sixteen()
            assert sizes == [16, 8, 4, 4, 4, 4]
            assert lane.stats.out_of_memory == 2 and lane.stats.bisections == 0 and lane.stats.reruns == 5
            assert lane.memory_cap_rows == 4
            assert await sixteen() == [4, 4, 4, 4]
            now_ns += 61 * _NS_PER_S
            await sixteen()  # the first batch that ends lifts the cap to 8, and what is composed then does not fit
            assert lane.memory_cap_rows == 4
            most = 16
            now_ns += 61 * _NS_PER_S
            await sixteen()
            assert lane.memory_cap_rows == 8
            assert await sixteen() == [8, 8]
            now_ns += 61 * _NS_PER_S
            await sixteen()
            assert lane.memory_cap_rows is None
            assert await sixteen() == [16]
            assert lane.stats.success.count == 16 * 7 and lane.stats.fail.count == 0

    run(main())
    lines = [record.getMessage() for record in caplog.records if "rows" in record.getMessage()]
    lower = "model test: memory did not suffice for 8 rows; batches have at most 4 for now"
    lifted = "model test: batches may have {} rows again"
    assert lines == [lower, lifted.format(8), lower, lifted.format(8), lifted.format(16)]


def test_what_is_staged_is_put_together_anew(run: Run) -> None:
    """Eight run and fail for memory while eight more lie ready: those start as two batches of four, nothing is lost or doubled."""

    def model(x: Any) -> Any:
        if len(x) > 4:
            raise MemoryError("no room")
        return 2 * x + 1

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(model, gate=gate)
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=8)) as lane:
            for value in range(24):
                lane.submit(tagged_ticket([float(value)], endings))
            gate.open()
            tickets = await endings.wait(24)
            assert sorted(answer_values(ticket)[0] for ticket in tickets) == [2.0 * value + 1 for value in range(24)]
            assert lane.memory_cap_rows == 4
            ran = [value for call in backend.calls if len(call) <= 4 for value in call]
            assert sorted(ran) == [float(value) for value in range(24)]
            assert violations(lane._scheduler) == []

    run(main())
