"""A lane with gated models: who goes together, who is told what, and what cancelling, expiring and closing leave untouched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.invariants import violations
from shoal.core.ticket import Ticket, TicketState
from shoal.engine.lane import Lane
from shoal.errors import DeadlineExceeded, Draining, ModelFailed, WorkerLost
from shoal.testing.clock import ManualClock
from shoal.testing.gates import Gate
from shoal.testing.lanes import Endings, FakeBackend, answer_values, open_lane, tagged_ticket

Run = Callable[[Any], Any]


def submit(lane: Lane, endings: Endings, *groups: list[float]) -> list[Ticket]:
    """One request for each group of values; all must be accepted."""
    tickets = [tagged_ticket(values, endings) for values in groups]
    for ticket in tickets:
        assert lane.submit(ticket) is None
    return tickets


async def entered(gate: Gate, calls: int) -> None:
    """Let the loop run until the model has been called that often; the gate itself is waited for in another thread."""
    await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered, calls)


def test_what_comes_in_one_round_goes_together_and_comes_back_to_its_caller(run: Run) -> None:
    """Ten requests of different sizes, submitted in one turn of the loop, are one tensor operation; each gets its own rows."""

    async def main() -> None:
        backend, endings = FakeBackend(), Endings()
        async with open_lane([backend]) as lane:
            groups = [[float(10 * i + k) for k in range(i % 3 + 1)] for i in range(10)]
            tickets = submit(lane, endings, *groups)
            await endings.wait(10)
            assert backend.calls == [[value for group in groups for value in group]]
            for ticket, group in zip(tickets, groups, strict=True):
                assert answer_values(ticket) == [2 * value + 1 for value in group]
            assert endings.tickets == tickets
            assert violations(lane._scheduler) == []

    run(main())


def test_case_13_what_queued_behind_a_running_batch_goes_together(run: Run) -> None:
    """Window 0, a busy model, five requests: 1, then 4 together; not 1+1+1+1+1."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend]) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            for value in (1.0, 2.0, 3.0, 4.0):
                submit(lane, endings, [value])
                await asyncio.sleep(0)
            gate.open()
            await endings.wait(5)
            assert backend.calls == [[0.0], [1.0, 2.0, 3.0, 4.0]]

    run(main())


def test_a_staged_batch_starts_without_the_loop(run: Run) -> None:
    """When a batch ends, its executor takes the staged one by itself: it has begun while the loop's thread stood still."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend]) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            submit(lane, endings, [1.0], [2.0])
            lane.poll()
            gate.let(1)
            gate.wait_entered(2)  # blocks this loop; nothing of the lane can run
            assert backend.calls[1] == [1.0, 2.0]
            gate.open()
            await endings.wait(3)
            assert [answer_values(ticket) for ticket in endings.tickets] == [[1.0], [3.0], [5.0]]

    run(main())


def test_a_member_of_a_batch_that_began_unnoticed_can_still_be_cancelled(run: Run) -> None:
    """The staged batch has begun, unknown to the loop: a cancelled member's rows are discarded, its mate is answered."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)]) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            gone, mate = submit(lane, endings, [1.0, 1.5], [2.0])
            lane.poll()
            gate.let(1)
            gate.wait_entered(2)
            assert gone.state is TicketState.STAGED
            assert lane.cancel(gone) is False
            gate.open()
            await endings.wait(2)
            await lane.drain()
            assert endings.tickets[1:] == [mate]
            assert answer_values(mate) == [5.0]
            assert lane.stats.discarded_rows == 2
            assert lane.stats.discarded == 1
            assert lane.stats.success.count == 2

    run(main())


def test_without_staging_the_next_batch_forms_last(run: Run) -> None:
    """With `stage` off nothing is handed out in advance, and the result is the same."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend], stage=False) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            submit(lane, endings, [1.0], [2.0])
            gate.open()
            await endings.wait(3)
            assert backend.calls == [[0.0], [1.0, 2.0]]

    run(main())


def test_a_window_holds_a_batch_until_it_is_full_or_old(run: Run) -> None:
    """With a window nothing starts before it ends; a full batch does not wait for it."""

    async def main() -> None:
        clock, endings, backend = ManualClock(1), Endings(), FakeBackend()
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=3, max_delay_ms=60_000.0), clock=clock) as lane:
            submit(lane, endings, [1.0])
            lane.poll()
            clock.advance(ms=59_999)
            submit(lane, endings, [2.0])
            lane.poll()
            assert lane.snapshot().running_batches == 0
            clock.advance(ms=1)
            lane.poll()
            await endings.wait(2)
            submit(lane, endings, [3.0], [4.0], [5.0])
            await endings.wait(5)
            assert backend.calls == [[1.0, 2.0], [3.0, 4.0, 5.0]]
            assert dict(lane.snapshot().batches)["delay"] == 1
            assert dict(lane.snapshot().batches)["full"] == 1

    run(main())


def test_the_timer_ends_a_window_by_itself(run: Run) -> None:
    """Nobody polls: the lane's own timer starts the batch when the window is over."""

    async def main() -> None:
        endings, backend = Endings(), FakeBackend()
        async with open_lane([backend], batching=BatchingSettings(max_delay_ms=2.0)) as lane:
            submit(lane, endings, [1.0])
            await asyncio.sleep(0)
            submit(lane, endings, [2.0])
            await endings.wait(2)
            assert backend.calls == [[1.0, 2.0]]
            assert dict(lane.snapshot().batches)["delay"] == 1

    run(main())


def test_case_18_a_request_expires_on_time_behind_a_busy_executor_and_never_runs(run: Run) -> None:
    """Queue timeout 100 ms behind a batch that does not end: expired at 100 ms, not before, its place freed, never executed."""

    async def main() -> None:
        clock, gate, endings = ManualClock(1), Gate(), Endings()
        backend = FakeBackend(gate=gate)
        queue = QueueSettings(default_timeout_ms=100.0, max_queue_rows=1)
        async with open_lane([backend], queue=queue, clock=clock) as lane:
            first = tagged_ticket([0.0], endings)
            assert lane.submit(first) is None
            await entered(gate, 1)
            late = tagged_ticket([1.0], endings)
            assert lane.submit(late) is None
            lane.poll()
            assert lane.is_full()
            clock.advance(ms=99.999)
            lane.poll()
            assert endings.tickets == []
            clock.advance(ms=0.001)
            lane.poll()
            assert endings.tickets == [late]
            assert late.state is TicketState.EXPIRED
            assert isinstance(late.error, DeadlineExceeded)
            assert "100.0 ms" in late.error.message
            assert not lane.is_full()
            gate.open()
            await endings.wait(2)
            assert backend.calls == [[0.0]]
            assert lane.stats.expired == 1

    run(main())


def test_case_18_the_timer_expires_requests_while_every_executor_is_busy(run: Run) -> None:
    """The same with the real clock: the ending comes while the model still stands at its gate."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)], queue=QueueSettings(default_timeout_ms=5.0)) as lane:
            first = tagged_ticket([0.0])
            lane.submit(first)
            await entered(gate, 1)
            lane.submit(tagged_ticket([1.0], endings))
            (ticket,) = await endings.wait(1)
            assert ticket.state is TicketState.EXPIRED
            assert first.state is TicketState.RUNNING
            gate.open()

    run(main())


def test_cancelling_a_waiting_or_staged_request_takes_it_out(run: Run) -> None:
    """A staged and a waiting request leave at once, are never told, never run; the others are answered, the place is filled."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=2)) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            staged, mate, waiting, last = submit(lane, endings, [1.0], [2.0], [3.0], [4.0])
            lane.poll()
            assert (staged.state, waiting.state) == (TicketState.STAGED, TicketState.WAITING)
            assert lane.cancel(staged) is True
            assert lane.cancel(waiting) is True
            assert lane.cancel(waiting) is False
            gate.let(1)
            await endings.wait(1)
            gate.open()
            await endings.wait(3)
            assert endings.tickets[1:] == [mate, last]
            assert [answer_values(ticket) for ticket in (mate, last)] == [[5.0], [9.0]]
            assert [value for call in backend.calls for value in call] == [0.0, 2.0, 4.0]
            assert lane.stats.cancelled == 2
            assert lane.stats.discarded == 0

    run(main())


def test_an_ending_may_cancel_a_batch_mate_that_has_not_been_told_yet(run: Run) -> None:
    """Two requests of one connection end together; told of the first, the owner gives up the second: it is not called for it."""

    async def main() -> None:
        told: list[Ticket] = []
        endings = Endings()
        async with open_lane([FakeBackend()]) as lane:
            second = tagged_ticket([2.0], told.append)

            def first_ended(ticket: Ticket) -> None:
                told.append(ticket)
                assert lane.cancel(second) is False

            first = tagged_ticket([1.0], first_ended)
            third = tagged_ticket([3.0], endings)
            for ticket in (first, second, third):
                lane.submit(ticket)
            await endings.wait(1)
            assert told == [first]

    run(main())


def test_an_owner_that_fails_to_take_its_ending_harms_nobody(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The middle one of three callbacks raises: the other two are told, the error is counted and logged, the lane goes on."""

    async def main() -> None:
        endings = Endings()

        def broken(ticket: Ticket) -> None:
            raise LookupError("broken owner")

        async with open_lane([FakeBackend()]) as lane:
            for on_end in (endings, broken, endings):
                lane.submit(tagged_ticket([1.0], on_end))
            await endings.wait(2)
            assert lane.stats.loop_errors == 1
            submit(lane, endings, [5.0])
            await endings.wait(3)
            assert answer_values(endings.tickets[2]) == [11.0]

    run(main())
    assert "broken owner" in caplog.text


def test_a_callback_may_submit_again(run: Run) -> None:
    """A chain of a hundred requests, each submitted from the ending of the one before."""

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()
        values: list[float] = []

        async with open_lane([FakeBackend(lambda x: x + 1)]) as lane:

            def again(ticket: Ticket) -> None:
                values.extend(answer_values(ticket))
                if len(values) == 100:
                    done.set_result(None)
                else:
                    lane.submit(tagged_ticket(values[-1:], again))

            lane.submit(tagged_ticket([0.0], again))
            await done
            assert values == [float(i) for i in range(1, 101)]

    run(main())


def test_case_9_a_request_larger_than_a_batch_is_cut_and_rejoined(run: Run) -> None:
    """12 rows at a maximum of 5: run as 5 + 5 + 2 and answered once, in order."""

    async def main() -> None:
        endings, backend = Endings(), FakeBackend()
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=5)) as lane:
            values = [float(i) for i in range(12)]
            (ticket,) = submit(lane, endings, values)
            await endings.wait(1)
            await lane.drain()
            assert endings.tickets == [ticket]
            assert answer_values(ticket) == [2 * value + 1 for value in values]
            assert [len(call) for call in backend.calls] == [5, 5, 2]
            assert lane.stats.success.count == 1
            assert lane.stats.inferences == 12
            assert violations(lane._scheduler) == []

    run(main())


def test_case_9_an_invalid_row_fails_the_whole_request_once(run: Run) -> None:
    """Row 9 of 12 makes the model fail: one failure, the remaining piece never runs, the neighbour in its batch is answered."""

    def picky(x: Any) -> Any:
        if 9.0 in x:
            raise ValueError("row nine")
        return 2 * x + 1

    async def main() -> None:
        endings, backend = Endings(), FakeBackend(picky)
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=5)) as lane:
            cut, neighbour = submit(lane, endings, [float(i) for i in range(12)], [100.0])
            await endings.wait(2)
            await lane.drain()
            assert sorted(endings.tickets, key=id) == sorted([cut, neighbour], key=id)
            assert cut.state is TicketState.FAILED
            assert isinstance(cut.error, ModelFailed)
            assert cut.error.message == "ValueError: row nine"
            assert answer_values(neighbour) == [201.0]
            assert (lane.stats.success.count, lane.stats.fail.count) == (1, 1)
            assert violations(lane._scheduler) == []

    run(main())


def test_case_9_a_request_larger_than_a_batch_is_refused_where_splitting_is_off(run: Run) -> None:
    """Policy `reject`: refused as too large, naming the limit; what fits exactly is taken."""

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend()], batching=BatchingSettings(max_batch_size=5, oversize="reject")) as lane:
            refuse = lane.submit(tagged_ticket([0.0] * 6, endings))
            assert refuse is not None
            assert (refuse.reason, refuse.bound, refuse.limit, refuse.used) == ("too_large", "batch", 5, 6)
            submit(lane, endings, [0.0] * 5)
            await endings.wait(1)
            assert lane.stats.refused == {"too_large": 1}

    run(main())


def test_cancelling_a_cut_request_while_its_first_piece_runs(run: Run) -> None:
    """The running piece's rows are thrown away, the other pieces leave, nobody is told, the next request is answered."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        backend = FakeBackend(gate=gate)
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=5)) as lane:
            (cut,) = submit(lane, endings, [float(i) for i in range(12)])
            await entered(gate, 1)
            (after,) = submit(lane, endings, [50.0])
            assert lane.cancel(cut) is True
            gate.open()
            await endings.wait(1)
            await lane.drain()
            assert endings.tickets == [after]
            assert answer_values(after) == [101.0]
            assert lane.stats.discarded_rows == 5
            assert violations(lane._scheduler) == []
            assert lane.idle

    run(main())


def test_case_28_draining_answers_what_was_accepted_and_refuses_the_rest(run: Run) -> None:
    """1 running, 5 queued, then drain: 6 answered, a new one refused as `draining`; draining an idle lane returns at once."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)]) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            submit(lane, endings, *[[float(i)] for i in range(1, 6)])
            draining = asyncio.ensure_future(lane.drain())
            await asyncio.sleep(0)
            refuse = lane.submit(tagged_ticket([9.0], endings))
            assert refuse is not None
            assert refuse.reason == "draining"
            assert not draining.done()
            gate.open()
            await draining
            assert [answer_values(ticket) for ticket in endings.tickets] == [[2.0 * i + 1] for i in range(6)]
            await lane.drain()

    run(main())


def test_draining_sends_what_waits_for_a_window(run: Run) -> None:
    """A window of an hour does not keep a draining lane."""

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend()], batching=BatchingSettings(max_delay_ms=3_600_000.0)) as lane:
            submit(lane, endings, [1.0])
            await lane.drain()
            assert [answer_values(ticket) for ticket in endings.tickets] == [[3.0]]

    run(main())


def test_a_reservation_is_kept_while_draining_and_can_be_given_back(run: Run) -> None:
    """Room held for a body that is still arriving: draining waits for it; cancelled, the lane is empty."""

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend()]) as lane:
            kept, given_back = tagged_ticket([1.0], endings), tagged_ticket([2.0], endings)
            assert lane.reserve(kept) is None
            assert lane.reserve(given_back) is None
            draining = asyncio.ensure_future(lane.drain())
            await asyncio.sleep(0)
            assert lane.submit(kept) is None
            await endings.wait(1)
            assert not draining.done()
            assert lane.cancel(given_back) is True
            await draining
            assert endings.tickets == [kept]

    run(main())


def test_closing_on_a_model_that_hangs_is_bounded_and_ends_everything(run: Run) -> None:
    """No grace, one running, three waiting: the running one ends as `worker_lost`, the waiting ones as `draining`, each once."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        async with open_lane([FakeBackend(gate=gate)], batching=BatchingSettings(max_batch_size=2)) as lane:
            (running,) = submit(lane, endings, [0.0])
            await entered(gate, 1)
            waiting = submit(lane, endings, [1.0], [2.0], [3.0])
            lane.poll()
            threads = [worker.thread for worker in lane._pool._workers]  # type: ignore[attr-defined]
            assert await lane.close(0.0) is False
            assert isinstance(running.error, WorkerLost)
            assert [type(ticket.error) for ticket in waiting] == [Draining] * 3
            assert len(endings.tickets) == 4
            assert lane.idle
            gate.open()
            for thread in threads:
                thread.join(30.0)
            await asyncio.sleep(0)  # its last words come now, and are not heard
            assert len(endings.tickets) == 4

    run(main())


def test_room_held_before_closing_can_no_longer_be_used_after_it(run: Run) -> None:
    """A body arrives after the lane was closed: its ticket ends as `draining`, instead of waiting for executors that are gone."""

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend()]) as lane:
            ticket = tagged_ticket([1.0], endings)
            assert lane.reserve(ticket) is None
            assert await lane.close() is True
            assert lane.submit(ticket) is None
            await endings.wait(1)
            assert isinstance(ticket.error, Draining)
            assert lane.idle

    run(main())


def test_a_full_queue_refuses_and_says_what_it_knows(run: Run) -> None:
    """Exact bound in rows; `full`, the counts and the description agree; the hint is blind until a rate was measured."""

    async def main() -> None:
        gate, endings = Gate(), Endings()
        clock = ManualClock(1)
        async with open_lane([FakeBackend(gate=gate)], queue=QueueSettings(max_queue_rows=4), clock=clock) as lane:
            submit(lane, endings, [0.0])
            await entered(gate, 1)
            assert lane.retry_after_ms() == 1000  # nothing is known yet
            submit(lane, endings, [1.0, 2.0, 3.0])
            assert not lane.is_full()
            refuse = lane.submit(tagged_ticket([4.0, 5.0], endings))
            assert refuse is not None
            assert (refuse.reason, refuse.bound, refuse.limit, refuse.used) == ("queue_full", "rows", 4, 3)
            submit(lane, endings, [4.0])
            assert lane.is_full()
            assert lane.queue_state()["waiting_rows"] == 4
            assert lane.stats.refused == {"queue_full": 1}
            clock.advance(ms=10)
            gate.let(1)
            await endings.wait(1)
            assert not lane.is_full()
            # One row in 10 ms was measured, four rows run: 40 ms, and up to a fifth more by chance.
            hints = [lane.retry_after_ms() for _ in range(50)]
            assert all(hint is not None and 40 <= hint <= 49 for hint in hints)
            gate.open()
            await endings.wait(3)

    run(main())


def test_the_figures_agree_with_each_other(run: Run) -> None:
    """Executions, rows, requests: what the protocol's statistics show adds up, also after failures and discarded rows."""

    def picky(x: Any) -> Any:
        if 13.0 in x:
            raise ValueError("thirteen")
        return 2 * x + 1

    async def main() -> None:
        endings, backend = Endings(), FakeBackend(picky)
        async with open_lane([backend], batching=BatchingSettings(max_batch_size=8)) as lane:
            submit(lane, endings, *[[float(i)] for i in range(20)])
            await endings.wait(20)
            stats = lane.stats
            assert (stats.success.count, stats.fail.count) == (19, 1)
            assert stats.queue.count == stats.compute_infer.count == 19
            assert stats.inferences == sum(rows * figures.executions for rows, figures in stats.batch_sizes.items()) == 19
            assert stats.executions == sum(figures.executions for figures in stats.batch_sizes.values())
            assert stats.mean_batch_rows() * stats.executions == stats.inferences
            assert stats.bisections == 1
            assert len(backend.calls) == stats.executions + 1 + 3  # the batch of 8, and halves of 4, 2 and 1 that hold the culprit
            assert stats.last_inference_ms > 0
            entry = stats.as_oip("test", "1")
            assert entry["inference_count"] == 19
            assert [batch["batch_size"] for batch in entry["batch_stats"]] == sorted(stats.batch_sizes)

    run(main())


def test_inline_lanes_behave_the_same(run: Run) -> None:
    """Without threads: answers, isolation of a culprit, split requests and draining are as with them."""

    def picky(x: Any) -> Any:
        if 7.0 in x:
            raise ValueError("seven")
        return 2 * x + 1

    async def main() -> None:
        endings = Endings()
        async with open_lane([FakeBackend(picky)], inline=True, batching=BatchingSettings(max_batch_size=4)) as lane:
            tickets = submit(lane, endings, *[[float(i)] for i in range(10)], [float(i) for i in range(20, 29)])
            await lane.drain()
            assert len(endings.tickets) == 11
            assert [ticket.state is TicketState.FAILED for ticket in tickets] == [i == 7 for i in range(11)]
            assert answer_values(tickets[10]) == [2.0 * i + 1 for i in range(20, 29)]

    run(main())


def test_callers_context_variables_do_not_reach_callbacks_of_others(run: Run) -> None:
    """`on_end` runs in the lane's own empty context, whoever happened to wake the lane."""
    from contextvars import ContextVar

    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def main() -> None:
        seen: list[str] = []
        endings = Endings()
        async with open_lane([FakeBackend()]) as lane:
            who.set("caller")
            lane.submit(tagged_ticket([1.0], lambda ticket: seen.append(who.get())))
            lane.submit(tagged_ticket([2.0], endings))
            await endings.wait(1)
            assert seen == ["nobody"]

    run(main())
