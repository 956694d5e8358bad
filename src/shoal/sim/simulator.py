"""The event loop of virtual time: it drives a real `Scheduler` as a driver does, with arrivals and service times from models.

It decides nothing by itself. Events at one instant come in this order: completions, arrivals, then one poll.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import Batch
from shoal.core.decisions import Dispatch, Drop, Expire
from shoal.core.invariants import check_invariants
from shoal.core.latency import LatencyModel
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.snapshot import Snapshot
from shoal.core.ticket import Ticket, TicketState
from shoal.sim.arrivals import IntArray, constant_rows
from shoal.sim.service import ServiceTime

REFUSED: Final = -1
EXPIRED: Final = -2
DROPPED: Final = -3
_UNFINISHED: Final = -4
_THINK_EVERY: Final = 256  # events
_THINK_STEPS: Final = 64

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class BatchLog:
    """All batches in the order in which they started, as int64 of shape [batches], and why they started.

    `work` is what their time went by, rows or padded tokens; `tokens` are the real ones, 0 without lengths.
    """

    started_ns: IntArray
    service_ns: IntArray
    rows: IntArray
    work: IntArray
    tokens: IntArray
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes, one entry per request in order of arrival; what is None is the same for all.

    `rows` (1), `levels` (0: the default), `tenants` (nobody), `timeouts_ns` (from arrival; negative: none), `lengths` (of a
    request's rows, 0: do not matter), `costs` (0: its rows), `signatures` (all alike).
    """

    arrivals_ns: IntArray
    rows: IntArray | None = None
    levels: IntArray | None = None
    tenants: Sequence[Hashable] | None = None
    timeouts_ns: IntArray | None = None
    lengths: IntArray | None = None
    costs: Sequence[float] | None = None
    signatures: Sequence[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came out.

    `outcome_ns`: per request in order of arrival its latency from arrival to the end of its (last) batch, or REFUSED, EXPIRED or
    DROPPED. `waited_ns`: per request the part of it before its (last) batch started, or the same marks. `span_ns`: from the first
    arrival to the last completion. `mean_in_system`: time average of the requests held or running, as the scheduler itself counted
    them.
    """

    requests: Requests
    outcome_ns: IntArray
    waited_ns: IntArray
    batches: BatchLog
    slots: int
    span_ns: int
    mean_in_system: float
    final: Snapshot

    @property
    def arrivals_ns(self) -> IntArray:
        """When the requests came."""
        return self.requests.arrivals_ns

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
    def dropped(self) -> int:
        """Requests that were given up because they could not be answered in time any more."""
        return int(np.count_nonzero(self.outcome_ns == DROPPED))

    @property
    def busy_fraction(self) -> float:
        """Share of the slots' time in which they ran a batch."""
        return float(self.batches.service_ns.sum()) / (self.slots * self.span_ns) if self.span_ns else 0.0

    @property
    def padding_factor(self) -> float:
        """Tokens that were run over tokens that were real; 1 without lengths."""
        tokens = int(self.batches.tokens.sum())
        return float(self.batches.work.sum()) / tokens if tokens else 1.0

    def in_time(self, objective_ns: int) -> BoolArray:
        """Which requests were answered within the objective, or within their own timeout where they have one."""
        limits: IntArray | int = objective_ns
        if self.requests.timeouts_ns is not None:
            timeouts_ns = self.requests.timeouts_ns
            limits = np.where(timeouts_ns >= 0, timeouts_ns, objective_ns)
        within: BoolArray = (self.outcome_ns >= 0) & (self.outcome_ns <= limits)
        return within

    def in_time_share(self, objective_ns: int) -> float:
        """Share of all requests that were answered in time."""
        return float(self.in_time(objective_ns).mean()) if self.outcome_ns.size else 0.0

    def goodput_per_s(self, objective_ns: int) -> float:
        """Requests answered in time per second of arrivals."""
        arrivals_ns = self.arrivals_ns
        span_ns = int(arrivals_ns[-1] - arrivals_ns[0]) if arrivals_ns.size > 1 else 0
        return float(np.count_nonzero(self.in_time(objective_ns))) / span_ns * 1e9 if span_ns else 0.0

    def fairness(self, weights: Mapping[Hashable, float]) -> float:
        """Jain's index over what each tenant got of its fair share: 1 if all got the same part of it, 1/n if one got everything.

        Of the rows answered before the last request came, a tenant's fair share is what it sent if that is little, and otherwise
        goes by its weight (1 where not given): the weighted max-min shares.
        """
        sent: dict[Hashable, float] = {}
        served: dict[Hashable, float] = {}
        rows = self.requests.rows
        arrivals_ns = self.arrivals_ns
        in_time = (self.outcome_ns >= 0) & (arrivals_ns + self.outcome_ns <= arrivals_ns[-1:])
        for index, tenant in enumerate(self.requests.tenants or ()):
            own = 1.0 if rows is None else float(rows[index])
            sent[tenant] = sent.get(tenant, 0.0) + own
            served[tenant] = served.get(tenant, 0.0) + (own if in_time[index] else 0.0)
        fair = max_min_shares(sent, weights, sum(served.values()))
        parts = [served[tenant] / share for tenant, share in fair.items() if share]
        squares = sum(part * part for part in parts)
        return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0

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
            "dropped": self.dropped,
            "busy_fraction": self.busy_fraction,
            "padding_factor": self.padding_factor,
        }


def max_min_shares(wanted: Mapping[Hashable, float], weights: Mapping[Hashable, float], capacity: float) -> dict[Hashable, float]:
    """A capacity shared fairly by weight (1 where not given): nobody gets more than wanted, what is left goes to the others."""
    shares: dict[Hashable, float] = {}
    order = sorted(wanted, key=lambda tenant: wanted[tenant] / weights.get(tenant, 1.0))
    weight = sum(weights.get(tenant, 1.0) for tenant in wanted)
    for tenant in order:
        own = weights.get(tenant, 1.0)
        shares[tenant] = min(wanted[tenant], capacity * own / weight)
        capacity -= shares[tenant]
        weight -= own
    return shares


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
    requests = Requests(arrivals_ns, rows=rows, levels=levels)
    return simulate_requests(
        requests, service, batching=batching, queue=queue or QueueSettings(), slots=slots, stage=stage, check_every=check_every
    )


def simulate_requests(
    requests: Requests,
    service: ServiceTime,
    *,
    batching: BatchingSettings,
    queue: QueueSettings,
    slots: int = 1,
    stage: bool = False,
    latency: LatencyModel | None = None,
    check_every: int = 0,
) -> SimulationResult:
    """The same with everything that a request may bring.

    The scheduler's model of time starts, as a server's does, from batches of 1, 2, 4, … rows that were tried at load; or from
    `latency`.
    """
    if latency is None:
        latency = warmed_up(service, batching, requests.lengths)
    return _Run(requests, service, batching, queue, slots, stage, latency, check_every).finish()


def warmed_up(service: ServiceTime, batching: BatchingSettings, lengths: IntArray | None = None) -> LatencyModel:
    """The model of time of a server that has tried batches of 1, 2, 4, … rows, of short and long rows if `lengths` differ."""
    latency = LatencyModel(margin_sigmas=batching.margin_sigmas)
    tried = [0] if lengths is None else sorted({int(length) for length in np.quantile(lengths, (0.0, 0.25, 0.5, 0.75, 1.0))})
    for length in tried:
        rows = 1
        while rows <= max(1, batching.max_batch_size):
            work = rows * (length or 1)
            latency.observe(work, length, max(1, round(service.law_ns(work))))
            rows *= 2
    return latency


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        requests: Requests,
        service: ServiceTime,
        batching: BatchingSettings,
        queue: QueueSettings,
        slots: int,
        stage: bool,
        latency: LatencyModel,
        check_every: int,
    ) -> None:
        count = len(requests.arrivals_ns)
        self.requests = requests
        self.service = service
        self.slots = slots
        self.check_every = check_every
        self.by_tokens = requests.lengths is not None
        self.ragged = any(length.policy == "ragged" for length in batching.lengths.values())
        self.scheduler = Scheduler(batching, queue, executors=slots, stage=stage, latency=latency)
        self.outcome: list[int] = [_UNFINISHED] * count
        self.waited: list[int] = [_UNFINISHED] * count
        self.completions: list[tuple[int, int, Batch]] = []
        self.started: list[int] = []
        self.durations: list[int] = []
        self.batch_rows: list[int] = []
        self.work: list[int] = []
        self.tokens: list[int] = []
        self.reasons: list[str] = []

    def tickets(self) -> list[Ticket]:
        """All requests, in order of arrival; their index is the payload."""
        requests = self.requests
        count = len(requests.arrivals_ns)
        rows = (constant_rows(count) if requests.rows is None else requests.rows).tolist()
        levels = [0] * count if requests.levels is None else requests.levels.tolist()
        tickets = [Ticket(rows[index], 0, None, index, None, None, levels[index]) for index in range(count)]
        for index, tenant in enumerate(requests.tenants or ()):
            tickets[index].tenant = tenant
        for index, signature in enumerate(requests.signatures or ()):
            tickets[index].signature = signature
        for index, cost in enumerate(requests.costs or ()):
            tickets[index].cost = cost
        if requests.lengths is not None:
            for index, length in enumerate(requests.lengths.tolist()):
                tickets[index].length = length
        if requests.timeouts_ns is not None:
            deadlines_ns = (requests.arrivals_ns + requests.timeouts_ns).tolist()
            for index, timeout_ns in enumerate(requests.timeouts_ns.tolist()):
                if timeout_ns >= 0:
                    tickets[index].deadline_ns = deadlines_ns[index]
        return tickets

    def finish(self) -> SimulationResult:
        """The event loop."""
        scheduler, completions, outcome, waited = self.scheduler, self.completions, self.outcome, self.waited
        tickets = self.tickets()
        times: list[int] = [*self.requests.arrivals_ns.tolist(), FOREVER]
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
                if scheduler.submit(tickets[index], now_ns) is not None:
                    outcome[index] = waited[index] = REFUSED
                index += 1
            for decision in scheduler.poll(now_ns):
                if type(decision) is Dispatch:
                    self._begin(decision.batch, now_ns)
                elif type(decision) is Expire:
                    for ticket in decision.tickets:
                        outcome[ticket.payload] = waited[ticket.payload] = EXPIRED
                elif type(decision) is Drop:
                    for ticket in decision.tickets:
                        outcome[ticket.payload] = waited[ticket.payload] = DROPPED
            wakeup_ns = scheduler.next_wakeup_ns()
            in_system = scheduler.in_system
            events += 1
            if events % _THINK_EVERY == 0:
                scheduler.think(_THINK_STEPS)
            if self.check_every and events % self.check_every == 0:
                check_invariants(scheduler)
        assert scheduler.idle and _UNFINISHED not in outcome, "a request never ended"
        return self._result(first_ns, last_ns, area)

    def _begin(self, batch: Batch, now_ns: int) -> None:
        work, tokens = batch.rows, 0
        if self.by_tokens:
            tokens = sum([ticket.rows * ticket.length for ticket in batch.members])
            work = tokens if self.ragged else batch.rows * max([ticket.length for ticket in batch.members])
        taken_ns = self.service(work)
        heappush(self.completions, (now_ns + taken_ns, len(self.started), batch))
        self.started.append(now_ns)
        self.durations.append(taken_ns)
        self.batch_rows.append(batch.rows)
        self.work.append(work)
        self.tokens.append(tokens)
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

        log = BatchLog(
            array(self.started), array(self.durations), array(self.batch_rows), array(self.work), array(self.tokens), self.reasons
        )
        return SimulationResult(
            requests=self.requests,
            outcome_ns=array(self.outcome),
            waited_ns=array(self.waited),
            batches=log,
            slots=self.slots,
            span_ns=span_ns,
            mean_in_system=area / span_ns if span_ns else 0.0,
            final=self.scheduler.snapshot(last_ns),
        )
