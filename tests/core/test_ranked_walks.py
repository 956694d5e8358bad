"""The ranked composer in random walks: whatever is submitted, cancelled, failed or reconfigured, the laws hold and all ends."""

import random

import pytest

from shoal.config.settings import BatchingSettings, LengthSettings, LevelSettings, QueueSettings
from shoal.core.decisions import Dispatch, Drop, Expire
from shoal.core.invariants import check_invariants
from shoal.core.latency import LatencyModel
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState

MS = 1_000_000
PAD = {"ids": LengthSettings(policy="pad", mask="mask")}


def some_settings(draw):
    """Settings of which most need the ranked composer."""
    lengths = draw.choice([{}, {}, PAD])
    batching = BatchingSettings(
        max_batch_size=draw.choice([1, 3, 8]),
        max_delay_ms=draw.choice([0, 0, 3]),
        mode=draw.choice(["fixed", "adaptive"]),
        early_drop=draw.choice([None, None, True, False]),
        order=draw.choice([None, "deadline"]),
        allowed_batch_sizes=draw.choice([(), (), (1, 2, 3)]),
        preferred_batch_sizes=draw.choice([(), (2, 3)]),
        max_batch_cost=draw.choice([None, 60]) if lengths else None,
        cost="tokens" if lengths else "rows",
        lengths=lengths,
        oversize=draw.choice(["split", "reject"]),
    )
    queue = QueueSettings(
        max_queue_requests=draw.choice([None, 12]),
        priority_levels=draw.choice([1, 2, 3]),
        slo_ms=draw.choice([None, 20]),
        fair_tenants=draw.choice([True, False]),
        tenant_weights=draw.choice([{}, {"x": 3.0}]),
        max_tenants=draw.choice([1, 2, 100]),
        timeout_action=draw.choice(["reject", "delay"]),
        default_timeout_ms=draw.choice([None, 10]),
        aging_ms=draw.choice([None, 4]),
        levels=draw.choice([{}, {1: LevelSettings(max_queue_requests=4, max_queue_rows=9, default_timeout_ms=6)}]),
    )
    return batching, queue


class Walk:
    """One scheduler, its running batches and every ending that was told."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        latency = LatencyModel()
        if self.draw.random() < 0.7:
            for rows in (1, 2, 4, 8):
                latency.observe(rows, 0, MS + rows * MS // 4)
                latency.observe(rows * 10, 10, MS + rows * MS // 4)
        executors = self.draw.choice([1, 2, 3])
        stage = self.draw.choice([True, False])
        self.scheduler = Scheduler(*some_settings(self.draw), executors=executors, stage=stage, latency=latency)
        self.now_ns = 1
        self.running = []
        self.accepted = []
        self.ended = {}

    def end(self, tickets):
        for ticket in tickets:
            assert id(ticket) not in self.ended, "a ticket ended twice"
            self.ended[id(ticket)] = ticket.state

    def poll(self):
        before = self.scheduler.idle
        for decision in self.scheduler.poll(self.now_ns):
            if isinstance(decision, Dispatch):
                assert not before
                self.running.append(decision.batch)
            elif isinstance(decision, Drop | Expire):
                self.end(decision.tickets)
        check_invariants(self.scheduler)

    def finish(self, index, fail):
        batch = self.running.pop(index % len(self.running))
        for member in batch.members:
            member.state = TicketState.FAILED if fail else TicketState.ANSWERED
        whole = [member for member in batch.members if member.parent is None]
        self.end([*whole, *self.scheduler.complete(batch, self.now_ns)])

    def step(self):
        draw, scheduler = self.draw, self.scheduler
        self.now_ns += draw.choice([0, 0, MS // 10, MS, 3 * MS])
        match draw.choices(["submit", "cancel", "finish", "settings", "cap", "think"], [50, 5, 15, 2, 2, 1])[0]:
            case "submit":
                timeout_ms = draw.choice([None, None, -1, 0, 2, 5, 40])
                deadline_ns = None if timeout_ms is None else self.now_ns + timeout_ms * MS
                ticket = Ticket(draw.choice([1, 1, 1, 2, 5, 9]), 10, draw.choice("AAAB"), deadline_ns=deadline_ns)
                ticket.level, ticket.tenant, ticket.length = (
                    draw.choice([0, 1]),
                    draw.choice(["x", "y", "z", None]),
                    draw.choice([1, 5, 9]),
                )
                if scheduler.submit(ticket, self.now_ns) is None:
                    self.accepted.append(ticket)
            case "cancel" if self.accepted:
                ticket = draw.choice(self.accepted)
                if scheduler.cancel(ticket, self.now_ns):
                    self.end([ticket])
            case "finish" if self.running:
                self.finish(draw.randrange(99), draw.random() < 0.2)
            case "settings" | "cap" as what:
                if scheduler.staged is not None:
                    scheduler.recall(scheduler.staged)
                if what == "cap":
                    scheduler.cap_rows(draw.choice([None, 1, 2]), self.now_ns)
                else:
                    scheduler.reconfigure(*some_settings(draw), self.now_ns)
            case "think":
                scheduler.think(2)
        self.poll()

    def run_dry(self):
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            if self.running:
                self.finish(0, False)
            else:
                wakeup_ns = self.scheduler.next_wakeup_ns()
                assert wakeup_ns is not None, "something waits, an executor is free, and nobody would ever look again"
                self.now_ns = max(self.now_ns, wakeup_ns)
            self.poll()
        assert self.scheduler.idle
        assert len(self.ended) == len(self.accepted)


@pytest.mark.parametrize("seed", range(120))
def test_laws_hold_and_everything_ends_once(seed):
    """Invariants after every step; no ticket in two batches or with two endings; nothing is left behind or forgotten."""
    walk = Walk(seed)
    for _ in range(250):
        walk.step()
    walk.run_dry()
