"""The conservation laws of a scheduler as one function, for tests, the simulator and a debug switch in production alike.

Reads private state on purpose and changes nothing. Costs O(everything held and running): not for the hot path.
"""

from __future__ import annotations

from shoal.core.batch import Batch, BatchState
from shoal.core.rules import FOREVER, Rules
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState


def violations(scheduler: Scheduler) -> list[str]:
    """Every law that does not hold, as sentences; an empty list is what is wanted.

    Conservation (accepted = reserved + waiting + staged + running + ended), sums equal to their parts, no ticket in two places,
    states that fit the place, bounds kept, order kept, batches of one signature within the limit, timers neither lost nor leaking.
    """
    found: list[str] = []

    def check(holds: bool, law: str) -> None:
        if not holds:
            found.append(law)

    s = scheduler
    rules, queue = s._rules, s._queue
    waiting = list(queue)
    staged = s._staged.members if s._staged else []
    running = [ticket for batch in s._running for ticket in batch.members]
    places = [*s._reserved, *waiting, *staged, *running]
    check(len({id(ticket) for ticket in places}) == len(places), "a ticket is in two places")
    check(all(ticket.state is TicketState.RESERVED for ticket in s._reserved), "a reserved ticket is not RESERVED")
    check(all(ticket.state is TicketState.STAGED for ticket in staged), "a staged ticket is not STAGED")

    held = [*waiting, *staged]
    parents = {ticket.parent for ticket in held if ticket.parent is not None}
    whole = [ticket for ticket in held if ticket.parent is None]
    check(parents <= set(s._splits), "a piece waits whose parent has ended")
    check(s._held_requests == len(s._reserved) + len(whole) + len(parents), "held requests differ from the tickets held")
    check(s._reserved_rows == sum(rows for rows, _ in s._reserved.values()), "reserved rows differ from their sum")
    check(s._reserved_bytes == sum(size for _, size in s._reserved.values()), "reserved bytes differ from their sum")
    check(s._held_rows == s._reserved_rows + sum(ticket.rows for ticket in held), "held rows differ from their sum")
    size = s._reserved_bytes + sum(ticket.payload_bytes for ticket in (*whole, *parents))
    check(s._held_bytes == size, "held bytes differ from their sum")
    found += queue.faults()

    check(s._held_requests <= max(rules.max_requests, s._held_then[0]), "more requests held than the bound")
    check(s._held_rows <= max(rules.max_rows, s._held_then[1]), "more rows held than the bound")
    check(s._held_bytes <= max(rules.max_bytes, s._held_then[2]), "more bytes held than the bound")

    batches = [*s._running, *([s._staged] if s._staged else [])]
    for batch in batches:
        check(bool(batch.members), "an empty batch")
        check(batch.rows == sum(ticket.rows for ticket in batch.members), "a batch miscounts its rows")
        check(all(ticket.signature == batch.signature for ticket in batch.members), "a batch of several signatures")
        wanted = BatchState.STAGED if batch is s._staged else BatchState.RUNNING
        check(batch.state is wanted, "a batch in the wrong state")
        if batch is not s._staged and batch.started_ns <= s._settings_since_ns:
            continue  # it was made under other settings
        check(batch.rows <= rules.limit_rows or len(batch.members) == 1, "a batch over its limit")
        check(len(batch.members) == 1 or _work(batch, rules) <= rules.max_cost, "a batch over its budget")
        check(not rules.single or len(batch.members) == 1, "requests batched where batching is off")
    check(s._running_rows == sum(batch.rows for batch in s._running), "running rows differ from their sum")

    for parent, split in s._splits.items():
        parts = parent.parts or []
        check(split.unstarted == sum(part.state in (TicketState.WAITING, TicketState.STAGED) for part in parts), "unstarted pieces")
        check(split.outstanding == sum(part.state < TicketState.ANSWERED for part in parts), "outstanding pieces")
        check(parent.state is (TicketState.WAITING if split.unstarted else TicketState.RUNNING), "a cut ticket in the wrong state")
    running_requests = sum(ticket.parent is None for ticket in running)
    running_requests += sum(not split.unstarted for split in s._splits.values())
    check(s._running_requests == running_requests, "running requests differ from the tickets running")
    ended = s._answered + s._failed + s._expired + s._cancelled + s._dropped + s._released
    check(s._admitted == s._held_requests + s._running_requests + ended, "accepted differs from what is here and what has ended")

    for level, counted in enumerate(s._level_held, start=1):
        own = [ticket for ticket in (*whole, *parents) if (ticket.level or rules.default_level) == level]
        reserved = [figures for ticket, figures in s._reserved.items() if (ticket.level or rules.default_level) == level]
        rows = sum(ticket.rows for ticket in held if (ticket.level or rules.default_level) == level)
        figures = [len(own) + len(reserved), rows + sum(rows for rows, _ in reserved)]
        figures.append(sum(ticket.payload_bytes for ticket in own) + sum(size for _, size in reserved))
        check(counted == figures, "a level's own sums differ from what is held")

    watched: list[Ticket] = [*whole, *parents]
    expiring = [ticket for ticket in watched if ticket.expiry_ns != FOREVER]
    check(s._timers.next_ns() == min((ticket.expiry_ns for ticket in expiring), default=FOREVER), "the next expiry is wrong")
    return found


def _work(batch: Batch, rules: Rules) -> float:
    """What a batch counts against the budget."""
    if rules.cost_unit == "tokens" and rules.padded:
        return max(ticket.length for ticket in batch.members) * batch.rows
    return sum(rules.cost_of(ticket) for ticket in batch.members)


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError naming every law that does not hold."""
    found = violations(scheduler)
    if found:
        raise AssertionError("; ".join(found))
