"""What a batch that came back means for its members: answers and errors onto tickets, pieces rejoined, everything counted.

The only writer of `answer`, `answer_row` and `error` for tickets that ran. Tells nobody: the lane does, with what is returned here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from shoal.core.batch import Batch
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState
from shoal.engine.outcome import End, Outcome, Run, is_out_of_memory
from shoal.engine.recorder import Recorder
from shoal.errors import ShoalError

__all__ = ["Settler"]

_ANSWERED: Final = TicketState.ANSWERED
_FAILED: Final = TicketState.FAILED


class Settler:
    """Ends the batches of one scheduler. Every method returns the tickets that have ended by it, whole ones and rejoined ones."""

    def __init__(self, scheduler: Scheduler, stats: Recorder, join: Callable[[Sequence[tuple[Any, int, int]]], Any]) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._join = join

    def settle(self, batch: Batch, outcome: Outcome) -> Sequence[Ticket]:
        """A batch was run, well or badly."""
        if outcome.ends is None and not batch.cut:
            return self._settle_whole(batch, outcome)
        stats = self._stats
        if outcome.reruns:
            stats.reruns += outcome.reruns
            if outcome.cause is not None and not is_out_of_memory(outcome.cause):
                stats.bisections += 1
        stats.ran_alone += outcome.apart
        stats.out_of_memory += outcome.oom_runs
        typical = bool(outcome.runs) and outcome.cause is None and not (outcome.reruns or outcome.apart)
        ends = outcome.ends or _answered_all(batch, outcome)
        return self._settle_each(batch, ends, outcome.runs, outcome.done_ns, typical=typical)

    def settle_failed(self, batch: Batch, error: Exception, now_ns: int) -> Sequence[Ticket]:
        """A batch will not come back: all its members fail with `error`."""
        return self._settle_each(batch, [error] * len(batch.members), (), now_ns, typical=False)

    def _settle_whole(self, batch: Batch, outcome: Outcome) -> list[Ticket]:
        """The usual case: every member is whole and answered. The scheduler makes them ANSWERED."""
        answer = outcome.answer
        members = batch.members
        row = accepted_sum_ns = discarded = discarded_rows = 0
        for ticket in members:
            ticket.answer = answer
            ticket.answer_row = row
            row += ticket.rows
            accepted_sum_ns += ticket.accepted_ns
            if ticket.on_end is None:
                discarded += 1
                discarded_rows += ticket.rows
                accepted_sum_ns -= ticket.accepted_ns
        done_ns = outcome.done_ns
        self._scheduler.complete(batch, done_ns, all_answered=True)
        stats = self._stats
        stats.executed(outcome.runs)
        stats.succeeded(len(members) - discarded, accepted_sum_ns, batch.started_ns, done_ns, outcome.runs)
        if discarded:
            stats.discard(discarded, discarded_rows)
        return members

    def _settle_each(self, batch: Batch, ends: Sequence[End], runs: Sequence[Run], done_ns: int, *, typical: bool) -> list[Ticket]:
        """Members that end differently, or are pieces of larger tickets."""
        stats = self._stats
        stats.executed(runs)
        whole: list[Ticket] = []
        for ticket, end in zip(batch.members, ends, strict=True):
            if isinstance(end, Exception):
                ticket.error = end
                ticket.state = _FAILED
            else:
                ticket.answer, ticket.answer_row = end
                ticket.state = _ANSWERED
            parent = ticket.parent
            if parent is None:
                whole.append(ticket)
            elif parent.state >= _ANSWERED:  # cancelled, expired or failed, while this piece of it ran
                stats.discard(0, ticket.rows)
        joined = list(self._scheduler.complete(batch, done_ns, typical=typical))
        for parent in joined:
            self._join_parts(parent)
        if batch.cut:
            for ticket in batch.members:
                if ticket.parent is not None:
                    ticket.part_from_parent()
        ended = whole + joined
        wanted = [ticket for ticket in ended if ticket.on_end is not None]
        good = [ticket.accepted_ns for ticket in wanted if ticket.state is _ANSWERED]
        bad = [ticket.accepted_ns for ticket in wanted if ticket.state is _FAILED]
        stats.succeeded(len(good), sum(good), batch.started_ns, done_ns, runs)
        stats.failed(len(bad), sum(bad), done_ns)
        unwanted = [ticket.rows for ticket in ended if ticket.on_end is None]
        if unwanted:
            stats.discard(len(unwanted), sum(unwanted))
        return ended

    def _join_parts(self, parent: Ticket) -> None:
        """The one ending of a ticket that was cut: all pieces in order, or the first failure."""
        parts = parent.parts or []
        if parent.state is _FAILED:
            parent.error = next((part.error for part in parts if part.error is not None), None)
        elif parent.on_end is not None:
            try:
                parent.answer = self._join([(part.answer, part.answer_row, part.rows) for part in parts])
                parent.answer_row = 0
            except Exception as error:
                parent.state = _FAILED
                parent.error = error if isinstance(error, ShoalError) else ShoalError("internal error")
        for part in parts:
            part.answer = None  # their batches' outputs have been copied


def _answered_all(batch: Batch, outcome: Outcome) -> list[End]:
    ends: list[End] = []
    row = 0
    for ticket in batch.members:
        ends.append((outcome.answer, row))
        row += ticket.rows
    return ends
