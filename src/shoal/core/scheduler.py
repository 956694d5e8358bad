"""The scheduler of one model: a pure machine from (event, time) to decisions. See the class for the contract.

Bounds, states and executor accounting live here; the order of waiting tickets in `queue`, the question whether a batch may start in
`policy`, deadlines in `expiry`, tickets larger than one batch in `split`. No clock, no I/O, no thread, no log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.batch import REASONS, Batch, BatchState
from shoal.core.composer import Composer
from shoal.core.decisions import Decision, Dispatch, Drop, Expire, Refuse, Stage
from shoal.core.expiry import ExpiryTimers
from shoal.core.fixed import FixedComposer
from shoal.core.latency import LatencyModel
from shoal.core.ranked import RankedComposer
from shoal.core.rules import FOREVER, Rules
from shoal.core.snapshot import Snapshot, take_snapshot
from shoal.core.split import Split, cut
from shoal.core.ticket import Ticket, TicketState

_NEW: Final = TicketState.NEW
_RESERVED: Final = TicketState.RESERVED
_WAITING: Final = TicketState.WAITING
_STAGED: Final = TicketState.STAGED
_RUNNING: Final = TicketState.RUNNING
_ANSWERED: Final = TicketState.ANSWERED
_REFUSED: Final = TicketState.REFUSED
_EXPIRED: Final = TicketState.EXPIRED
_CANCELLED: Final = TicketState.CANCELLED
_FAILED: Final = TicketState.FAILED
_DROPPED: Final = TicketState.DROPPED
_B_STAGED: Final = BatchState.STAGED
_B_RUNNING: Final = BatchState.RUNNING
_B_DONE: Final = BatchState.DONE
_NO_TICKETS: Final[Sequence[Ticket]] = ()


class Scheduler:
    """One model's tickets between acceptance and their endings.

    All times are integer nanoseconds of one monotonic clock that the caller owns. No method blocks, raises for a full queue, or
    calls anything of the caller's. Every ticket that was accepted ends exactly once: by `complete` (ANSWERED/FAILED, set by the
    engine through `complete`), `Expire` (EXPIRED) or `cancel` (CANCELLED).

    A batch starts when an executor is free and it is full, or its oldest member has waited `max_delay` since it was accepted, or
    waiting longer would miss a deadline; with `max_delay_ms = 0`, whenever an executor is free and something waits.

    - Bounds count RESERVED, WAITING and STAGED tickets, exactly, in requests, rows and bytes. A running batch no longer counts.
    - Level 1 goes first; 0 means the default level. Within a level first in, first out.
    - With `stage`, at most one further batch is formed while every executor is busy. Until it starts it may grow, lose members or
      be overtaken. A driver that has handed it to another thread takes it back (`recall`) before it calls `poll` or `cancel`; if it
      cannot, because an executor has begun, it calls `start` first. `wants_recall` says whether taking it back can change anything.
    - `complete` and `start` may be reported in either order: an executor counts as busy once for every running batch.
    - A ticket of more rows than `max_batch_size` is cut into parts (`oversize = "split"`), which run as pieces; the ticket itself
      is in no batch. See `complete` for its ending.

    Costs: `submit`, `cancel`, `next_wakeup_ns` O(1) (a deadline out of order O(log n)); `poll` O(1) plus O(members) for each batch.
    """

    def __init__(
        self,
        batching: BatchingSettings,
        queue: QueueSettings,
        *,
        executors: int = 1,
        stage: bool = False,
        latency: LatencyModel | None = None,
    ) -> None:
        self._batching = batching
        self._queue_settings = queue
        self._latency = latency if latency is not None else LatencyModel(margin_sigmas=batching.margin_sigmas)
        self._executors = executors
        self._stage = stage
        self._timers = ExpiryTimers()
        self._cap_rows: int | None = None
        self._settings_since_ns = -1
        self._held_then = (0, 0, 0)  # requests, rows and bytes when settings last changed: they may exceed new bounds
        self._draining = False
        self._apply(Rules(batching, queue))
        self._staged: Batch | None = None
        self._staged_seen = 0  # tickets ever queued when the staged batch was last formed
        self._running: set[Batch] = set()
        self._splits: dict[Ticket, Split] = {}
        self._reserved: dict[Ticket, tuple[int, int]] = {}

        self._held_requests = 0  # RESERVED + WAITING + STAGED, what the bounds count
        self._held_rows = 0
        self._held_bytes = 0
        self._reserved_rows = 0
        self._reserved_bytes = 0
        self._running_requests = 0
        self._running_rows = 0

        self._queued = 0
        self._admitted = 0
        self._released = 0
        self._answered = 0
        self._failed = 0
        self._expired = 0
        self._cancelled = 0
        self._dropped = 0
        self._refused: dict[str, int] = {}
        self._batches: dict[str, int] = dict.fromkeys(REASONS, 0)

    def _apply(self, rules: Rules) -> None:
        """Begin to go by these rules, with an empty queue."""
        self._rules = rules
        ranked = rules.ranked
        composer: Composer = (
            RankedComposer(rules, self._latency, self._executors) if ranked else FixedComposer(rules, self._timers, self._latency)
        )
        self._composer = composer
        self._queue = composer.queue
        lanes_per_level = 1 if ranked or not rules.delay_expired else 2
        # By level as tickets name it: the lane of the queue, its timeout, and whether a ticket's own may be shorter.
        self._doors: list[tuple[int, int, bool]] = []
        for level in range(rules.levels + 1):
            policy = rules.of_level(level)
            lane = ((level or rules.default_level) - 1) * lanes_per_level
            self._doors.append((lane, policy.default_timeout_ns, policy.override_timeout))
        # The queue itself where it has one lane and nothing can expire: what the hot path writes to.
        plain = rules.levels == 1 and not rules.delay_expired and rules.default_timeout_ns == FOREVER and not rules.level_bounds
        self._fifo = composer.queue if isinstance(composer, FixedComposer) and plain else None
        self._level_held: list[list[int]] = [[0, 0, 0] for _ in range(rules.levels)] if rules.level_bounds else []
        self._strict = self._draining or rules.level_bounds or rules.max_cost != FOREVER  # more to ask than the queue's bounds

    # ---------------------------------------------------------------- in

    def reserve(self, ticket: Ticket, now_ns: int) -> Refuse | None:
        """Hold room for a ticket whose body is not read yet (its `rows` are at least 1 and `payload_bytes` what was announced).

        Ends with `submit`, `cancel` or a `grow` that is refused. Deadlines do not count before `submit`.
        """
        refusal = self._refusal(ticket, ticket.rows, ticket.payload_bytes, 1)
        if refusal is not None:
            return self._refuse(ticket, refusal)
        ticket.state = _RESERVED
        self._reserved[ticket] = (ticket.rows, ticket.payload_bytes)
        self._reserved_rows += ticket.rows
        self._reserved_bytes += ticket.payload_bytes
        self._hold(ticket.level, 1, ticket.rows, ticket.payload_bytes)
        self._admitted += 1
        return None

    def _hold(self, level: int, requests: int, rows: int, size: int) -> None:
        """Count more (or, with negative amounts, less) of what the bounds count."""
        self._held_requests += requests
        self._held_rows += rows
        self._held_bytes += size
        if self._level_held:
            self._hold_level(level, requests, rows, size)

    def _hold_level(self, level: int, requests: int, rows: int, size: int) -> None:
        held = self._level_held[(level or self._rules.default_level) - 1]
        held[0] += requests
        held[1] += rows
        held[2] += size

    def turn_away(self) -> Refuse | None:
        """The refusal of a request of which no more is known than that it has a row, if there is no room for one; else None."""
        rules = self._rules
        if self._held_rows >= rules.max_rows:
            refusal = Refuse("queue_full", "rows", rules.max_rows, self._held_rows)
        elif self._held_requests >= rules.max_requests:
            refusal = Refuse("queue_full", "requests", rules.max_requests, self._held_requests)
        elif self._held_bytes >= rules.max_bytes:
            refusal = Refuse("queue_full", "bytes", rules.max_bytes, self._held_bytes)
        else:
            return None
        if self._draining:
            refusal = Refuse("draining", "draining", 0, self._held_requests)
        self._refused[refusal.bound] = self._refused.get(refusal.bound, 0) + 1
        return refusal

    def submit(self, ticket: Ticket, now_ns: int) -> Refuse | None:
        """Queue a NEW or RESERVED ticket; bounds are exact. A refused ticket is REFUSED and its reservation released.

        For a RESERVED ticket only what it grew by is checked, and it is taken while draining: it was let in before.
        """
        rules = self._rules
        rows = ticket.rows
        size = ticket.payload_bytes
        level = ticket.level
        if ticket.state is not _NEW:
            return self._submit_reserved(ticket, now_ns)
        if (
            self._strict
            or not 0 <= level <= rules.levels
            or not 0 < rows <= rules.limit_rows
            or self._held_requests >= rules.max_requests
            or self._held_rows + rows > rules.max_rows
            or self._held_bytes + size > rules.max_bytes
        ):
            refusal = self._refusal(ticket, rows, size, 1)
            if refusal is not None:
                return self._refuse(ticket, refusal)
        self._admitted += 1
        fifo = self._fifo
        self._held_requests += 1
        self._held_rows += rows
        self._held_bytes += size
        if fifo is None or ticket.deadline_ns is not None or rows > rules.limit_rows:
            if self._level_held:
                self._hold_level(level, 1, rows, size)
            self._enqueue(ticket, now_ns)
            return None
        # What `_enqueue` and `WaitQueue.put` come to where nothing can expire and there is one lane: the hot path.
        ticket.state = _WAITING
        ticket.accepted_ns = now_ns
        self._queued += 1
        if not fifo.tickets:
            fifo.signature = ticket.signature
            fifo.mixed = False
        elif ticket.signature is not fifo.signature and ticket.signature != fifo.signature:
            fifo.mixed = True
        fifo.tickets += 1
        fifo.rows += rows
        fifo.lanes[0].append(ticket)
        return None

    def grow(self, ticket: Ticket, payload_bytes: int) -> Refuse | None:
        """Hold room for more bytes of a RESERVED ticket, of which less was announced; a refused one is REFUSED and released."""
        held_rows, held_bytes = self._reserved[ticket]
        more_bytes = payload_bytes - held_bytes
        if more_bytes <= 0:
            return None
        ticket.payload_bytes = payload_bytes
        refusal = self._refusal(ticket, 0, more_bytes, 0)
        if refusal is not None:
            self._release_reservation(ticket)
            return self._refuse_held(ticket, refusal, held_rows, held_bytes)
        self._reserved[ticket] = (held_rows, payload_bytes)
        self._reserved_bytes += more_bytes
        self._hold(ticket.level, 0, 0, more_bytes)
        return None

    def _submit_reserved(self, ticket: Ticket, now_ns: int) -> Refuse | None:
        held_rows, held_bytes = self._release_reservation(ticket)
        refusal = self._refusal(ticket, ticket.rows - held_rows, ticket.payload_bytes - held_bytes, 0)
        if refusal is not None:
            return self._refuse_held(ticket, refusal, held_rows, held_bytes)
        self._hold(ticket.level, 0, ticket.rows - held_rows, ticket.payload_bytes - held_bytes)
        self._enqueue(ticket, now_ns)
        return None

    def _refuse_held(self, ticket: Ticket, refusal: Refuse, held_rows: int, held_bytes: int) -> Refuse:
        self._hold(ticket.level, -1, -held_rows, -held_bytes)
        self._released += 1
        return self._refuse(ticket, refusal)

    def _release_reservation(self, ticket: Ticket) -> tuple[int, int]:
        held_rows, held_bytes = self._reserved.pop(ticket)
        self._reserved_rows -= held_rows
        self._reserved_bytes -= held_bytes
        return held_rows, held_bytes

    def _refusal(self, ticket: Ticket, more_rows: int, more_bytes: int, more_requests: int) -> Refuse | None:
        """Why this ticket cannot be taken, or None; the amounts are what it would add to what is held."""
        rules = self._rules
        rows = ticket.rows
        if self._draining and more_requests:
            return Refuse("draining", "draining", 0, self._held_requests)
        if not 0 <= ticket.level <= rules.levels:
            return Refuse("bad_request", "priority", rules.levels, ticket.level)
        if rows < 1:
            return Refuse("bad_request", "rows", 1, rows)
        if rows > rules.most_rows and not rules.split:
            return Refuse("too_large", "batch", rules.most_rows, rows)
        if rules.max_cost != FOREVER:
            refusal = self._cost_refusal(ticket)
            if refusal is not None:
                return refusal
        # What would not fit into an empty queue can never succeed: that is the request's fault, not a full queue's.
        if 0 < rules.max_rows < rows:
            return Refuse("too_large", "rows", rules.max_rows, rows)
        if 0 < rules.max_bytes < ticket.payload_bytes:
            return Refuse("too_large", "bytes", rules.max_bytes, ticket.payload_bytes)
        if self._held_requests + more_requests > rules.max_requests:
            return Refuse("queue_full", "requests", rules.max_requests, self._held_requests)
        if more_rows > 0 and self._held_rows + more_rows > rules.max_rows:
            return Refuse("queue_full", "rows", rules.max_rows, self._held_rows)
        if more_bytes > 0 and self._held_bytes + more_bytes > rules.max_bytes:
            return Refuse("queue_full", "bytes", rules.max_bytes, self._held_bytes)
        if self._level_held:
            return self._level_refusal(ticket, more_requests, more_rows, more_bytes)
        return None

    def _cost_refusal(self, ticket: Ticket) -> Refuse | None:
        """Why no batch could ever hold this ticket's work, or None."""
        rules = self._rules
        rows = ticket.rows
        cost = rules.cost_of(ticket)
        if rows > rules.limit_rows and rules.split:
            cost = cost * rules.limit_rows / rows  # of its largest piece
        return Refuse("too_large", "cost", round(rules.max_cost), math.ceil(cost)) if cost > rules.max_cost else None

    def _level_refusal(self, ticket: Ticket, more_requests: int, more_rows: int, more_bytes: int) -> Refuse | None:
        """Why the ticket's level has no room for it, or None."""
        policy = self._rules.of_level(ticket.level)
        held = self._level_held[(ticket.level or self._rules.default_level) - 1]
        if 0 < policy.max_rows < ticket.rows:
            return Refuse("too_large", "rows", policy.max_rows, ticket.rows)
        if 0 < policy.max_bytes < ticket.payload_bytes:
            return Refuse("too_large", "bytes", policy.max_bytes, ticket.payload_bytes)
        if held[0] + more_requests > policy.max_requests:
            return Refuse("queue_full", "requests", policy.max_requests, held[0])
        if more_rows > 0 and held[1] + more_rows > policy.max_rows:
            return Refuse("queue_full", "rows", policy.max_rows, held[1])
        if more_bytes > 0 and held[2] + more_bytes > policy.max_bytes:
            return Refuse("queue_full", "bytes", policy.max_bytes, held[2])
        return None

    def _refuse(self, ticket: Ticket, refusal: Refuse) -> Refuse:
        ticket.state = _REFUSED
        self._refused[refusal.bound] = self._refused.get(refusal.bound, 0) + 1
        return refusal

    def _enqueue(self, ticket: Ticket, now_ns: int) -> None:
        """Put a ticket for which room is held into the queue."""
        rules = self._rules
        self._queued += 1
        ticket.state = _WAITING
        ticket.accepted_ns = now_ns
        lane, expiry_ns, override = self._doors[ticket.level]
        if expiry_ns != FOREVER:
            expiry_ns += now_ns
        own_ns = ticket.deadline_ns
        if own_ns is not None and own_ns < expiry_ns and override:
            expiry_ns = own_ns
        ticket.expiry_ns = expiry_ns
        ticket.lane = lane
        if expiry_ns != FOREVER:
            ticket.due_ns = expiry_ns
            self._timers.add(ticket)
        else:
            ticket.due_ns = now_ns + rules.objective_ns
        if ticket.rows <= rules.limit_rows or not rules.split:
            self._queue.put(ticket)
        else:
            parts = cut(ticket, rules.limit_rows)
            ticket.parts = parts
            self._splits[ticket] = Split(len(parts))
            for part in parts:
                self._queue.put(part)

    # ---------------------------------------------------------------- early endings

    def cancel(self, ticket: Ticket, now_ns: int) -> bool:
        """End a ticket early. True if it left (RESERVED, WAITING or STAGED; now CANCELLED); a RUNNING one goes on: False.

        Cancelling a RUNNING ticket marks nothing; the engine discards its rows. Calling it on an ended ticket is False. Of a ticket
        that was cut, the parts that wait are removed; parts that run go on, and are to be discarded. A part stands for its parent.
        """
        if ticket.parent is not None:
            return self.cancel(ticket.parent, now_ns)
        state = ticket.state
        if state is _RESERVED:
            held_rows, held_bytes = self._release_reservation(ticket)
            self._hold(ticket.level, -1, -held_rows, -held_bytes)
            ticket.state = _CANCELLED
        elif state is _WAITING or state is _STAGED:
            self._leave(ticket, _CANCELLED)
        else:
            return False
        self._cancelled += 1
        return True

    def _leave(self, ticket: Ticket, ending: TicketState) -> None:
        """Take a WAITING or STAGED ticket, with all its parts that do not run, out of the queue or the staged batch."""
        self._hold(ticket.level, -1, 0, -ticket.payload_bytes)
        if ticket.parts is None:
            self._remove(ticket, ending)
            return
        del self._splits[ticket]
        ticket.state = ending
        for part in ticket.parts:
            if part.state is _WAITING or part.state is _STAGED:
                self._remove(part, ending)
                part.part_from_parent()

    def _remove(self, ticket: Ticket, ending: TicketState) -> None:
        staged = ticket.state is _STAGED
        ticket.state = ending
        self._hold(ticket.level, 0, -ticket.rows, 0)
        if not staged:
            self._queue.forget(ticket)
            return
        batch = self._staged
        assert batch is not None
        # A new list: whoever still looks at the old one sees it whole.
        batch.members = [member for member in batch.members if member is not ticket]
        batch.rows -= ticket.rows
        if not batch.members:
            batch.state = _B_DONE
            self._staged = None
        self._staged_seen = -1

    def _expire(self, now_ns: int) -> list[Ticket]:
        ended: list[Ticket] = []
        for ticket in self._timers.pop_due(now_ns):
            if not self._rules.of_level(ticket.level).delay_expired:
                self._leave(ticket, _EXPIRED)
                ended.append(ticket)
                continue
            ticket.expiry_ns = FOREVER
            for piece in ticket.parts or (ticket,):
                if piece.state is _WAITING:
                    self._queue.to_delayed(piece)
        if ended:
            self._expired += len(ended)
            self._composer.expired(ended)
        return ended

    # ---------------------------------------------------------------- decisions

    def poll(self, now_ns: int) -> list[Decision]:
        """Everything that is due at `now_ns`: expiries first, then batches to start, then the batch to stage.

        `Stage` comes again, with the same batch, when a staged batch that was not recalled has changed.
        """
        decisions: list[Decision] = []
        if self._timers.next_ns() <= now_ns:
            expired = self._expire(now_ns)
            if expired:
                decisions.append(Expire(expired))
        queue = self._queue
        free = self._executors - len(self._running)
        staged = self._staged
        changed = False
        if staged is not None:
            changed = self.wants_recall() and self._regrow(staged, now_ns, decisions)
            staged = self._staged
        if staged is not None:
            if free <= 0:
                if changed:
                    decisions.append(Stage(staged))
                return decisions
            self._staged = None
            self._run(staged, now_ns)
            decisions.append(Dispatch(staged))
            free -= 1
        while free > 0 and queue.tickets:
            batch = self._compose(now_ns, free, decisions)
            if batch is None:
                return decisions
            self._run(batch, now_ns)
            decisions.append(Dispatch(batch))
            free -= 1
        if self._stage and queue.tickets:
            self._staged = batch = self._compose(now_ns, 0, decisions)
            if batch is not None:
                self._staged_seen = self._queued
                decisions.append(Stage(batch))
        return decisions

    def _compose(self, now_ns: int, idle: int, decisions: list[Decision]) -> Batch | None:
        """The composer's next batch; what it gives up on the way ends, and is among the decisions."""
        batch = self._composer.compose(now_ns, idle, self._draining)
        hopeless = self._composer.take_dropped()
        if hopeless:
            self._drop(hopeless, decisions)
        return batch

    def _drop(self, hopeless: list[Ticket], decisions: list[Decision]) -> None:
        """End what the composer has taken out of its queue; of a cut ticket one piece takes all others along."""
        ended: list[Ticket] = []
        for ticket in hopeless:
            self._hold(ticket.level, 0, -ticket.rows, 0)
            parent = ticket.parent
            if parent is None:
                self._hold(ticket.level, -1, 0, -ticket.payload_bytes)
                ended.append(ticket)
                continue
            if parent in self._splits:
                self._leave(parent, _DROPPED)
                ended.append(parent)
            ticket.part_from_parent()
        self._dropped += len(ended)
        if ended:
            decisions.append(Drop(ended))

    def _regrow(self, batch: Batch, now_ns: int, decisions: list[Decision]) -> bool:
        """Let the staged batch change; whether it did. If all its members were dropped there is none any more."""
        self._staged_seen = self._queued
        changed = self._composer.regrow(batch, now_ns, self._draining)
        hopeless = self._composer.take_dropped()
        if hopeless:
            self._drop(hopeless, decisions)
        if not batch.members:
            batch.state = _B_DONE
            self._staged = None
        return changed

    def _put_back(self, batch: Batch) -> None:
        for ticket in batch.members:
            ticket.state = _WAITING
        self._composer.put_back(batch)
        self._staged = None

    def _run(self, batch: Batch, now_ns: int) -> None:
        """From here on the batch is RUNNING and its members no longer count against the bounds."""
        members = batch.members
        size = 0
        for ticket in members:
            ticket.state = _RUNNING
            size += ticket.payload_bytes
        requests = len(members)
        if self._level_held:
            for ticket in members:
                whole = ticket.parent is None
                self._hold_level(ticket.level, -whole, -ticket.rows, -ticket.payload_bytes)
        if self._splits:
            batch.cut = 0
            for ticket in members:
                parent = ticket.parent
                if parent is None:
                    continue
                requests -= 1
                batch.cut += 1
                split = self._splits[parent]
                split.unstarted -= 1
                if not split.unstarted:
                    parent.state = _RUNNING
                    requests += 1
                    size += parent.payload_bytes
                    if self._level_held:
                        self._hold_level(parent.level, -1, 0, -parent.payload_bytes)
        self._held_requests -= requests
        self._held_rows -= batch.rows
        self._held_bytes -= size
        self._running_requests += requests
        self._running_rows += batch.rows
        batch.state = _B_RUNNING
        batch.started_ns = now_ns
        self._running.add(batch)
        self._batches[batch.reason] += 1
        self._composer.started(batch, now_ns)

    # ---------------------------------------------------------------- what the driver reports

    def wants_recall(self) -> bool:
        """Whether polling could change the staged batch, so that it must be taken out of other hands first. O(levels)."""
        staged = self._staged
        if staged is None or self._staged_seen == self._queued:
            return False
        return self._composer.may_change(staged)

    def recall(self, batch: Batch) -> None:
        """The driver took a STAGED batch back before it started: its members wait again, in their old places.

        Raises ValueError for a batch that is not the staged one.
        """
        if batch is not self._staged:
            raise ValueError("only the staged batch can be recalled")
        self._put_back(batch)
        batch.state = _B_DONE
        batch.members = []
        batch.rows = 0

    def start(self, batch: Batch, now_ns: int) -> None:
        """The driver saw a STAGED batch start on an executor that became free: it is RUNNING from here on.

        Raises ValueError for a batch that is not the staged one.
        """
        if batch is not self._staged:
            raise ValueError("only the staged batch can be started")
        self._staged = None
        self._run(batch, now_ns)

    def complete(self, batch: Batch, now_ns: int, *, all_answered: bool = False, typical: bool = True) -> Sequence[Ticket]:
        """A RUNNING batch ended; its executor is free. Members' states are set by the caller (ANSWERED or FAILED).

        A member left RUNNING counts as answered and becomes so. Returns the cut tickets that ended by this, each once, in order:
        ANSWERED when the last of its `parts` was, FAILED as soon as one was; parts that still wait are then removed, and what
        comes back of running ones is to be discarded. `all_answered` is the caller's word that it has set no state and that every
        member was answered, which spares looking. Unless `typical`, the time it took says nothing of other batches (it was run in
        parts, or not to the end), and is not learned from. Raises ValueError for a batch that does not run.
        """
        if batch not in self._running:
            raise ValueError("only a running batch can be completed")
        self._running.remove(batch)
        self._running_rows -= batch.rows
        batch.state = _B_DONE
        self._composer.completed(batch, now_ns - batch.started_ns if typical else 0)
        if all_answered and not batch.cut:
            for ticket in batch.members:
                ticket.state = _ANSWERED
            requests = len(batch.members)
            self._running_requests -= requests
            self._answered += requests
            return _NO_TICKETS
        others = 0
        for ticket in batch.members:
            state = ticket.state
            if state is _ANSWERED:
                continue
            if state is _RUNNING:
                ticket.state = _ANSWERED
            elif ticket.parent is None:
                others += 1
                if state is _FAILED:
                    self._failed += 1
                elif state is _CANCELLED:
                    self._cancelled += 1
                else:
                    self._expired += 1
        requests = len(batch.members)
        ended = _NO_TICKETS
        if batch.cut:
            requests -= batch.cut
            ended = self._complete_pieces(batch)
        self._running_requests -= requests
        self._answered += requests - others
        return ended

    def _complete_pieces(self, batch: Batch) -> list[Ticket]:
        ended: list[Ticket] = []
        for piece in batch.members:
            parent = piece.parent
            split = None if parent is None else self._splits.get(parent)
            if parent is None or split is None:  # whole, or a piece of a ticket that has ended already
                continue
            split.outstanding -= 1
            if piece.state is _ANSWERED and split.outstanding:
                continue
            ending = _ANSWERED if piece.state is _ANSWERED else _FAILED
            if split.unstarted:
                self._leave(parent, ending)
            else:
                self._running_requests -= 1
                del self._splits[parent]
                parent.state = ending
            if ending is _ANSWERED:
                self._answered += 1
            else:
                self._failed += 1
            ended.append(parent)
        return ended

    def outstanding(self, ticket: Ticket) -> list[Ticket]:
        """The parts of a cut ticket that have not come back yet, in order; empty for a ticket that was not cut, or has ended."""
        if ticket not in self._splits:
            return []
        return [part for part in ticket.parts or () if part.state < _ANSWERED]

    def drain(self, now_ns: int) -> None:
        """Refuse whatever comes; send what waits without waiting for windows. A RESERVED ticket may still be submitted."""
        self._draining = self._strict = True

    def think(self, steps: int) -> bool:
        """In adaptive mode: some of the work of finding the best rule for starting; whether there is more to do now.

        To be called now and then, when nothing urgent is due; a step takes well below a millisecond.
        """
        return self._composer.think(steps)

    # ---------------------------------------------------------------- other settings

    def reconfigure(self, batching: BatchingSettings, queue: QueueSettings, now_ns: int) -> None:
        """Go by other settings from now on; call `poll` afterwards. A staged batch has to be recalled (or started) before.

        Nothing is lost: what waits goes on waiting under the new rules, in order of acceptance, with the timeouts that it was
        accepted under. What exceeds a new bound stays, and nothing more is accepted until there is room; a ticket larger than a new
        limit runs alone. Tickets on a level that there is no longer go to the lowest. Raises ValueError while a batch is staged.
        """
        if self._staged is not None:
            raise ValueError("a staged batch must be recalled before settings change")
        self._batching, self._queue_settings = batching, queue
        self._settings_since_ns = now_ns
        self._held_then = (self._held_requests, self._held_rows, self._held_bytes)
        rules = Rules(batching, queue, self._cap_rows)
        waiting = sorted(self._queue, key=lambda ticket: ticket.accepted_ns)
        delayed = {ticket for ticket in waiting if self._queue.is_delayed(ticket)}
        for ticket in (*self._reserved, *waiting, *self._splits):
            ticket.level = min(ticket.level, rules.levels)
        self._apply(rules)
        for batch in self.running_batches():
            self._composer.started(batch, batch.started_ns)
        for ticket in waiting:
            expiry_ns = (ticket.parent or ticket).expiry_ns
            ticket.lane = self._doors[ticket.level][0]
            ticket.due_ns = expiry_ns if expiry_ns != FOREVER else ticket.accepted_ns + rules.objective_ns
            self._queue.put(ticket)
            if ticket in delayed and rules.of_level(ticket.level).delay_expired:
                self._queue.to_delayed(ticket)
        if not self._level_held:
            return
        for ticket, (rows, size) in self._reserved.items():
            self._hold_level(ticket.level, 1, rows, size)
        for ticket in waiting:
            self._hold_level(ticket.level, ticket.parent is None, ticket.rows, ticket.payload_bytes)
        for parent, split in self._splits.items():
            if split.unstarted:
                self._hold_level(parent.level, 1, 0, parent.payload_bytes)

    def cap_rows(self, rows: int | None, now_ns: int) -> None:
        """Run batches of at most so many rows until told otherwise, whatever the settings allow; None takes the cap away.

        For what only running shows: memory that does not suffice. Requests are refused by the settings alone; one that is larger
        than the cap and may not be cut runs alone. The same conditions as for `reconfigure`.
        """
        self._cap_rows = rows
        self.reconfigure(self._batching, self._queue_settings, now_ns)

    # ---------------------------------------------------------------- out

    def next_wakeup_ns(self) -> int | None:
        """When `poll` must be called again if nothing else happens; None: not at all.

        While no batch can be started or staged only expiries count. A time in the past means that a poll is due for what came since
        the last one.
        """
        due_ns = self._timers.next_ns()
        if self._queue.tickets:
            idle = self._executors - len(self._running)
            if idle > 0 or (self._stage and self._staged is None):
                due_ns = min(due_ns, self._composer.wakeup_ns(max(idle, 0), self._draining))
        return None if due_ns == FOREVER else due_ns

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing runs: a drained scheduler is finished."""
        return not self._held_requests and not self._running

    @property
    def staged(self) -> Batch | None:
        """The batch that starts next, if one is staged."""
        return self._staged

    @property
    def running(self) -> int:
        """How many batches run."""
        return len(self._running)

    def running_batches(self) -> list[Batch]:
        """The batches that run, in the order in which they were started."""
        return sorted(self._running, key=lambda batch: batch.started_ns)

    def is_full(self) -> bool:
        """Whether a request of one row would be refused now, draining apart."""
        rules = self._rules
        return self._held_requests >= rules.max_requests or self._held_rows >= rules.max_rows or self._held_bytes >= rules.max_bytes

    @property
    def in_system(self) -> int:
        """Requests that are held or run: accepted and not ended."""
        return self._held_requests + self._running_requests

    @property
    def waiting_requests(self) -> int:
        """Requests that wait or are staged."""
        return self._held_requests - len(self._reserved)

    @property
    def waiting_rows(self) -> int:
        """Rows that wait or are staged."""
        return self._held_rows - self._reserved_rows

    def snapshot(self, now_ns: int) -> Snapshot:
        """The whole state in figures. O(waiting) with several levels, O(levels) with one."""
        return take_snapshot(self, now_ns)
