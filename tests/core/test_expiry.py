"""Deadlines: exact, independent of slots, never executed once passed, and free of leaks."""

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState
from shoal.testing.puppet import PuppetDriver

MS = 1_000_000


@pytest.mark.parametrize("stage", [False, True])
def test_case_18_expiry_while_every_slot_is_busy(stage):
    """A timeout of 100 ms behind a batch of 900 ms fails at 100 ms, frees its room, and is never executed."""
    puppet = PuppetDriver(queue=QueueSettings(default_timeout_ms=100, max_queue_requests=1), stage=stage)
    puppet.submit()
    late = puppet.submit()
    assert puppet.submit().state is TicketState.REFUSED
    puppet.advance(99.999999)
    assert puppet.expired == []
    puppet.advance(0.000001)
    assert puppet.expired == [late]
    assert late.state is TicketState.EXPIRED
    assert puppet.submit().state is not TicketState.REFUSED
    puppet.advance(799)
    puppet.finish_all()
    assert all(late not in batch.members for batch in puppet.started)


@pytest.mark.parametrize(
    ("default_ms", "own_ms", "override", "expected_ms"),
    [
        (None, 30, True, 30),
        (50, None, True, 50),
        (50, 30, True, 30),
        (50, 80, True, 50),
        (50, 30, False, 50),
        (None, 30, False, None),
        (None, None, True, None),
    ],
)
def test_effective_timeout(default_ms, own_ms, override, expected_ms):
    """The smaller of default and own counts; an own one counts without a default; overriding can be forbidden."""
    puppet = PuppetDriver(queue=QueueSettings(default_timeout_ms=default_ms, allow_timeout_override=override))
    puppet.submit(timeout_ms=None)
    ticket = puppet.submit(timeout_ms=own_ms)
    assert ticket.expiry_ns == (FOREVER if expected_ms is None else expected_ms * MS)


def test_expiries_come_in_order_of_time_not_of_arrival():
    """Mixed deadlines expire earliest first, each at its own instant."""
    puppet = PuppetDriver()
    puppet.submit()
    tickets = [puppet.submit(timeout_ms=timeout) for timeout in (50, 10, 30, 20, 40)]
    seen = []
    for _ in range(5):
        puppet.advance(10)
        seen.append(len(puppet.expired))
    assert seen == [1, 2, 3, 4, 5]
    assert puppet.expired == [tickets[index] for index in (1, 3, 2, 4, 0)]


def test_a_deadline_already_past_is_not_executed():
    """A ticket that comes too late expires at the next poll even with a free slot."""
    puppet = PuppetDriver()
    puppet.advance(10)
    ticket = puppet.submit(timeout_ms=-1)
    assert puppet.expired == [ticket]
    assert puppet.started == []


def test_a_running_ticket_does_not_expire():
    """Once it runs a ticket is answered, however late; its timer is gone."""
    puppet = PuppetDriver(queue=QueueSettings(default_timeout_ms=10))
    ticket = puppet.submit()
    assert puppet.scheduler.next_wakeup_ns() is None
    puppet.advance(100)
    puppet.finish()
    assert ticket.state is TicketState.ANSWERED


def test_delay_moves_an_expired_ticket_behind_the_others():
    """timeout_action "delay": no failure; others of the same level go first, lower levels do not."""
    queue = QueueSettings(default_timeout_ms=10, timeout_action="delay", priority_levels=2)
    puppet = PuppetDriver(BatchingSettings(max_batch_size=1), queue)
    puppet.submit(level=1)
    late = puppet.submit(level=1)
    puppet.advance(10)
    low = puppet.submit(level=2)
    fresh = puppet.submit(level=1)
    puppet.finish_all()
    assert [batch.members for batch in puppet.started[1:]] == [[fresh], [late], [low]]
    assert puppet.expired == []


def test_delayed_ticket_starts_when_nothing_else_waits():
    """A delayed ticket does not wait for a window again."""
    queue = QueueSettings(default_timeout_ms=10, timeout_action="delay")
    puppet = PuppetDriver(BatchingSettings(max_delay_ms=100), queue)
    puppet.submit(timeout_ms=0)
    assert [batch.reason for batch in puppet.started] == ["deadline"]
    puppet.submit()
    puppet.advance(15)
    puppet.finish()
    assert len(puppet.started) == 2


def test_timers_do_not_leak():
    """100,000 tickets that end early leave no timer behind: entries stay within a constant of the living."""
    scheduler = Scheduler(BatchingSettings(), QueueSettings(priority_levels=1))
    scheduler.submit(Ticket(), 0)
    running = scheduler.poll(0)[0].batch
    blocker = Ticket(deadline_ns=10**15)
    scheduler.submit(blocker, 0)
    for index in range(100_000):
        ticket = Ticket(deadline_ns=10**15 + (index * 7919) % 1000)
        assert scheduler.submit(ticket, index) is None
        assert scheduler.cancel(ticket, index)
        assert len(scheduler._timers) <= 2 * 2 + 2 * 64
        assert sum(map(len, scheduler._queue.lanes)) <= 2 + 66
    scheduler.complete(running, 200_000)


def test_timers_of_started_tickets_are_let_go():
    """When everything runs or has ended, polling leaves no timer entry at all."""
    scheduler = Scheduler(BatchingSettings(max_batch_size=100), QueueSettings(default_timeout_ms=1000))
    for _ in range(100):
        scheduler.submit(Ticket(), 0)
    scheduler.poll(0)
    scheduler.poll(1)
    assert len(scheduler._timers) == 0
