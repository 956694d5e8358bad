"""What the scheduler costs: microseconds per request for submit + poll + complete in batches of 64, on this machine.

Not a test and no part of them. Run with `python benchmarks/core.py [--json]`; takes a few seconds. The budget (design.md §7) is
3 µs per request with priorities and deadlines in use. Making the tickets is measured by itself (`construct`).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Dispatch, Expire, Stage
from shoal.core.latency import LatencyModel
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket

BATCH = 64
ROUNDS = 300
BUDGET_US = 3.0


def run(scheduler: Scheduler, tickets: list[list[Ticket]], poll_each: bool) -> float:
    """Submit batch by batch, poll once (or after every request), complete; returns seconds. One executor, kept busy."""
    now_ns = 1_000_000
    running = None
    begin = time.perf_counter()
    for batch_of_tickets in tickets:
        for ticket in batch_of_tickets:
            now_ns += 1_000
            scheduler.submit(ticket, now_ns)
            if poll_each:
                scheduler.poll(now_ns)
        if running is not None:
            scheduler.complete(running, now_ns)
            running = None
        for decision in scheduler.poll(now_ns):
            if type(decision) is Dispatch:
                running = decision.batch
        scheduler.next_wakeup_ns()
    return time.perf_counter() - begin


def run_recalled(scheduler: Scheduler, tickets: list[list[Ticket]]) -> float:
    """As `run`, with a staged batch that is taken back and offered again after every eighth request, as a busy driver does."""
    now_ns = 1_000_000
    running = staged = None
    begin = time.perf_counter()
    for batch_of_tickets in tickets:
        for index, ticket in enumerate(batch_of_tickets):
            now_ns += 1_000
            scheduler.submit(ticket, now_ns)
            if index % 8 == 7:
                if staged is not None and scheduler.wants_recall():
                    scheduler.recall(staged)
                for decision in scheduler.poll(now_ns):
                    if type(decision) is Stage:
                        staged = decision.batch
                    elif type(decision) is Dispatch:
                        running = decision.batch
        if running is not None:
            scheduler.complete(running, now_ns)
            if staged is not None:
                scheduler.start(staged, now_ns)
                running, staged = staged, None
            for decision in scheduler.poll(now_ns):
                if type(decision) is Stage:
                    staged = decision.batch
    return time.perf_counter() - begin


def run_expiring(scheduler: Scheduler, tickets: list[list[Ticket]]) -> float:
    """Every request expires behind a batch that never ends."""
    now_ns = 1_000_000
    scheduler.submit(Ticket(), now_ns)
    scheduler.poll(now_ns)
    expired = 0
    begin = time.perf_counter()
    for batch_of_tickets in tickets:
        for ticket in batch_of_tickets:
            now_ns += 1_000
            scheduler.submit(ticket, now_ns)
        for decision in scheduler.poll(now_ns):
            if type(decision) is Expire:
                expired += len(decision.tickets)
    return time.perf_counter() - begin


def refuse(scheduler: Scheduler, tickets: list[list[Ticket]]) -> float:
    """Every request meets a full queue."""
    scheduler.submit(Ticket(), 0)
    scheduler.poll(0)
    scheduler.submit(Ticket(), 0)
    begin = time.perf_counter()
    for batch_of_tickets in tickets:
        for ticket in batch_of_tickets:
            scheduler.submit(ticket, 1)
    return time.perf_counter() - begin


def run_everything() -> float:
    """Adaptive mode with an objective, three levels with ageing, eight tenants by weight, deadlines; 1,000 wait all the time."""
    latency = LatencyModel()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        latency.observe(rows, 0, 200_000 + 5_000 * rows)
    queue = QueueSettings(
        priority_levels=3,
        aging_ms=1000.0,
        slo_ms=60_000.0,
        max_queue_rows=None,
        max_queue_bytes=None,
        tenant_weights={str(number): 1.0 + number for number in range(8)},
    )
    scheduler = Scheduler(BatchingSettings(max_batch_size=BATCH, mode="adaptive"), queue, latency=latency)
    tickets = make(3, True)
    draw = random.Random(2)
    for ticket in [ticket for batch_of_tickets in tickets for ticket in batch_of_tickets]:
        ticket.tenant = str(draw.randrange(8))
        if ticket.deadline_ns is not None:
            ticket.deadline_ns += 10**11
    waiting = [Ticket(signature=("model", (8,)), level=draw.randrange(4), tenant=str(draw.randrange(8))) for _ in range(1000)]
    for ticket in waiting:
        scheduler.submit(ticket, 1_000)
    return run(scheduler, tickets, False)


def make(levels: int = 1, deadlines: bool = False) -> list[list[Ticket]]:
    """Tickets of all rounds; levels and deadlines drawn with a fixed seed."""
    draw = random.Random(1)
    signature = ("model", (8,))
    return [
        [
            Ticket(
                payload_bytes=256,
                signature=signature,
                level=draw.randrange(levels + 1) if levels > 1 else 0,
                deadline_ns=1_000_000 + (index * BATCH) * 1_000 + draw.randrange(10**7, 10**9) if deadlines else None,
            )
            for _ in range(BATCH)
        ]
        for index in range(ROUNDS)
    ]


def measure() -> dict[str, float]:
    """Best of five, in microseconds per request, by workload."""
    batching = BatchingSettings(max_batch_size=BATCH)
    window = BatchingSettings(max_batch_size=BATCH, max_delay_ms=5)
    plain = QueueSettings()
    levels = QueueSettings(priority_levels=4, default_priority=2)
    timeout = QueueSettings(priority_levels=4, default_priority=2, default_timeout_ms=500.0)
    short = QueueSettings(default_timeout_ms=0.05)
    full = QueueSettings(max_queue_rows=1)
    workloads = {
        "construct": lambda: timed(make),
        "plain": lambda: run(Scheduler(batching, plain), make(), False),
        "plain, poll after each": lambda: run(Scheduler(batching, plain), make(), True),
        "window, poll after each": lambda: run(Scheduler(window, plain), make(), True),
        "default timeout": lambda: run(Scheduler(batching, timeout), make(), False),
        "levels + deadlines": lambda: run(Scheduler(batching, levels), make(4, True), False),
        "levels + deadlines, poll after each": lambda: run(Scheduler(batching, timeout), make(4, True), True),
        "staged, recalled every 8": lambda: run_recalled(Scheduler(batching, plain, stage=True), make()),
        "the same, levels + deadlines": lambda: run_recalled(Scheduler(batching, levels, stage=True), make(4, True)),
        "expiring": lambda: run_expiring(Scheduler(batching, short), make()),
        "everything in use, 1,000 waiting": run_everything,
        "refused": lambda: refuse(Scheduler(batching, full), make()),
    }
    results = {}
    gc.disable()
    for name, workload in workloads.items():
        results[name] = round(min(workload() for _ in range(5)) / (ROUNDS * BATCH) * 1e6, 3)
        gc.collect()
    gc.enable()
    return results


def timed(function: object) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - begin


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure()
    if arguments.json:
        print(json.dumps({"unit": "us_per_request", "batch": BATCH, "budget": BUDGET_US, "results": results}))
        return
    for name, value in results.items():
        print(f"{name:48} {value:7.3f} µs per request")
    print(f"{'budget':48} {BUDGET_US:7.3f} µs per request")


if __name__ == "__main__":
    main()
