"""Requests larger than one batch: cut, run in order, one ending, all or nothing."""

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Refuse
from shoal.core.ticket import TicketState
from shoal.testing.puppet import PuppetDriver


def puppet_of_five(queue=None, **kwargs):
    """A puppet with a batch limit of 5 rows."""
    return PuppetDriver(BatchingSettings(max_batch_size=5), queue, **kwargs)


def test_case_9_split():
    """Limit 5, 12 rows: 5 + 5 + 2 in order, and the request ends once, when the last piece has come back."""
    puppet = puppet_of_five()
    ticket = puppet.submit(12)
    ended = [puppet.finish() for _ in range(3)]
    assert [batch.rows for batch in puppet.started] == [5, 5, 2]
    assert [(part.start_row, part.rows) for part in ticket.parts] == [(0, 5), (5, 5), (10, 2)]
    assert all(part.parent is ticket and part.payload is ticket.payload for part in ticket.parts)
    assert ended == [[], [], [ticket]]
    assert ticket.state is TicketState.ANSWERED
    assert puppet.scheduler.idle
    snapshot = puppet.scheduler.snapshot(0)
    assert (snapshot.accepted, snapshot.answered) == (1, 1)


def test_case_9_reject():
    """oversize = "reject": refused at once, naming the limit; the exact limit is taken."""
    puppet = PuppetDriver(BatchingSettings(max_batch_size=5, oversize="reject"))
    puppet.submit(12)
    puppet.submit(6)
    assert puppet.refusals == [Refuse("too_large", "batch", 5, 12), Refuse("too_large", "batch", 5, 6)]
    assert puppet.submit(5).state is TicketState.RUNNING


def test_last_piece_shares_its_batch():
    """The remainder of a cut request travels with others behind it."""
    puppet = puppet_of_five()
    puppet.submit()
    big = puppet.submit(7)
    small = puppet.submit(3)
    puppet.finish()
    puppet.finish()
    assert puppet.started[2].members == [big.parts[1], small]


def test_pieces_run_side_by_side_and_rejoin_in_any_order():
    """With three executors the pieces run together; whichever ends last ends the request."""
    puppet = puppet_of_five(executors=3)
    ticket = puppet.submit(12)
    first, second, third = puppet.running
    assert ticket.state is TicketState.RUNNING
    assert puppet.scheduler.outstanding(ticket) == ticket.parts
    assert puppet.finish(third) == []
    assert puppet.finish(first) == []
    assert puppet.scheduler.outstanding(ticket) == [ticket.parts[1]]
    assert puppet.finish(second) == [ticket]
    assert puppet.scheduler.outstanding(ticket) == []


def test_bounds_count_a_cut_request_once_and_whole():
    """One request, all its rows, all its bytes; all or nothing; rows come back piece by piece, the payload at the last."""
    puppet = puppet_of_five(QueueSettings(max_queue_requests=2, max_queue_rows=20))
    puppet.submit()
    ticket = puppet.submit(12, payload_bytes=1200)
    assert puppet.submit(9).state is TicketState.REFUSED
    assert puppet.refusals == [Refuse("queue_full", "rows", 20, 12)]
    held = []
    for _ in range(3):
        snapshot = puppet.scheduler.snapshot(0)
        held.append((snapshot.held_requests, snapshot.held_rows, snapshot.held_bytes))
        puppet.finish()
    assert held == [(1, 12, 1200), (1, 7, 1200), (1, 2, 1200)]
    assert ticket.state is TicketState.RUNNING
    assert puppet.scheduler.snapshot(0).held_bytes == 0


def test_cancel_removes_the_pieces_that_wait():
    """Cancelling while one piece runs: the rest never run, the request ends once, the running piece is discarded."""
    puppet = puppet_of_five(stage=True)
    ticket = puppet.submit(12)
    assert ticket.state is TicketState.WAITING
    assert puppet.scheduler.cancel(ticket, 1)
    assert ticket.state is TicketState.CANCELLED
    assert [part.state for part in ticket.parts] == [TicketState.RUNNING, TicketState.CANCELLED, TicketState.CANCELLED]
    assert puppet.finish() == []
    assert len(puppet.started) == 1
    snapshot = puppet.scheduler.snapshot(1)
    assert (snapshot.cancelled, snapshot.answered, snapshot.held_rows) == (1, 0, 0)
    assert not puppet.scheduler.cancel(ticket, 2)


def test_cancel_of_a_piece_means_its_request():
    """Whoever holds a piece cancels the whole."""
    puppet = puppet_of_five()
    ticket = puppet.submit(12)
    assert puppet.scheduler.cancel(ticket.parts[2], 1)
    assert ticket.state is TicketState.CANCELLED


def test_expiry_of_a_cut_request():
    """The request expires once, with all the pieces that wait; what runs goes on and counts no more."""
    puppet = puppet_of_five(QueueSettings(default_timeout_ms=10))
    ticket = puppet.submit(12)
    puppet.advance(10)
    assert puppet.expired == [ticket]
    assert puppet.finish() == []
    assert len(puppet.started) == 1
    assert puppet.scheduler.idle


def test_no_expiry_once_all_pieces_run():
    """When the last piece has started the request is running and its deadline is past caring."""
    puppet = puppet_of_five(QueueSettings(default_timeout_ms=10), executors=3)
    ticket = puppet.submit(12)
    puppet.advance(50)
    assert puppet.expired == []
    puppet.finish_all()
    assert ticket.state is TicketState.ANSWERED


def test_failed_piece_fails_the_whole_once():
    """A piece fails: the request fails at once, waiting pieces are dropped, neighbours in the same batch are answered."""
    puppet = puppet_of_five()
    ticket = puppet.submit(12)
    neighbour = puppet.submit(1)
    first = ticket.parts[0]
    assert puppet.finish(failed=(first,)) == [ticket]
    assert ticket.state is TicketState.FAILED
    assert neighbour.state is TicketState.RUNNING
    assert puppet.started[1].members == [neighbour]
    puppet.finish_all()
    snapshot = puppet.scheduler.snapshot(0)
    assert (snapshot.failed, snapshot.answered) == (1, 1)


def test_failed_piece_while_others_run():
    """Other pieces that run when one fails end nothing a second time."""
    puppet = puppet_of_five(executors=3)
    ticket = puppet.submit(12)
    first, second, third = puppet.running
    assert puppet.finish(second, failed=(ticket.parts[1],)) == [ticket]
    assert puppet.finish(first) == []
    assert puppet.finish(third, failed=(ticket.parts[2],)) == []
    snapshot = puppet.scheduler.snapshot(0)
    assert (snapshot.failed, snapshot.answered, snapshot.running_requests) == (1, 0, 0)


@pytest.mark.parametrize("rows", [4, 5, 6, 10, 11])
def test_sizes_around_the_limit(rows):
    """limit - 1, limit, limit + 1 and multiples: no row lost, no batch over the limit, none empty."""
    puppet = puppet_of_five()
    ticket = puppet.submit(rows)
    puppet.finish_all()
    assert sum(batch.rows for batch in puppet.started) == rows
    assert all(0 < batch.rows <= 5 for batch in puppet.started)
    assert (ticket.parts is None) == (rows <= 5)
    assert ticket.state is TicketState.ANSWERED


def test_delayed_cut_request_keeps_its_pieces_in_order():
    """With timeout_action "delay" the waiting pieces move behind the others together and in order."""
    puppet = puppet_of_five(QueueSettings(default_timeout_ms=10, timeout_action="delay"))
    puppet.submit()
    big = puppet.submit(12)
    puppet.advance(10)
    fresh = puppet.submit(5)
    puppet.finish_all()
    assert [batch.members for batch in puppet.started[1:]] == [[fresh], *[[part] for part in big.parts]]
