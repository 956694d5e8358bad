"""Priority levels, exact bounds, reservations and the refusals that name them."""

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Refuse
from shoal.core.invariants import check_invariants
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState
from shoal.testing.puppet import PuppetDriver


def test_levels_are_strict_and_fifo_inside():
    """Level 1 goes first whatever came before; inside a level the order is that of acceptance; 0 is the default level."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=2), QueueSettings(priority_levels=3, default_priority=2))
    puppet.submit()
    tickets = {
        name: puppet.submit(level=level) for name, level in (("a3", 3), ("b1", 1), ("c0", 0), ("d2", 2), ("e1", 1), ("f3", 3))
    }
    names = {id(ticket): name for name, ticket in tickets.items()}
    puppet.finish_all()
    assert [[names[id(ticket)] for ticket in batch.members] for batch in puppet.started[1:]] == [
        ["b1", "e1"],
        ["c0", "d2"],
        ["a3", "f3"],
    ]


def test_lower_levels_fill_the_room_left():
    """A batch is not sent half empty while a lower level waits: it is filled in order."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=4), QueueSettings(priority_levels=2))
    puppet.submit()
    low = puppet.submit(level=2)
    high = puppet.submit(level=1)
    puppet.finish()
    assert puppet.started[1].members == [high, low]


@pytest.mark.parametrize("level", [4, -1, 2**40])
def test_level_out_of_range_is_refused(level):
    """A priority above the range is an error of the request, not silently the default; the limit is named."""
    puppet = PuppetDriver(queue=QueueSettings(priority_levels=3))
    ticket = puppet.submit(level=level)
    assert ticket.state is TicketState.REFUSED
    assert puppet.refusals == [Refuse("bad_request", "priority", 3, level)]


@pytest.mark.parametrize("rows", [0, -3])
def test_zero_rows_are_refused(rows):
    """A ticket must bring at least one row, or batches would be formed of nothing."""
    puppet = PuppetDriver()
    puppet.submit(rows)
    assert puppet.refusals == [Refuse("bad_request", "rows", 1, rows)]


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize(
    ("settings", "bound", "limit"),
    [
        ({"max_queue_requests": 7}, "requests", 7),
        ({"max_queue_rows": 14}, "rows", 14),
        ({"max_queue_bytes": 700}, "bytes", 700),
    ],
)
def test_burst_of_ten_times_the_limit(settings, bound, limit, stage):
    """Limit L and a burst of 10 L with the slot busy: exactly L are accepted, staged or not, and the rest told which bound."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=4), QueueSettings(**settings), stage=stage)
    puppet.submit()
    tickets = [puppet.submit(2, payload_bytes=100) for _ in range(70)]
    assert sum(ticket.state is not TicketState.REFUSED for ticket in tickets) == 7
    assert {(refusal.reason, refusal.bound, refusal.limit, refusal.used) for refusal in puppet.refusals} == {
        ("queue_full", bound, limit, limit)
    }
    assert puppet.scheduler.snapshot(0).refused == {bound: 63}
    puppet.finish_all()
    assert puppet.scheduler.snapshot(0).answered == 8


def test_rows_count_not_requests():
    """A request of n rows takes n row slots; one that still fits is taken after a larger one was refused."""
    puppet = PuppetDriver(queue=QueueSettings(max_queue_rows=10))
    puppet.submit()
    states = [puppet.submit(rows).state for rows in (6, 5, 4, 1)]
    assert [state is TicketState.REFUSED for state in states] == [False, True, False, True]


def test_a_running_batch_does_not_count():
    """Room comes back when a batch starts, not when it ends."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=2), QueueSettings(max_queue_rows=2), executors=2)
    for _ in range(4):
        puppet.submit()
    assert puppet.refusals == []
    snapshot = puppet.scheduler.snapshot(0)
    assert (snapshot.running_rows, snapshot.waiting_rows) == (2, 2)


def test_request_larger_than_the_whole_queue_is_too_large():
    """What would not fit into an empty queue is the request's fault: no retry can help, so it is not called full."""
    puppet = PuppetDriver(queue=QueueSettings(max_queue_rows=10, max_queue_bytes=100))
    puppet.submit(11)
    puppet.submit(1, payload_bytes=101)
    assert puppet.refusals == [Refuse("too_large", "rows", 10, 11), Refuse("too_large", "bytes", 100, 101)]


def scheduler_with_reservation(rows=3, size=30, **queue):
    """A scheduler that holds one reservation."""
    scheduler = Scheduler(BatchingSettings(), QueueSettings(**queue))
    ticket = Ticket(rows=rows, payload_bytes=size)
    assert scheduler.reserve(ticket, 0) is None
    return scheduler, ticket


def test_reservation_holds_room():
    """A RESERVED ticket holds requests, rows and bytes, exactly like a waiting one."""
    scheduler, ticket = scheduler_with_reservation(max_queue_rows=4)
    assert ticket.state is TicketState.RESERVED
    assert scheduler.submit(Ticket(rows=2), 1) == Refuse("queue_full", "rows", 4, 3)
    assert scheduler.submit(Ticket(rows=1), 1) is None
    check_invariants(scheduler)


def test_submit_of_a_reservation_checks_only_the_difference():
    """Rows that turn out more than announced need room for the difference alone; fewer always fit."""
    scheduler, ticket = scheduler_with_reservation(max_queue_rows=4)
    ticket.rows = 4
    assert scheduler.submit(ticket, 5) is None
    assert (scheduler.waiting_rows, ticket.accepted_ns) == (4, 5)
    scheduler, ticket = scheduler_with_reservation(max_queue_rows=3)
    ticket.rows, ticket.payload_bytes = 1, 1
    assert scheduler.submit(ticket, 5) is None
    assert scheduler.snapshot(5).held_bytes == 1
    check_invariants(scheduler)


def test_refused_growth_releases_the_reservation():
    """A body that outgrew its announcement beyond the bound is refused and gives back all it held."""
    scheduler, ticket = scheduler_with_reservation(max_queue_rows=4)
    assert scheduler.submit(Ticket(rows=1), 1) is None
    ticket.rows = 4
    assert scheduler.submit(ticket, 5) == Refuse("queue_full", "rows", 4, 4)
    assert ticket.state is TicketState.REFUSED
    snapshot = scheduler.snapshot(5)
    assert (snapshot.held_requests, snapshot.held_rows, snapshot.held_bytes, snapshot.released) == (1, 1, 0, 1)
    check_invariants(scheduler)


def test_cancelled_reservation_gives_its_room_back():
    """A client that goes away while its body is read frees what was held, once."""
    scheduler, ticket = scheduler_with_reservation(max_queue_requests=1)
    assert scheduler.cancel(ticket, 1) is True
    assert scheduler.cancel(ticket, 1) is False
    assert ticket.state is TicketState.CANCELLED
    assert scheduler.submit(Ticket(), 2) is None
    check_invariants(scheduler)


def test_reserved_before_drain_is_still_taken():
    """What was let in before draining began is served; what comes after is not."""
    scheduler, ticket = scheduler_with_reservation()
    scheduler.drain(1)
    late = Ticket()
    assert scheduler.reserve(late, 1) == Refuse("draining", "draining", 0, 1)
    assert late.state is TicketState.REFUSED
    assert not scheduler.idle
    assert scheduler.submit(ticket, 2) is None
    assert len(scheduler.poll(2)) == 1


def test_snapshot_shows_levels_ages_and_reasons():
    """The figures of a snapshot are those of the moment: what waits per level, how old the oldest is, why batches went."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=8), QueueSettings(priority_levels=2, default_priority=2), stage=False)
    puppet.submit(3)
    puppet.clock.advance(ms=2)
    puppet.submit(2, payload_bytes=10)
    puppet.submit(1, level=1)
    snapshot = puppet.scheduler.snapshot(puppet.clock.advance(ms=5))
    assert [(level.level, level.tickets, level.rows) for level in snapshot.levels] == [(1, 1, 1), (2, 1, 2)]
    assert snapshot.oldest_wait_ns == 5_000_000
    assert (snapshot.waiting_requests, snapshot.waiting_rows, snapshot.waiting_bytes) == (2, 3, 10)
    assert (snapshot.running_batches, snapshot.running_requests, snapshot.running_rows) == (1, 1, 3)
    assert snapshot.batches["idle"] == 1


def test_a_reservation_grows_within_the_bound() -> None:
    """Bytes that were not announced count as they come; when there is no room for them the place is given back at once."""
    driver = PuppetDriver(queue=QueueSettings(max_queue_bytes=100))
    scheduler = driver.scheduler
    growing, other = Ticket(1, 0), Ticket(1, 30)
    assert scheduler.reserve(growing, 0) is None and scheduler.reserve(other, 0) is None
    for size, held in ((40, 70), (40, 70), (10, 70), (70, 100)):
        assert scheduler.grow(growing, size) is None
        assert scheduler.snapshot(0).waiting_bytes + scheduler.snapshot(0).reserved_bytes == held
        check_invariants(scheduler)
    refusal = scheduler.grow(growing, 71)
    assert refusal is not None and (refusal.reason, refusal.bound, refusal.limit) == ("queue_full", "bytes", 100)
    assert growing.state is TicketState.REFUSED and not scheduler.cancel(growing, 0)
    check_invariants(scheduler)
    refusal = scheduler.grow(other, 101)
    assert refusal is not None and refusal.reason == "too_large"
    check_invariants(scheduler)
    assert scheduler.idle
