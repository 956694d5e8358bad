"""The rules of the fixed window: when a batch starts, how large it is, and why."""

import pytest

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.testing.puppet import PuppetDriver

MS = 1_000_000


def driver(executors=1, stage=False, queue=None, **batching):
    """A puppet with these batching settings."""
    return PuppetDriver(BatchingSettings(**batching), queue or QueueSettings(), executors=executors, stage=stage)


def started(puppet):
    """Rows and reason of every batch that ran."""
    return [(batch.rows, batch.reason) for batch in puppet.started]


def test_lone_request_starts_at_once_without_a_window():
    """With max_delay 0 and a free slot a request waits for nobody, and no timer is left behind."""
    puppet = driver()
    puppet.submit()
    assert started(puppet) == [(1, "idle")]
    assert puppet.scheduler.next_wakeup_ns() is None


def test_case_13_what_queued_behind_a_running_batch_goes_together():
    """Window 0, a slow model, 5 requests at once: 1 then 4, not 1+1+1+1+1."""
    puppet = driver()
    for _ in range(5):
        puppet.submit()
    puppet.advance(100)
    puppet.finish()
    assert started(puppet) == [(1, "idle"), (4, "idle")]


def test_case_13_with_a_staged_batch():
    """The same with staging: the staged batch grows to all four before it starts."""
    puppet = driver(stage=True)
    for _ in range(5):
        puppet.submit()
    puppet.finish()
    assert started(puppet) == [(1, "idle"), (4, "idle")]


def test_window_counts_from_acceptance():
    """The batch starts exactly max_delay after the oldest was accepted, with all that came meanwhile."""
    puppet = driver(max_delay_ms=5)
    first = puppet.submit()
    puppet.advance(3)
    puppet.submit()
    assert puppet.scheduler.next_wakeup_ns() == first.accepted_ns + 5 * MS
    puppet.advance(1.999999)
    assert started(puppet) == []
    puppet.advance(0.000001)
    assert started(puppet) == [(2, "delay")]
    assert puppet.started[0].started_ns == first.accepted_ns + 5 * MS


def test_window_that_ended_behind_a_running_batch_is_over():
    """Time spent behind a running batch counts: no second window begins when the slot becomes free."""
    puppet = driver(max_delay_ms=5)
    puppet.submit()
    puppet.advance(5)
    puppet.submit()
    puppet.advance(20)
    puppet.finish()
    assert started(puppet) == [(1, "delay"), (1, "delay")]


def test_a_full_batch_never_waits():
    """The row that fills the batch starts it, and the rest begins a window of its own."""
    puppet = driver(max_delay_ms=1000, max_batch_size=4, executors=2)
    for _ in range(5):
        puppet.submit()
    assert started(puppet) == [(4, "full")]
    assert puppet.scheduler.next_wakeup_ns() == 1000 * MS


def test_a_request_is_never_divided_to_fill_a_batch():
    """3 + 3 rows with a limit of 4: the second does not fit, so the first cannot grow and goes at once, whole."""
    puppet = driver(max_delay_ms=1000, max_batch_size=4)
    puppet.submit(3)
    assert started(puppet) == []
    puppet.submit(3)
    assert started(puppet) == [(3, "shape")]
    puppet.advance(1000)
    puppet.finish()
    assert started(puppet) == [(3, "shape"), (3, "delay")]


def test_another_signature_closes_the_batch():
    """A, A, B, A: the batch is A A at once, since it cannot grow; order is kept."""
    puppet = driver(max_delay_ms=1000, executors=4)
    for signature in "AA":
        puppet.submit(signature=signature)
    assert started(puppet) == []
    puppet.submit(signature="B")
    puppet.submit(signature="A")
    assert [(batch.signature, batch.rows, batch.reason) for batch in puppet.started] == [("A", 2, "shape"), ("B", 1, "shape")]
    puppet.advance(1000)
    assert puppet.started[-1].signature == "A"


def test_window_opens_again_when_the_other_signature_leaves():
    """After the ticket that closed the batch is cancelled, the batch may grow again and waits for its window."""
    puppet = driver(max_delay_ms=10)
    puppet.submit(signature="X", poll=False)
    puppet.advance(10)
    puppet.submit(signature="A")
    other = puppet.submit(signature="B")
    assert puppet.scheduler.cancel(other, puppet.clock.now_ns)
    puppet.finish()
    assert len(puppet.started) == 1
    puppet.advance(10)
    assert [(batch.signature, batch.reason) for batch in puppet.started] == [("X", "delay"), ("A", "delay")]


def test_reorder_passes_over_other_signatures():
    """With reorder A, B, A, B goes as AA and BB; the head is always in the next batch."""
    puppet = driver(reorder=True)
    puppet.submit(signature="run")
    for signature in "ABAB":
        puppet.submit(signature=signature)
    puppet.finish_all()
    assert [(batch.signature, batch.rows) for batch in puppet.started] == [("run", 1), ("A", 2), ("B", 2)]


def test_reorder_full_batch_of_another_signature_does_not_wait():
    """A full batch of B starts while the head's own window is open; the head is not late for it."""
    puppet = driver(reorder=True, max_delay_ms=10, max_batch_size=2, executors=2)
    puppet.submit(signature="A")
    puppet.submit(signature="B")
    puppet.submit(signature="B")
    assert [(batch.signature, batch.reason) for batch in puppet.started] == [("B", "full")]
    puppet.advance(10)
    assert [(batch.signature, batch.reason) for batch in puppet.started] == [("B", "full"), ("A", "delay")]
    assert puppet.started[1].started_ns == 10 * MS


def test_preferred_size_is_sent_exactly():
    """A preferred size that is reached goes at once and exactly; what is above it waits."""
    puppet = driver(max_delay_ms=100, preferred_batch_sizes=(4, 8), max_batch_size=16)
    for _ in range(3):
        puppet.submit()
    assert started(puppet) == []
    puppet.submit()
    assert started(puppet) == [(4, "preferred")]
    for _ in range(9):
        puppet.submit()
    puppet.finish()
    assert started(puppet)[-1] == (8, "preferred")
    puppet.finish()
    assert len(puppet.started) == 2
    puppet.advance(100)
    assert started(puppet)[-1] == (1, "delay")


def test_preferred_size_yields_to_an_old_head():
    """Once the oldest has waited max_delay, everything up to the limit goes, not only the preferred size."""
    puppet = driver(max_delay_ms=10, preferred_batch_sizes=(4,), max_batch_size=16)
    puppet.submit()
    puppet.advance(10)
    for _ in range(6):
        puppet.submit()
    puppet.advance(10)
    puppet.finish()
    assert started(puppet) == [(1, "delay"), (6, "delay")]


def test_next_that_would_pass_the_largest_preferred_size():
    """3 rows pending, preferred 4, next brings 2: none can be hit, so the 3 go at once."""
    puppet = driver(max_delay_ms=100, preferred_batch_sizes=(4,), max_batch_size=16)
    puppet.submit(3)
    puppet.submit(2)
    assert started(puppet) == [(3, "shape")]


def test_pending_above_the_largest_preferred_size_cannot_grow():
    """A single request larger than every preferred size goes at once."""
    puppet = driver(max_delay_ms=100, preferred_batch_sizes=(4,), max_batch_size=16)
    puppet.submit(5)
    assert [batch.rows for batch in puppet.started] == [5]


def test_preferred_sizes_mean_nothing_without_a_window():
    """With max_delay 0 all that waits goes together, whatever is preferred."""
    puppet = driver(preferred_batch_sizes=(4,), max_batch_size=16)
    for _ in range(7):
        puppet.submit()
    puppet.finish()
    assert started(puppet) == [(1, "idle"), (6, "idle")]


@pytest.mark.parametrize("size", [0, 1])
def test_no_batching(size):
    """max_batch_size 0 and 1: one request at a time, in order, without waiting for a window."""
    puppet = driver(max_batch_size=size, max_delay_ms=1000)
    tickets = [puppet.submit() for _ in range(3)]
    puppet.finish_all()
    assert [batch.members for batch in puppet.started] == [[ticket] for ticket in tickets]


def test_without_batching_a_request_of_many_rows_is_not_cut():
    """max_batch_size 0 means that the model has no batch dimension: a request is run whole."""
    puppet = driver(max_batch_size=0)
    ticket = puppet.submit(50)
    assert puppet.started[0].members == [ticket]


def test_several_slots_fill_one_after_the_other():
    """With three slots and a backlog of ten, full batches start in all of them in order."""
    puppet = driver(executors=3, max_batch_size=3, max_delay_ms=1)
    for _ in range(10):
        puppet.submit(poll=False)
    puppet.poll()
    assert started(puppet) == [(3, "full")] * 3


def test_drain_flushes_without_windows_and_refuses_new():
    """After drain what waits goes at once, newcomers are refused, and idle says when all is over."""
    puppet = driver(max_delay_ms=1000)
    puppet.submit()
    puppet.scheduler.drain(puppet.clock.now_ns)
    puppet.submit()
    assert started(puppet) == [(1, "drain")]
    assert [refusal.reason for refusal in puppet.refusals] == ["draining"]
    assert not puppet.scheduler.idle
    puppet.finish()
    assert puppet.scheduler.idle


def test_deadline_inside_the_window_starts_the_batch_in_time():
    """A request that would expire before its window ends starts early enough to be answered, going by what batches took."""
    puppet = driver(max_delay_ms=100)
    puppet.submit()
    puppet.advance(100)
    puppet.advance(8)
    puppet.finish()  # a batch took 8 ms
    puppet.submit(timeout_ms=50)
    puppet.advance(100)
    assert puppet.started[1].reason == "deadline"
    assert puppet.started[1].started_ns - puppet.started[1].members[0].accepted_ns == 40 * MS
    assert puppet.expired == []


def test_deadline_inside_the_window_before_anything_ran():
    """Nobody knows how long a batch takes: a deadline inside the window means now, one outside changes nothing."""
    puppet = driver(max_delay_ms=100, executors=2)
    puppet.submit(timeout_ms=500)
    assert started(puppet) == []
    puppet.submit(timeout_ms=50)
    assert started(puppet) == [(2, "deadline")]


def test_no_timer_in_the_past_while_slots_are_busy():
    """While nothing can be done the scheduler asks for no poll except for expiries."""
    puppet = driver(max_delay_ms=5)
    puppet.submit()
    puppet.advance(5)
    puppet.submit()
    puppet.advance(50)
    assert puppet.scheduler.next_wakeup_ns() is None
    puppet.submit(timeout_ms=7)
    assert puppet.scheduler.next_wakeup_ns() == puppet.clock.now_ns + 7 * MS
