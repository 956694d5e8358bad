"""When a batch starts in adaptive mode: headway by hand, the last executor's share, what replay prefers, and who is not starved."""

import math

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Dispatch
from shoal.core.latency import LatencyModel
from shoal.core.losses import Losses
from shoal.core.ranked_queue import Flow
from shoal.core.replay import Chooser, Law, replay
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.starting import AT_ONCE, HEADWAY, Arrivals, StartRule, arms, cycle_ns, hold_ns, share_of_last
from shoal.core.ticket import Ticket

MS = 1_000_000
LAW = Law(tau0_ns=1.0 * MS, alpha_ns=0.1 * MS, factors=(), limit=32)


def finish(steps):
    """The value that a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def test_cycle_hold_and_share():
    """tau0 = 1 ms at half load: a cycle of 2 ms. The hold grows as fewer are idle, and shrinks with the cube of a backlog."""
    assert cycle_ns(5e-6 * 4, 4, MS, 0.1 * MS) == pytest.approx(2 * MS)
    assert cycle_ns(1.0, 4, MS, 0.1 * MS) == pytest.approx(MS / 0.07)
    full = HEADWAY.headway * 2 * MS / 4
    assert hold_ns(HEADWAY, 1, 4, 2 * MS, 10.0, 10) == pytest.approx(full)
    assert hold_ns(HEADWAY, 3, 4, 2 * MS, 10.0, 10) == pytest.approx(full / 3)
    assert hold_ns(HEADWAY, 1, 4, 2 * MS, 10.0, 20) == pytest.approx(full / 8)
    assert hold_ns(HEADWAY, 4, 4, 2 * MS, 10.0, 10) == 0
    assert hold_ns(HEADWAY, 1, 1, 2 * MS, 10.0, 10) == 0
    assert hold_ns(AT_ONCE, 1, 4, 2 * MS, 10.0, 10) == 0
    assert share_of_last(0.7, 20, 2, 16.0) == 20  # 16 + 0.7 √16 + 2
    assert share_of_last(0.7, 500, 2, 16.0) == 250  # a real backlog: one executor's part of it


def held():
    """Two executors by headway, a rate that is known (a request each 0.5 ms), one batch just started at the returned time."""
    latency = LatencyModel()
    for rows in (1, 2, 4):
        latency.observe(rows, 0, MS + rows * 1000)
    settings = BatchingSettings(mode="adaptive", adaptive_start="headway")
    machine = Scheduler(settings, QueueSettings(), executors=2, latency=latency)
    now_ns = 0
    for _ in range(400):
        now_ns += MS // 2
        machine.submit(Ticket(), now_ns)
        for decision in machine.poll(now_ns):
            if isinstance(decision, Dispatch):
                machine.complete(decision.batch, now_ns)
        machine.poll(machine.next_wakeup_ns() or now_ns)
        for batch in machine.running_batches():
            machine.complete(batch, now_ns)
    now_ns += 5 * MS
    machine.submit(Ticket(), now_ns)
    assert any(isinstance(decision, Dispatch) for decision in machine.poll(now_ns)), "both executors are idle: at once"
    return machine, now_ns


def test_headway_holds_the_last_idle_executor():
    """The next start is a share of a cycle away from the last, and comes when that has passed, not before."""
    machine, start_ns = held()
    machine.submit(Ticket(), start_ns + 1)
    assert machine.poll(start_ns + 1) == []
    due_ns = machine.next_wakeup_ns()
    assert start_ns + 0.2 * MS < due_ns < start_ns + MS
    assert machine.poll(due_ns - 1) == []
    (dispatch,) = machine.poll(due_ns)
    assert (dispatch.batch.rows, dispatch.batch.reason) == (1, "delay")


def test_a_deadline_ends_every_hold():
    """However long the rule would hold, a batch starts in time for its first deadline with one more row."""
    machine, start_ns = held()
    machine.submit(Ticket(deadline_ns=start_ns + round(1.2 * MS)), start_ns)
    assert machine.poll(start_ns) == []
    assert machine.next_wakeup_ns() == pytest.approx(start_ns + 0.2 * MS - 2000, abs=100)


def test_replay_finds_the_window_that_pairs_need():
    """Pairs 0.2 tau0 apart, every 3 tau0, one executor: starting at once runs 1 + 1 (the second waits), a window of ¼ runs 2."""
    times = sorted([*range(0, 900 * MS, 3 * MS), *range(MS // 5, 900 * MS, 3 * MS)])
    at_once = finish(replay(times, AT_ONCE, 1, LAW, FOREVER, 1e-6))
    window = finish(replay(times, StartRule("window 1/4", 0.25), 1, LAW, FOREVER, 1e-6))
    # at once: 1.1 ms, and 0.9 ms of waiting + 1.1 ms; window: 0.25 ms + 1.2 ms, and 0.05 ms + 1.2 ms
    assert at_once == pytest.approx(math.log(2.0 * MS) + 0.5 * math.log(1.55 * MS), abs=1e-6)
    assert window == pytest.approx(math.log(1.45 * MS) + 0.5 * math.log(1.35 * MS), abs=1e-6)


def test_replay_counts_what_is_too_late():
    """An objective of 1.3 ms: at once half of the pairs are given up, which costs 30 times that half."""
    times = sorted([*range(0, 900 * MS, 3 * MS), *range(MS // 5, 900 * MS, 3 * MS)])
    score = finish(replay(times, AT_ONCE, 1, LAW, round(1.3 * MS), 1e-6))
    assert score == pytest.approx(15.0 + math.log(1.1 * MS) + 0.5 * math.log(1.1 * MS), abs=1e-6)


def test_replay_gives_up_for_the_batch_that_is_taken():
    """Two executors busy until 1.1 and 1.15 ms; then a cap of two. A batch of three would give up the request of 0.4 ms, one of two
    does not: with 1.95 ms to answer, all six are in time (1.1, 1.1, 1.9, 1.7, 1.75 and 1.75 ms)."""
    times = [round(moment * MS) for moment in (0, 0.05, 0.4, 0.6, 0.6, 0.6)]
    score = finish(replay(times, StartRule("capped", slack=0.0), 2, LAW, round(1.95 * MS), 1e-12))
    assert score == pytest.approx(math.log(1.9 * MS) + 0.5 * math.log(1.55 * MS), abs=1e-6)


def test_arms():
    """One executor tries no headway; an objective adds rules, and takes none away."""
    assert not any(rule.headway for rule in arms(1, True))
    assert set(arms(4, False)) < set(arms(4, True))
    assert all(len({rule.name for rule in arms(count, True)}) == len(arms(count, True)) for count in (1, 4))


def test_the_chooser_puts_the_better_rule_in_force():
    """After 6,000 requests in such pairs the window is chosen, in small steps; a chooser that is not to try keeps its rule."""
    arrivals = Arrivals()
    for pair in range(3100):
        for moment in (pair * 3 * MS, pair * 3 * MS + MS // 5):
            arrivals.add(moment, 1)
            arrivals.update(moment, MS)
    chooser, fixed = Chooser(1, FOREVER), Chooser(1, FOREVER, trying=False)
    assert chooser.rule is AT_ONCE
    while chooser.think(arrivals, LAW, 1):
        pass
    assert (chooser.rule.name, chooser.replays) == ("window 1/4", 1)
    assert not fixed.think(arrivals, LAW, 1)
    assert fixed.rule is AT_ONCE


def test_no_class_is_starved_by_those_with_more_time():
    """l(b) = 1 + b ms. Of ten tight tickets (4.5 ms) and ten loose ones (20 ms) 10 fit in time, for the loose alone; when the tight
    lose more, the largest batch of which they can fill their half in time is taken: three rows (4 ms)."""
    tight = [Ticket(payload=number) for number in range(10)]
    loose = [Ticket(payload=number) for number in range(10)]
    for ticket in tight:
        ticket.due_ns = round(4.5 * MS)
    for ticket in loose:
        ticket.due_ns = 20 * MS
    flow = Flow(None, 1.0)
    flow.tickets = [*tight, *loose]
    flow.keys = [ticket.due_ns for ticket in flow.tickets]
    views = [(flow, flow.keys, flow.tickets)]

    def span(rows):
        return MS + rows * MS

    losses = Losses(by_tenant=False)
    losses.served(loose)
    losses.served(tight)
    assert losses.guarded(10, views, 0, span) == 10
    for _ in range(10):
        losses.lost(tight)
        losses.served(loose)
    assert losses.guarded(10, views, 0, span) == 3
