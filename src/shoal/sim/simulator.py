"""The event loop of virtual time: it drives a real `Scheduler` as a driver does, with arrivals and service times from models.

It decides nothing by itself. Events at one instant come in this order: completions, arrivals, then one poll.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.decisions import Dispatch, Expire
from shoal.core.invariants import check_invariants
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.snapshot import Snapshot
from shoal.core.ticket import Ticket, TicketState
from shoal.sim.arrivals import IntArray, constant_rows
from shoal.sim.service import ServiceTime

REFUSED: Final = -1
EXPIRED: Final = -2
_UNFINISHED: Final = -3

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class BatchLog:
    """All batches in the order in which they started: start, duration (ns), rows (int64, shape [batches]) and reasons."""

    started_ns: IntArray
    service_ns: IntArray
    rows: IntArray
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came out.

    `outcome_ns`: per request in order of arrival its latency from arrival to the end of its (last) batch, or REFUSED, or EXPIRED.
    `waited_ns`: per request the part of it before its (last) batch started, or the same marks. `span_ns`: from the first arrival to
    the last completion. `mean_in_system`: time average of the requests held or running, as the scheduler itself counted them.
    """

    arrivals_ns: IntArray
    outcome_ns: IntArray
    waited_ns: IntArray
    batches: BatchLog
    slots: int
    span_ns: int
    mean_in_system: float
    final: Snapshot

    @property
    def latencies_ns(self) -> IntArray:
        """Latencies of the requests that were served, in order of arrival."""
        return self.outcome_ns[self.outcome_ns >= 0]

    @property
    def refused(self) -> int:
        """Requests that were refused on arrival."""
        return int(np.count_nonzero(self.outcome_ns == REFUSED))

    @property
    def expired(self) -> int:
        """Requests that passed their deadline while they waited."""
        return int(np.count_nonzero(self.outcome_ns == EXPIRED))

    @property
    def busy_fraction(self) -> float:
        """Share of the slots' time in which they ran a batch."""
        return float(self.batches.service_ns.sum()) / (self.slots * self.span_ns) if self.span_ns else 0.0

    def summary(self) -> dict[str, float]:
        """The figures that `shoal simulate` prints; latencies are 0 if nothing was served. Percentiles are of the served."""
        served = self.latencies_ns / 1e6
        p50, p90, p99 = np.percentile(served, (50, 90, 99)) if served.size else (0.0, 0.0, 0.0)
        rows = self.batches.rows
        return {
            "mean_ms": float(served.mean()) if served.size else 0.0,
            "p50_ms": float(p50),
            "p90_ms": float(p90),
            "p99_ms": float(p99),
            "mean_batch_rows": float(rows.mean()) if rows.size else 0.0,
            "max_batch_rows": int(rows.max()) if rows.size else 0,
            "served": int(served.size),
            "refused": self.refused,
            "expired": self.expired,
            "busy_fraction": self.busy_fraction,
        }


def simulate(
    arrivals_ns: IntArray,
    service: ServiceTime,
    *,
    batching: BatchingSettings,
    queue: QueueSettings | None = None,
    rows: IntArray | None = None,
    levels: IntArray | None = None,
    slots: int = 1,
    stage: bool = False,
    check_every: int = 0,
) -> SimulationResult:
    """Run until every request has ended.

    `rows` and `levels` give each request's rows (1) and priority level (0). With `check_every` the invariants are checked after
    every so many events. Raises AssertionError if they do not hold, or if a request never ended.
    """
    return _Run(arrivals_ns, service, batching, queue or QueueSettings(), rows, levels, slots, stage, check_every).finish()


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        arrivals_ns: IntArray,
        service: ServiceTime,
        batching: BatchingSettings,
        queue: QueueSettings,
        rows: IntArray | None,
        levels: IntArray | None,
        slots: int,
        stage: bool,
        check_every: int,
    ) -> None:
        count = len(arrivals_ns)
        self.arrivals_ns = arrivals_ns
        self.rows: list[int] = (constant_rows(count) if rows is None else rows).tolist()
        self.levels: list[int] = [0] * count if levels is None else levels.tolist()
        self.service = service
        self.slots = slots
        self.check_every = check_every
        self.scheduler = Scheduler(batching, queue, executors=slots, stage=stage)
        self.outcome: list[int] = [_UNFINISHED] * count
        self.waited: list[int] = [_UNFINISHED] * count
        self.completions: list[tuple[int, int, Batch]] = []
        self.started: list[int] = []
        self.durations: list[int] = []
        self.batch_rows: list[int] = []
        self.reasons: list[str] = []

    def finish(self) -> SimulationResult:
        """The event loop."""
        scheduler, completions, outcome, waited = self.scheduler, self.completions, self.outcome, self.waited
        times: list[int] = [*self.arrivals_ns.tolist(), FOREVER]
        first_ns = last_ns = times[0] if len(times) > 1 else 0
        in_system = area = index = events = 0
        wakeup_ns: int | None = None
        while True:
            now_ns = times[index]
            if completions and completions[0][0] < now_ns:
                now_ns = completions[0][0]
            if wakeup_ns is not None and wakeup_ns < now_ns:
                now_ns = max(wakeup_ns, last_ns)
            if now_ns == FOREVER:
                break
            area += in_system * (now_ns - last_ns)
            last_ns = now_ns
            while completions and completions[0][0] == now_ns:
                self._complete(heappop(completions)[2], now_ns)
            while times[index] == now_ns:
                ticket = Ticket(self.rows[index], 0, None, index, None, None, self.levels[index])
                if scheduler.submit(ticket, now_ns) is not None:
                    outcome[index] = waited[index] = REFUSED
                index += 1
            for decision in scheduler.poll(now_ns):
                if type(decision) is Dispatch:
                    self._begin(decision.batch, now_ns)
                elif type(decision) is Expire:
                    for ticket in decision.tickets:
                        outcome[ticket.payload] = waited[ticket.payload] = EXPIRED
            wakeup_ns = scheduler.next_wakeup_ns()
            in_system = scheduler.in_system
            events += 1
            if self.check_every and events % self.check_every == 0:
                check_invariants(scheduler)
        assert scheduler.idle and _UNFINISHED not in outcome, "a request never ended"
        return self._result(first_ns, last_ns, area)

    def _begin(self, batch: Batch, now_ns: int) -> None:
        taken_ns = self.service(batch.rows)
        heappush(self.completions, (now_ns + taken_ns, len(self.started), batch))
        self.started.append(now_ns)
        self.durations.append(taken_ns)
        self.batch_rows.append(batch.rows)
        self.reasons.append(batch.reason)

    def _complete(self, batch: Batch, now_ns: int) -> None:
        outcome, waited = self.outcome, self.waited
        for ticket in batch.members:
            ticket.state = TicketState.ANSWERED
            if ticket.parent is None:
                outcome[ticket.payload] = now_ns - ticket.accepted_ns
                waited[ticket.payload] = batch.started_ns - ticket.accepted_ns
        for ticket in self.scheduler.complete(batch, now_ns):
            outcome[ticket.payload] = now_ns - ticket.accepted_ns
            waited[ticket.payload] = batch.started_ns - ticket.accepted_ns
        staged = self.scheduler.staged
        if staged is not None:
            self.scheduler.start(staged, now_ns)
            self._begin(staged, now_ns)

    def _result(self, first_ns: int, last_ns: int, area: int) -> SimulationResult:
        span_ns = last_ns - first_ns

        def array(values: list[int]) -> IntArray:
            return np.asarray(values, dtype=np.int64)

        return SimulationResult(
            arrivals_ns=self.arrivals_ns,
            outcome_ns=array(self.outcome),
            waited_ns=array(self.waited),
            batches=BatchLog(array(self.started), array(self.durations), array(self.batch_rows), self.reasons),
            slots=self.slots,
            span_ns=span_ns,
            mean_in_system=area / span_ns if span_ns else 0.0,
            final=self.scheduler.snapshot(last_ns),
        )
