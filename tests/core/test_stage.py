"""Late binding: the staged batch, recall and start, and executor accounting in either order of reports."""

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import BatchState
from shoal.core.decisions import Dispatch, Stage
from shoal.core.invariants import check_invariants
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState
from shoal.testing.puppet import PuppetDriver


def staged_scheduler(count=3, queue=None, **batching):
    """One executor busy, `count` tickets staged behind it: scheduler, running batch, staged batch, tickets."""
    scheduler = Scheduler(BatchingSettings(**batching), queue or QueueSettings(), stage=True)
    scheduler.submit(Ticket(), 0)
    running = scheduler.poll(0)[0].batch
    tickets = [Ticket() for _ in range(count)]
    for ticket in tickets:
        assert scheduler.submit(ticket, 1) is None
    [decision] = scheduler.poll(1)
    assert isinstance(decision, Stage)
    return scheduler, running, decision.batch, tickets


def test_staged_batch_is_formed_only_by_the_ready_rule():
    """While a window is open nothing is staged; when it ends the batch is."""
    puppet = PuppetDriver(BatchingSettings(max_delay_ms=5), stage=True)
    puppet.submit()
    puppet.advance(5)
    puppet.submit()
    assert puppet.staged is None
    puppet.advance(5)
    assert puppet.staged is not None
    assert puppet.staged.reason == "delay"


def test_at_most_one_batch_is_staged():
    """With two full batches waiting only one is staged; the other stays in the queue."""
    scheduler, _, staged, _ = staged_scheduler(count=8, max_batch_size=4)
    assert staged.rows == 4
    assert scheduler.poll(2) == []
    assert scheduler.snapshot(2).waiting_rows == 8


def test_staged_batch_grows_in_place():
    """A poll adds newcomers to the same batch object and says so once."""
    scheduler, _, staged, tickets = staged_scheduler()
    late = Ticket()
    scheduler.submit(late, 2)
    assert scheduler.wants_recall()
    assert scheduler.poll(2) == [Stage(staged)]
    assert staged.members == [*tickets, late]
    assert scheduler.poll(2) == []
    assert not scheduler.wants_recall()


def test_recall_puts_members_back_in_their_old_places():
    """After recall members are WAITING at the head in order; the next poll takes them first, with newcomers behind."""
    scheduler, _, staged, tickets = staged_scheduler()
    late = Ticket()
    scheduler.submit(late, 2)
    scheduler.recall(staged)
    assert {ticket.state for ticket in tickets} == {TicketState.WAITING}
    check_invariants(scheduler)
    [decision] = scheduler.poll(2)
    assert decision.batch.members == [*tickets, late]
    check_invariants(scheduler)


def test_full_staged_batch_need_not_be_recalled():
    """A full staged batch cannot change by newcomers of its own level."""
    scheduler, _, _, _ = staged_scheduler(count=4, max_batch_size=4)
    scheduler.submit(Ticket(), 2)
    assert not scheduler.wants_recall()


@pytest.mark.parametrize("recall", [False, True])
def test_higher_level_overtakes_a_staged_batch(recall):
    """A level 1 ticket that comes while level 2 is staged goes into the staged batch first, pushing the last one out."""
    queue = QueueSettings(priority_levels=2, default_priority=2)
    scheduler, running, staged, tickets = staged_scheduler(count=4, max_batch_size=4, queue=queue)
    urgent = Ticket(level=1)
    scheduler.submit(urgent, 2)
    assert scheduler.wants_recall()
    if recall:
        scheduler.recall(staged)
    [decision] = scheduler.poll(2)
    assert decision.batch.members == [urgent, *tickets[:3]]
    assert tickets[3].state is TicketState.WAITING
    check_invariants(scheduler)
    scheduler.complete(running, 3)
    scheduler.start(decision.batch, 3)
    check_invariants(scheduler)


def test_cancelled_member_leaves_the_staged_batch_at_once():
    """A staged ticket can still be cancelled; whoever holds the old member list keeps it whole."""
    scheduler, _, staged, tickets = staged_scheduler()
    before = staged.members
    assert scheduler.cancel(tickets[1], 2)
    assert staged.members == [tickets[0], tickets[2]]
    assert before == tickets
    assert staged.rows == 2
    check_invariants(scheduler)


def test_staged_batch_whose_members_all_leave_is_dissolved():
    """When the last member is cancelled nothing is staged, and the next arrival is staged anew."""
    scheduler, _, staged, tickets = staged_scheduler(count=1)
    assert scheduler.cancel(tickets[0], 2)
    assert scheduler.staged is None
    assert staged.state is BatchState.DONE
    scheduler.submit(Ticket(), 3)
    assert isinstance(scheduler.poll(3)[0], Stage)


@pytest.mark.parametrize("start_first", [False, True])
def test_start_and_complete_in_either_order(start_first):
    """Whichever the driver hears first, one batch runs afterwards, and the next poll stages rather than dispatches."""
    scheduler, running, staged, _ = staged_scheduler()
    if start_first:
        scheduler.start(staged, 2)
        scheduler.submit(Ticket(), 2)
        [decision] = scheduler.poll(2)
        assert isinstance(decision, Stage)
        scheduler.complete(running, 2)
        check_invariants(scheduler)
        assert scheduler.running == 1
        return
    scheduler.complete(running, 2)
    scheduler.start(staged, 2)
    scheduler.submit(Ticket(), 2)
    [decision] = scheduler.poll(2)
    assert isinstance(decision, Stage)
    assert scheduler.running == 1


def test_poll_with_a_free_slot_dispatches_the_staged_batch():
    """If nobody reported a start, a free slot turns the staged batch into a running one, grown by what came since."""
    scheduler, running, staged, tickets = staged_scheduler()
    late = Ticket()
    scheduler.submit(late, 2)
    scheduler.complete(running, 3)
    assert scheduler.poll(3) == [Dispatch(staged)]
    assert staged.members == [*tickets, late]
    assert staged.state is BatchState.RUNNING


def test_misuse_is_named():
    """Starting, recalling or completing the wrong batch raises instead of corrupting the counts."""
    scheduler, running, staged, _ = staged_scheduler()
    with pytest.raises(ValueError, match="staged"):
        scheduler.start(running, 2)
    with pytest.raises(ValueError, match="staged"):
        scheduler.recall(running)
    with pytest.raises(ValueError, match="running"):
        scheduler.complete(staged, 2)
    scheduler.complete(running, 2)
    with pytest.raises(ValueError, match="running"):
        scheduler.complete(running, 2)
    check_invariants(scheduler)


def test_cancel_of_a_running_or_ended_ticket_does_nothing():
    """A running ticket goes on (False) and still ends exactly once; an ended one stays as it is."""
    puppet = PuppetDriver()
    ticket = puppet.submit()
    assert not puppet.scheduler.cancel(ticket, 1)
    assert ticket.state is TicketState.RUNNING
    puppet.finish()
    assert not puppet.scheduler.cancel(ticket, 2)
    assert ticket.state is TicketState.ANSWERED
    snapshot = puppet.scheduler.snapshot(2)
    assert (snapshot.answered, snapshot.cancelled) == (1, 0)
