"""A lane: one model version between its callers and its executors. The driver of one scheduler, and the only owner of its clock.

    submit → scheduler ─ one poll per loop round ─→ Dispatch/Stage → pool → Completion → answers on tickets → on_end

Everything here runs on one event loop. Nothing polls: a poll happens because something was submitted (once per round of the loop,
so that all requests read in one round go together), because a batch ended, or because the one timer fired that the scheduler asked
for. There is no task and no future per request. What a batch is and when it starts is the scheduler's; how it is run the pool's.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from shoal.admission.drain import DrainRate
from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch, BatchState
from shoal.core.decisions import Dispatch, Drop, Expire, Refuse
from shoal.core.latency import LatencyModel
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.snapshot import Snapshot
from shoal.core.ticket import Ticket, TicketState
from shoal.datatypes import ModelSpec
from shoal.engine.costs import Cost, checked_cost
from shoal.engine.executor import Completion, Pool
from shoal.engine.memory_cap import MemoryCap
from shoal.engine.quiet_log import QuietLog
from shoal.engine.recorder import Recorder
from shoal.engine.settling import Settler
from shoal.errors import DeadlineExceeded, Draining, Overloaded, WorkerLost
from shoal.tensors.lengths import LengthPlan
from shoal.tensors.scatter import join_answers

__all__ = ["Lane"]

_log = logging.getLogger("shoal.engine")
_STAGED: Final = TicketState.STAGED
_NEVER: Final = 1 << 62
_NS_PER_SECOND: Final = 1e9
_NS_PER_MS: Final = 1e6
_MAX_JITTER: Final = 0.2
_BLIND_HINT_MS: Final = 1000
_MAX_HINT_MS: Final = 60_000
_THINK_EVERY_SECONDS: Final = 0.02  # with one step of well below a millisecond each time: at most 2 % of a core


class Lane:
    """One model version: scheduler, executors and statistics.

    Exactly one ending per ticket: `submit` refuses it, `cancel` takes it back, or `on_end(ticket)` is called once, on the loop,
    with `ticket.state` ANSWERED (and `answer`, `answer_row`), FAILED, EXPIRED or DROPPED (and `error`, a `ShoalError`). When it is
    called the scheduler has let go of the ticket, so it may submit, reserve and cancel at will. What it raises is counted, logged,
    and harms nobody else.

    `on_room`, if set, is called whenever something has left and a row would fit: for those who wait instead of being refused.

    Must be made on the loop that it is to live on. `clock` gives nanoseconds that never go back; it is called by executors too.
    """

    def __init__(
        self,
        name: str,
        version: str,
        spec: ModelSpec,
        pool: Pool,
        *,
        batching: BatchingSettings,
        queue: QueueSettings,
        stage: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], float] = time.time,
        join: Callable[[Sequence[tuple[Any, int, int]]], Any] = join_answers,
        expected_rows_per_second: float | None = None,
        latency: LatencyModel | None = None,
        cost: Cost | None = None,
        lengths: LengthPlan | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.spec = spec
        self.lengths = lengths
        self.batching = batching
        self.queue = queue
        self.stats = Recorder(wall_clock)
        self.on_room: Callable[[], None] | None = None
        self._pool = pool
        self._clock = clock
        self._loop = loop = asyncio.get_running_loop()
        self.latency = latency if latency is not None else LatencyModel(margin_sigmas=batching.margin_sigmas)
        staged = stage and pool.can_stage
        self._scheduler = Scheduler(batching, queue, executors=pool.size, stage=staged, latency=self.latency)
        self._cost = cost
        self._thinking: asyncio.TimerHandle | None = None
        self._adaptive = batching.mode == "adaptive"
        self.is_full = self._scheduler.is_full  # whether a request of one row would be refused now
        self._settler = Settler(self._scheduler, self.stats, join)
        self._drain_rate = DrainRate()
        self._memory_cap = MemoryCap(batching.max_batch_size)
        self._expected_ms_per_row = 1000 / expected_rows_per_second if expected_rows_per_second else None
        self._context = contextvars.Context()  # callbacks must not see the variables of whoever happened to submit
        self._poll_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = _NEVER
        self._offered: Batch | None = None  # lies with the pool; an executor may have begun it
        self._running_rows = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False
        self._quiet = QuietLog(_log, clock)
        pool.start(loop, self._completed)

    # ---------------------------------------------------------------- in

    def reserve(self, ticket: Ticket) -> Refuse | None:
        """Hold room for a ticket whose body is still to be read. Ends with `submit` or `cancel`."""
        refuse = self._scheduler.reserve(ticket, self._clock())
        if refuse is not None:
            self.stats.refuse(refuse.reason)
        return refuse

    def grow(self, ticket: Ticket, payload_bytes: int) -> Refuse | None:
        """Hold room for more bytes of a reserved ticket than were announced. If it is refused its reservation is released."""
        refuse = self._scheduler.grow(ticket, payload_bytes)
        if refuse is not None:
            self.stats.refuse(refuse.reason)
            self._look_around()
        return refuse

    def turn_away(self) -> Refuse | None:
        """Refuse a request of which nothing is known yet, if not even one row has room; None if it may come in."""
        refuse = self._scheduler.turn_away()
        if refuse is not None:
            self.stats.refuse(refuse.reason)
        return refuse

    def submit(self, ticket: Ticket) -> Refuse | None:
        """Queue a ticket. If it is refused its `on_end` is never called, and a reservation is released."""
        refuse = self._scheduler.submit(ticket, self._clock())
        if refuse is not None:
            self.stats.refuse(refuse.reason)
            self._look_around()
            return refuse
        if not self._poll_due:
            self._poll_due = True
            self._loop.call_soon(self._poll, context=self._context)
        return None

    def cancel(self, ticket: Ticket) -> bool:
        """Nobody waits for this ticket any more: its `on_end` will not be called from here on.

        True if it left before it ran. A RUNNING one goes on and its rows are thrown away; its batch-mates notice nothing. False for
        that, and for one that has ended.
        """
        ticket.on_end = None
        staged = self._offered
        if staged is None or (ticket.state is not _STAGED and ticket.parts is None):
            left = self._scheduler.cancel(ticket, self._clock())
        else:
            now_ns = self._clock()
            self._take_back(staged, now_ns)
            left = self._scheduler.cancel(ticket, now_ns)
            self._offer()
            self._poll_soon()  # others may fill the place
        if left:
            self.stats.cancelled += 1
            self._look_around()
        return left

    # ---------------------------------------------------------------- deciding

    def poll(self) -> None:
        """Do what is due now. Nobody has to call it; with a clock that is set by hand it takes the place of the timer."""
        self._decide(self._clock())

    def _poll_soon(self) -> None:
        if not self._poll_due:
            self._poll_due = True
            self._loop.call_soon(self._poll, context=self._context)

    def _poll(self) -> None:
        if self._closed:
            self._fail_waiting()  # room that was held before closing has been taken up
        elif self._poll_due:
            self._decide(self._clock())

    def _decide(self, now_ns: int) -> None:
        """Ask the scheduler, and act on it. The offered batch is taken in for that long, so that it can grow or be overtaken."""
        self._poll_due = False
        scheduler = self._scheduler
        if self._offered is not None:
            self._take_back(self._offered, now_ns)
        if not self._running_rows and scheduler.waiting_rows:
            self._drain_rate.backlog_began(now_ns)
        expired: list[Ticket] | None = None
        dropped: list[Ticket] | None = None
        for decision in scheduler.poll(now_ns):
            if type(decision) is Dispatch:
                self._running_rows += decision.batch.rows
                self._pool.dispatch(decision.batch)
            elif type(decision) is Expire:
                expired = decision.tickets
            elif type(decision) is Drop:
                dropped = [*dropped, *decision.tickets] if dropped else decision.tickets
        self._offer()
        wakeup_ns = scheduler.next_wakeup_ns()
        if wakeup_ns is not None and wakeup_ns < self._timer_ns:
            self._arm(wakeup_ns, now_ns)
        if expired is not None:
            self._expire(expired, now_ns)
        if dropped is not None:
            self._drop(dropped, now_ns)
        if self._adaptive and self._thinking is None:
            self._thinking = self._loop.call_later(_THINK_EVERY_SECONDS, self._think, context=self._context)
        self._look_around()

    def _think(self) -> None:
        """A step of what is not urgent, now and then while there is traffic."""
        self._thinking = None
        if not self._closed and self._scheduler.think(1):
            self._thinking = self._loop.call_later(_THINK_EVERY_SECONDS, self._think, context=self._context)

    def _take_back(self, staged: Batch, now_ns: int) -> None:
        """Take the offered batch in, or learn that an executor has begun it."""
        self._offered = None
        if not self._pool.withdraw():
            self._begin(staged, now_ns)

    def _begin(self, staged: Batch, now_ns: int) -> None:
        self._running_rows += staged.rows
        self._scheduler.start(staged, now_ns)

    def _offer(self) -> None:
        staged = self._scheduler.staged
        if staged is not None and self._offered is None:
            self._offered = staged
            self._pool.offer(staged)

    def _arm(self, wakeup_ns: int, now_ns: int) -> None:
        """Set the timer. It is only ever moved forward: one that fires too early costs less than a new one for every batch."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wakeup_ns
        delay_seconds = max(0, wakeup_ns - now_ns) / _NS_PER_SECOND
        self._timer = self._loop.call_later(delay_seconds, self._on_timer, context=self._context)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_ns = _NEVER
        if not self._closed:
            self._decide(self._clock())

    # ---------------------------------------------------------------- endings

    def _completed(self, completions: Iterable[Completion]) -> None:
        """Batches came back: free their executors, start what waits, then tell those who wait for the answers."""
        ended: list[Ticket] = []
        for completion in completions:
            batch = completion.batch
            if batch is self._offered:  # begun and finished before anyone here had heard of it
                self._offered = None
                self._begin(batch, self._clock())
            if batch.state is not BatchState.RUNNING:
                continue  # given up meanwhile
            outcome = completion.outcome
            done_ns = self._clock() if outcome is None else outcome.done_ns
            began = completion.began
            if began is not None and began is self._offered:
                self._offered = None
                self._begin(began, done_ns)
            if batch.cut and self._offered is not None:
                # A piece that failed takes its sisters along, out of the offered batch too: nobody may be about to begin that.
                self._take_back(self._offered, done_ns)
            self._running_rows -= batch.rows
            if outcome is None:
                self.stats.workers_lost += 1
                error = WorkerLost("the executor that ran this request was lost; nothing is known of its answer")
                error.__cause__ = completion.died
                ended += self._settler.settle_failed(batch, error, done_ns)
            else:
                ended += self._settler.settle(batch, outcome)
                if outcome.cause is not None:
                    cause, outcome.cause = outcome.cause, None
                    if outcome.oom_rows and self._memory_cap.lower(outcome.oom_rows, done_ns):
                        self._cap_rows(done_ns)
                        text = "model %s: memory did not suffice for %d rows; batches have at most %d for now"
                        _log.warning(text, self.name, outcome.oom_rows, self._memory_cap.rows)
                    else:
                        self._quiet.error("model %s raised %s", self.name, type(cause).__name__, error=cause)
            self._drain_rate.record(batch.rows, self._running_rows + self._scheduler.waiting_rows, done_ns)
        if not self._closed:
            now_ns = self._clock()
            if self._memory_cap.rows is not None and self._memory_cap.lift(now_ns):
                self._cap_rows(now_ns)
                _log.info(
                    "model %s: batches may have %s rows again", self.name, self._memory_cap.rows or self.batching.max_batch_size
                )
            self._decide(now_ns)
        self._tell(ended)
        self._look_around()

    def _cap_rows(self, now_ns: int) -> None:
        """Let the scheduler go by the cap; what was staged before is put together anew."""
        if self._offered is not None:
            self._take_back(self._offered, now_ns)
        if self._scheduler.staged is not None:
            self._scheduler.recall(self._scheduler.staged)
        self._scheduler.cap_rows(self._memory_cap.rows, now_ns)

    def _expire(self, tickets: list[Ticket], now_ns: int) -> None:
        for ticket in tickets:
            waited_ms = (now_ns - ticket.accepted_ns) / _NS_PER_MS
            ticket.error = DeadlineExceeded(f"the request expired after waiting {waited_ms:.1f} ms for an executor")
        self.stats.expired += len(tickets)
        self._tell(tickets)

    def _drop(self, tickets: list[Ticket], now_ns: int) -> None:
        """Whoever set a deadline is told that it cannot be met; whoever only met an objective of ours, that we are overloaded."""
        hint_ms = self.retry_after_ms()
        for ticket in tickets:
            waited_ms = (now_ns - ticket.accepted_ns) / _NS_PER_MS
            if ticket.expiry_ns != FOREVER:
                ticket.error = DeadlineExceeded(
                    f"after {waited_ms:.1f} ms in the queue the request cannot be answered in time any more"
                )
            else:
                text = (
                    f'model "{self.name}" is overloaded: after {waited_ms:.1f} ms in the queue its objective cannot be met any more'
                )
                ticket.error = Overloaded(text, retry_after_ms=hint_ms, queue=self.queue_state())
        self.stats.dropped += len(tickets)
        self._tell(tickets)

    def _tell(self, tickets: Iterable[Ticket]) -> None:
        """The one place where owners are told of an ending."""
        fatal: BaseException | None = None
        for ticket in tickets:
            on_end = ticket.on_end
            if on_end is None:
                continue
            ticket.on_end = None
            try:
                on_end(ticket)
            except Exception:
                self.stats.loop_errors += 1
                self._quiet.exception("model %s: whoever waited for a request failed to take its ending", self.name)
            except BaseException as error:  # Ctrl-C: the others still hear of their ending
                fatal = error
        if fatal is not None:
            raise fatal

    # ---------------------------------------------------------------- ending altogether

    def start_draining(self) -> None:
        """Refuse whatever comes from here on, and send what waits without waiting for windows."""
        self._scheduler.drain(self._clock())
        self._poll_soon()

    async def drain(self) -> None:
        """`start_draining`, and return when everything that was accepted has ended."""
        self.start_draining()
        if not self._scheduler.idle:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _look_around(self) -> None:
        """Something has left: who waits for room, or for the end?"""
        if self.on_room is not None and not self.is_full():
            self.on_room()
        if self._waiters and self._scheduler.idle:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def close(self, grace_seconds: float = 5.0) -> bool:
        """End: what runs has `grace_seconds` to finish, everything else fails as `draining`. False if an executor stayed behind."""
        if self._closed:
            return True
        self._closed = True
        self._scheduler.drain(self._clock())
        for timer in (self._timer, self._thinking):
            if timer is not None:
                timer.cancel()
        self._timer = self._thinking = None
        if self._offered is not None:
            self._take_back(self._offered, self._clock())
        finished = await self._pool.close(grace_seconds)
        self._give_up()
        return finished

    def stop(self) -> None:
        """Tell the executors to end, without waiting; for owners that are being thrown away."""
        self._closed = True
        self._pool.stop()

    def _give_up(self) -> None:
        """Fail what is left: what an executor never gave back, then what waits. Reserved tickets are their owner's to cancel."""
        now_ns = self._clock()
        ended: list[Ticket] = []
        for batch in self._scheduler.running_batches():
            lost = WorkerLost("the server stopped before the model had answered")
            ended += self._settler.settle_failed(batch, lost, now_ns)
        self._running_rows = 0
        self._tell(ended)
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        self._poll_due = False
        now_ns = self._clock()
        ended: list[Ticket] = []
        while self._scheduler.waiting_requests and (decisions := self._scheduler.poll(now_ns)):
            for decision in decisions:
                if type(decision) is Dispatch:
                    left = Draining("the server stopped before the request had run")
                    ended += self._settler.settle_failed(decision.batch, left, now_ns)
                elif type(decision) is Expire:
                    self._expire(decision.tickets, now_ns)
                elif type(decision) is Drop:
                    self._drop(decision.tickets, now_ns)
        self._tell(ended)
        self._look_around()

    # ---------------------------------------------------------------- looking

    def cost_of(self, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Any]) -> float:
        """What a request costs by the function in the settings; 0 where there is none. Raises as `checked_cost` does."""
        cost = self._cost
        return 0.0 if cost is None else checked_cost(f'the cost function of model "{self.name}"', lambda: cost(shapes, parameters))

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for an executor."""
        return self._scheduler.waiting_requests

    @property
    def idle(self) -> bool:
        """Whether nothing is reserved, waits or runs."""
        return self._scheduler.idle

    def snapshot(self) -> Snapshot:
        """The scheduler's state in figures."""
        return self._scheduler.snapshot(self._clock())

    def queue_state(self) -> dict[str, int | None]:
        """What waits and what may, for the body of a refusal."""
        queue = self.queue
        return {
            "waiting_requests": self._scheduler.waiting_requests,
            "waiting_rows": self._scheduler.waiting_rows,
            "max_queue_requests": queue.max_queue_requests,
            "max_queue_rows": queue.max_queue_rows,
            "max_queue_bytes": queue.max_queue_bytes,
        }

    def retry_after_ms(self) -> int:
        """When a refused client may try again: backlog ÷ measured rate, lengthened by chance, rounded up to two digits.

        Before anything was measured under load, the rate is the one that was expected from loading the model, or else the hint is
        `_BLIND_HINT_MS`.
        """
        ms_per_row = self._drain_rate.ms_per_row
        if ms_per_row is None:
            if self._expected_ms_per_row is None:
                return _BLIND_HINT_MS
            ms_per_row = self._expected_ms_per_row
        backlog_rows = self._scheduler.waiting_rows + self._running_rows
        hint_ms = int(backlog_rows * ms_per_row * (1.0 + random.random() * _MAX_JITTER)) + 1
        if hint_ms < 100:
            return hint_ms
        if hint_ms > _MAX_HINT_MS:
            return _MAX_HINT_MS
        step = 10 if hint_ms < 1000 else 100 if hint_ms < 10_000 else 1000
        return -(-hint_ms // step) * step

    def rows_per_second(self) -> float | None:
        """How fast the lane drains while it has a backlog; None before anything was measured."""
        return self._drain_rate.rows_per_second()

    @property
    def memory_cap_rows(self) -> int | None:
        """How many rows a batch may have because memory did not suffice for more; None where the settings alone count."""
        return self._memory_cap.rows

    @property
    def restarts(self) -> int:
        """How often an executor died and was replaced."""
        return self._pool.restarts
