"""Random interleavings of everything a driver may do, against a naive model that recounts and re-walks everything each time."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Dispatch, Expire, Stage
from shoal.core.invariants import violations
from shoal.core.rules import FOREVER
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState

MS = 1_000_000
WAITS = (TicketState.WAITING, TicketState.STAGED)


@dataclass
class Naive:
    """What should be so, in the simplest words: one list of what was accepted, in order of acceptance."""

    limit: int
    delay_ns: int
    preferred: tuple[int, ...]
    levels: int
    max_requests: int
    max_rows: int
    accepted: list[Ticket] = field(default_factory=list)
    reserved: list[tuple[Ticket, int]] = field(default_factory=list)
    draining: bool = False

    def held(self):
        """Requests and rows that the bounds count."""
        rows = [ticket.rows for ticket in self.queue()] + [rows for _, rows in self.reserved]
        return len({id(ticket.parent or ticket) for ticket in self.queue()}) + len(self.reserved), sum(rows)

    def queue(self):
        """Tickets and pieces that have not started, in the order in which they must start."""
        pieces = [piece for ticket in self.accepted for piece in (ticket.parts or [ticket]) if piece.state in WAITS]
        return sorted(pieces, key=lambda piece: piece.level or 1)

    def fits(self, rows, more_requests=1):
        """Whether a ticket of so many more rows must be accepted."""
        requests, held = self.held()
        return requests + more_requests <= self.max_requests and (rows <= 0 or held + rows <= self.max_rows)

    def batch(self, now_ns, latest_start_ns):
        """The batch that must start now if a slot is free, or None."""
        queue = self.queue()
        if not queue:
            return None
        run = []
        best = 0
        stopped = False
        largest = max(self.preferred, default=self.limit)
        for piece in queue:
            rows = sum(member.rows for member in run)
            if run and (piece.signature != run[0].signature or rows + piece.rows > self.limit):
                stopped = True
                break
            if run and self.preferred and rows + piece.rows > largest and not best:
                best = len(run)
            run.append(piece)
            if rows + piece.rows in self.preferred:
                best = len(run)
        rows = sum(member.rows for member in run)
        old = now_ns >= min(piece.accepted_ns for piece in queue) + self.delay_ns
        if self.draining or self.delay_ns == 0 or old:
            return run
        if best:
            return run[:best]
        return run if stopped or rows >= largest or now_ns >= latest_start_ns else None


class Machine(RuleBasedStateMachine):
    """The scheduler beside the naive model."""

    @initialize(
        limit=st.integers(1, 6),
        delay_ms=st.sampled_from([0, 0, 5, 20]),
        preferred=st.sets(st.integers(2, 6), max_size=2),
        levels=st.integers(1, 3),
        executors=st.sampled_from([1, 1, 2, 3]),
        stage=st.booleans(),
        bounds=st.sampled_from([(1, 20), (4, 8), (12, 20), (30, 40)]),
        timeout_ms=st.sampled_from([None, None, 15]),
    )
    def begin(self, limit, delay_ms, preferred, levels, executors, stage, bounds, timeout_ms):
        """A scheduler of random settings."""
        preferred = tuple(size for size in preferred if size <= limit)
        self.naive = Naive(limit, delay_ms * MS, preferred if delay_ms else (), levels, *bounds)
        self.scheduler = Scheduler(
            BatchingSettings(max_batch_size=limit, max_delay_ms=delay_ms, preferred_batch_sizes=preferred),
            QueueSettings(
                max_queue_requests=bounds[0], max_queue_rows=bounds[1], priority_levels=levels, default_timeout_ms=timeout_ms
            ),
            executors=executors,
            stage=stage,
        )
        self.timeout_ns = FOREVER if timeout_ms is None else timeout_ms * MS
        self.executors = executors
        self.stage = stage
        self.now_ns = 1000
        self.running = []
        self.staged = None
        self.all = []
        self.ended = {}

    def end(self, tickets):
        """Every ending is recorded once."""
        for ticket in tickets:
            assert id(ticket) not in self.ended, "a ticket ended twice"
            assert ticket.state >= TicketState.ANSWERED
            self.ended[id(ticket)] = ticket.state

    def judge(self, refusal, ticket, fits):
        """Accepted exactly if the model says so."""
        assert (refusal is None) == fits
        if refusal is not None:
            assert ticket.state is TicketState.REFUSED
            self.end([ticket])

    @rule(count=st.integers(2, 6), rows=st.integers(1, 2), signature=st.sampled_from("AAAB"), level=st.integers(0, 3))
    def burst(self, count, rows, signature, level):
        """Several small tickets at once."""
        for _ in range(count):
            self.arrive(rows, signature, level, None, False, 1)

    @rule(
        rows=st.integers(1, 14),
        signature=st.sampled_from("AAAB"),
        level=st.integers(0, 3),
        timeout_ms=st.sampled_from([None, None, 0, 3, 8, 50]),
        reserve=st.booleans(),
        size=st.integers(0, 5),
    )
    def arrive(self, rows, signature, level, timeout_ms, reserve, size):
        """A ticket comes, at once or through a reservation."""
        deadline_ns = None if timeout_ms is None else self.now_ns + timeout_ms * MS
        ticket = Ticket(rows, size, signature, object(), None, deadline_ns, min(level, self.naive.levels))
        self.all.append(ticket)
        fits = not self.naive.draining and self.naive.fits(rows) and rows <= self.naive.max_rows
        if reserve:
            self.judge(self.scheduler.reserve(ticket, self.now_ns), ticket, fits)
            if fits:
                self.naive.reserved.append((ticket, rows))
            return
        self.judge(self.scheduler.submit(ticket, self.now_ns), ticket, fits)
        if fits:
            self.accepted(ticket)

    def accepted(self, ticket):
        """The model takes note; the effective expiry is the smaller of both."""
        self.naive.accepted.append(ticket)
        own_ns = FOREVER if ticket.deadline_ns is None else ticket.deadline_ns
        assert ticket.expiry_ns == min(own_ns, self.now_ns + self.timeout_ns if self.timeout_ns != FOREVER else FOREVER)

    @precondition(lambda self: self.naive.reserved)
    @rule(which=st.integers(0, 999), growth=st.integers(-3, 3))
    def submit_reserved(self, which, growth):
        """A reserved ticket's body is read and has other rows than announced."""
        ticket, rows = self.naive.reserved[which % len(self.naive.reserved)]
        ticket.rows = max(1, rows + growth)
        fits = self.naive.fits(ticket.rows - rows, 0) and ticket.rows <= self.naive.max_rows
        self.naive.reserved.remove((ticket, rows))
        self.judge(self.scheduler.submit(ticket, self.now_ns), ticket, fits)
        if fits:
            self.accepted(ticket)

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 999), recall=st.booleans())
    def cancel(self, which, recall):
        """Anybody may be cancelled at any time; it works exactly while the ticket has not started."""
        ticket = self.all[-1 - which % min(20, len(self.all))]
        leaves = ticket.state in (TicketState.RESERVED, *WAITS)
        if recall and self.staged is not None:
            self.recall()
        assert self.scheduler.cancel(ticket, self.now_ns) is leaves
        self.naive.reserved = [entry for entry in self.naive.reserved if entry[0] is not ticket]
        if leaves:
            assert ticket.state is TicketState.CANCELLED
            self.end([ticket])
        self.staged = self.scheduler.staged

    @rule(ms=st.sampled_from([0, 1, 2, 5, 10, 30]))
    def wait(self, ms):
        """Time passes without anybody polling."""
        self.now_ns += ms * MS

    @rule()
    def wait_for_wakeup(self):
        """The wake-up is exact: a nanosecond earlier nothing is due, at that time something is."""
        self.poll()
        wakeup_ns = self.scheduler.next_wakeup_ns()
        if wakeup_ns is not None:
            assert wakeup_ns > self.now_ns, "a wake-up in the past after a poll"
            self.now_ns = wakeup_ns - 1
            assert self.scheduler.poll(self.now_ns) == []
            self.now_ns = wakeup_ns
            assert self.poll() > 0

    @rule(recall=st.booleans())
    def poll_now(self, recall):
        """A poll, with or without taking the staged batch back first."""
        if recall and self.staged is not None:
            self.recall()
        self.poll()

    def recall(self):
        """Members wait again."""
        members = self.staged.members
        self.scheduler.recall(self.staged)
        assert all(member.state is TicketState.WAITING for member in members)
        self.staged = None

    def poll(self):
        """Compare every decision with the model, in order; returns how many there were."""
        now_ns = self.now_ns
        due = [ticket for ticket in self.naive.accepted if ticket.state in WAITS and ticket.expiry_ns <= now_ns]
        order = self.naive.queue()
        held_back = self.staged is not None
        decisions = self.scheduler.poll(now_ns)
        todo = list(decisions)
        expired = todo.pop(0).tickets if todo and isinstance(todo[0], Expire) else []
        assert {id(ticket) for ticket in expired} == {id(ticket) for ticket in due}
        assert [ticket.expiry_ns for ticket in expired] == sorted(ticket.expiry_ns for ticket in expired)
        self.end(expired)
        gone = {id(piece) for ticket in due for piece in (ticket.parts or [ticket])}
        order = [piece for piece in order if id(piece) not in gone]
        for decision in todo:
            batch = decision.batch
            assert isinstance(decision, Dispatch | Stage)
            count = len(batch.members)
            assert batch.members == order[:count], "not the head of the queue, in order"
            assert sum(member.rows for member in batch.members) == batch.rows <= self.naive.limit
            if not held_back:
                self.expect(batch.members, order)
            held_back = False
            order = order[count:]
            if isinstance(decision, Dispatch):
                self.running.append(batch)
                self.staged = None if self.staged is batch else self.staged
            else:
                self.staged = batch
        self.staged = self.scheduler.staged
        free = self.executors - len(self.running)
        assert free >= 0 or not any(isinstance(decision, Dispatch) for decision in todo)
        if free > 0 or (self.stage and self.staged is None):
            assert self.naive.batch(now_ns, self.latest_ns()) is None, "a batch is due and was not formed"
        return len(decisions)

    def latest_ns(self):
        """The latest start as the scheduler sees it (how long batches take is not the model's business)."""
        return self.scheduler._composer._latest_start_ns() if self.naive.delay_ns else FOREVER

    def expect(self, members, order):
        """The batch is the one the naive walk gives for the queue as it was (deadlines may only make it larger and earlier)."""
        states = [piece.state for piece in order]
        for piece in order:
            piece.state = TicketState.WAITING
        exact = self.naive.batch(self.now_ns, FOREVER)
        early = self.naive.batch(self.now_ns, 0)
        for piece, state in zip(order, states, strict=True):
            piece.state = state
        assert members in (exact, early)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999), staged_starts=st.booleans(), started_first=st.booleans(), fail=st.booleans())
    def finish(self, which, staged_starts, started_first, fail):
        """A batch ends; a staged one may have started on its executor, reported before or after."""
        batch = self.running.pop(which % len(self.running))
        starts = staged_starts and self.staged is not None
        if starts and started_first:
            self.start()
        for index, member in enumerate(batch.members):
            member.state = TicketState.FAILED if fail and index == 0 else TicketState.ANSWERED
        ended = self.scheduler.complete(batch, self.now_ns)
        assert all(ticket.parts for ticket in ended)
        self.end([member for member in batch.members if member.parent is None])
        self.end(ended)
        if starts and not started_first and self.scheduler.staged is not None:
            self.start()
        self.staged = self.scheduler.staged

    def start(self):
        """The staged batch runs."""
        self.scheduler.start(self.staged, self.now_ns)
        self.running.append(self.staged)
        self.staged = None

    @rule(chance=st.integers(0, 19))
    def drain(self, chance):
        """Rarely: nothing new from here on."""
        if chance == 0:
            self.scheduler.drain(self.now_ns)
            self.naive.draining = True

    @invariant()
    def laws(self):
        """Conservation, sums, places, bounds; and the model's own count of what is held."""
        if not hasattr(self, "scheduler"):
            return
        assert violations(self.scheduler) == []
        snapshot = self.scheduler.snapshot(self.now_ns)
        assert (snapshot.held_requests, snapshot.held_rows) == self.naive.held()

    def teardown(self):
        """Everything accepted ends, and exactly once."""
        if not hasattr(self, "scheduler"):
            return
        for ticket, _ in self.naive.reserved:
            assert self.scheduler.cancel(ticket, self.now_ns)
            self.end([ticket])
        self.naive.reserved.clear()
        self.scheduler.drain(self.now_ns)
        self.naive.draining = True
        for _ in range(1000):
            self.poll()
            if not self.running:
                break
            batch = self.running.pop()
            ended = self.scheduler.complete(batch, self.now_ns)
            self.end([member for member in batch.members if member.parent is None])
            self.end(ended)
            if self.scheduler.staged is not None:
                self.staged = self.scheduler.staged
                self.start()
        assert self.scheduler.idle
        assert {id(ticket) for ticket in self.all} == set(self.ended)
        assert violations(self.scheduler) == []


class TestScheduler(Machine.TestCase):
    """Runs the machine; Hypothesis looks for short counterexamples."""

    settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def choose(draw, weights):
    """One of the keys, by weight."""
    return draw.choices(list(weights), list(weights.values()))[0]


@pytest.mark.parametrize("seed", range(120))
def test_long_random_walks(seed):
    """The same machine driven by plain dice, which keep its queue full for hundreds of steps in every kind of setting."""
    draw = random.Random(seed)
    machine = Machine()
    limit = draw.randint(1, 6)
    machine.begin(
        limit=limit,
        delay_ms=draw.choice([0, 5, 20]),
        preferred={draw.randint(2, 6) for _ in range(draw.randint(0, 2))},
        levels=draw.randint(1, 3),
        executors=draw.choice([1, 1, 2, 3]),
        stage=draw.random() < 0.5,
        bounds=draw.choice([(4, 8), (12, 20), (30, 40)]),
        timeout_ms=draw.choice([None, None, 15]),
    )
    signatures = draw.choice(["A", "AAAB", "AB"])
    largest = draw.choice([1, 3, 14])
    for _ in range(300):
        match choose(draw, {"arrive": 9, "poll": 5, "wait": 3, "wakeup": 2, "finish": 3, "cancel": 1, "submit": 1}):
            case "arrive":
                timeout_ms = draw.choice([None, None, None, 0, 3, 8, 50])
                reserve = draw.random() < 0.15
                machine.arrive(draw.randint(1, largest), draw.choice(signatures), draw.randint(0, 3), timeout_ms, reserve, 1)
            case "poll":
                machine.poll_now(draw.random() < 0.5)
            case "wait":
                machine.wait(draw.choice([0, 1, 2, 5, 10]))
            case "wakeup":
                machine.wait_for_wakeup()
            case "finish" if machine.running:
                machine.finish(draw.randrange(99), draw.random() < 0.7, draw.random() < 0.5, draw.random() < 0.1)
            case "cancel" if machine.all:
                machine.cancel(draw.randrange(99), draw.random() < 0.5)
            case "submit" if machine.naive.reserved:
                machine.submit_reserved(draw.randrange(99), draw.randint(-2, 2))
        machine.laws()
    machine.teardown()
