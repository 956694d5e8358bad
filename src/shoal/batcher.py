"""Dynamic batching inside any asyncio program, with no server: `Batcher` (the decorator is in `batched_function`).

    async with Batcher(embed, max_batch_size=32) as batch:
        vector = await batch(text)          # many tasks do this; `embed` is called with lists of up to 32 texts

The same scheduler, lanes and executors as in the server. Nothing is configured from outside, nothing is read or written.
"""

from __future__ import annotations

import asyncio
import math
import time
import typing
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, overload

import numpy as np

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.decisions import Refuse
from shoal.core.ticket import Ticket
from shoal.datatypes import ModelSpec
from shoal.engine.execution import AsyncRunner, Runner
from shoal.engine.executor import Pool, ThreadPool
from shoal.engine.functions import AsyncFunctionRunner, FunctionRunner, check_function, wants_array
from shoal.engine.hooked_functions import AsyncHookedRunner, HookedRunner, check_hook
from shoal.engine.lane import Lane
from shoal.engine.local_pools import InlinePool, TaskPool
from shoal.engine.recorder import Recorder
from shoal.errors import BadRequest, DeadlineExceeded, Draining, ModelFailed, QueueFull, TooLarge

__all__ = ["Batcher", "Options"]

In = TypeVar("In")
Out = TypeVar("Out")
Array = np.ndarray[Any, np.dtype[Any]]

_NS_PER_MS: Final = 1_000_000
_SPEC: Final = ModelSpec("python_function", (), ())


class Options(TypedDict, total=False):
    """Keyword arguments of `Batcher` and `@batched`."""

    max_batch_size: int
    max_delay_ms: float
    max_queue_rows: int | None
    instances: int
    stack: bool | None
    decode: Callable[[Any], Any] | None
    encode: Callable[[Any], Any] | None
    size: Callable[[Any], int] | None
    max_batch_cost: float | None
    cost: Callable[[Any], float] | None
    mode: Literal["fixed", "adaptive"]
    slo_ms: float | None
    priority_levels: int
    tenant_weights: Mapping[str, float] | None
    timeout_ms: float | None
    inline: bool
    name: str | None
    clock: Callable[[], int]


class Batcher(Generic[In, Out]):
    """Gathers single calls into calls of `function` with many items.

    `function` takes a list of items and returns a sequence of as many results, in order: a list, a tuple, an array. If `stack` is
    set (by default: if its parameter is annotated as a numpy array), items must be numpy arrays, only those of equal shape and
    dtype go together, and it is given one array with a new first axis. A plain function runs in threads, `instances` of them; an
    `async` one is awaited on the loop, as up to `instances` tasks; with `inline` a plain one runs on the loop itself. It sees none
    of its callers' context variables. What it returns is its callers' property: it must not write to it again.

    A batch starts when an executor is free and it is full, or its oldest item has waited `max_delay_ms`; with 0, whenever an
    executor is free and something waits. `size` gives the weight of an item in rows (default 1); `max_batch_size` and
    `max_queue_rows` count rows. `timeout_ms` is how long an item may wait to be run.

    `cost` says what an item costs (default: its rows), and the items of a batch cost at most `max_batch_cost`; one that costs more
    alone is `TooLarge`. With `mode="adaptive"` measured batch times and arrivals decide when a batch starts, and with the objective
    `slo_ms` what cannot be answered in time any more is given up (`Overloaded`). Calls may have a `priority` of 1 (highest) to
    `priority_levels`; with `tenant_weights` (1 for whoever is not named) tenants get their shares, whatever others send.

    `decode`, if given, is called with each item first, and the function gets what it returns; `encode` is called with each result,
    and callers get what it returns. They run where the function runs, and may be asynchronous if it is. With `stack` and `decode`
    only what is decoded need be arrays, all of equal shape. `size` and `cost` see items as they come.

    Errors stay with their item: what a hook raises its caller gets, and the rest of the batch goes on. The function may return an
    exception in an item's place: that call raises it. If it raises, the batch is run again in parts until those whose item is the
    cause are found, so it should have no side effects that must not happen twice; they get the original exception, and the same
    item (bytes, text, an array or something hashable) is run alone for the next five minutes. If memory does not suffice the batch
    is run in halves, and batches are smaller for a while. A wrong number of results is everyone's `ModelFailed`.

    Belongs to the loop on which it was opened; after closing it may be opened again.
    """

    @overload
    def __init__(
        self: Batcher[In, Out], function: Callable[[list[In]], Awaitable[Sequence[Out]]], **options: typing.Unpack[Options]
    ) -> None: ...
    @overload
    def __init__(
        self: Batcher[In, Out], function: Callable[[list[In]], Sequence[Out]], **options: typing.Unpack[Options]
    ) -> None: ...
    @overload
    def __init__(self: Batcher[Array, Any], function: Callable[[Array], Any], **options: typing.Unpack[Options]) -> None: ...

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        max_batch_size: int = 64,
        max_delay_ms: float = 0.0,
        max_queue_rows: int | None = 4096,
        instances: int = 1,
        stack: bool | None = None,
        decode: Callable[[Any], Any] | None = None,
        encode: Callable[[Any], Any] | None = None,
        size: Callable[[Any], int] | None = None,
        max_batch_cost: float | None = None,
        cost: Callable[[Any], float] | None = None,
        mode: Literal["fixed", "adaptive"] = "fixed",
        slo_ms: float | None = None,
        priority_levels: int = 1,
        tenant_weights: Mapping[str, float] | None = None,
        timeout_ms: float | None = None,
        inline: bool = False,
        name: str | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._is_async = check_function(function)
        check_hook("decode", decode, self._is_async)
        check_hook("encode", encode, self._is_async)
        _check_count("max_batch_size", max_batch_size)
        _check_count("instances", instances)
        if max_queue_rows is not None:
            _check_count("max_queue_rows", max_queue_rows)
        _check_ms("max_delay_ms", max_delay_ms)
        for label, value in (("timeout_ms", timeout_ms), ("slo_ms", slo_ms)):
            if value is not None:
                _check_ms(label, value)
        if mode not in ("fixed", "adaptive"):
            raise ValueError(f'mode must be "fixed" or "adaptive", not {mode!r}')
        _check_count("priority_levels", priority_levels)
        if max_batch_cost is not None and not _is_positive(max_batch_cost):
            raise ValueError(f"max_batch_cost must be a finite number above 0, not {max_batch_cost!r}")
        for tenant, weight in (tenant_weights or {}).items():
            if not _is_positive(weight):
                raise ValueError(f"the weight of tenant {tenant!r} must be a finite number above 0, not {weight!r}")
        if inline and (self._is_async or instances != 1):
            raise ValueError("inline is for one plain function: an async one runs on the loop anyway")
        self._function = function
        self._batching = BatchingSettings(
            max_batch_size=max_batch_size,
            max_delay_ms=max_delay_ms,
            mode=mode,
            oversize="reject",
            max_batch_cost=max_batch_cost,
            cost="rows" if cost is None else "item:cost",
        )
        self._queue = QueueSettings(
            max_queue_rows=max_queue_rows,
            max_queue_bytes=None,
            default_timeout_ms=timeout_ms,
            slo_ms=slo_ms,
            priority_levels=priority_levels,
            tenant_weights=dict(tenant_weights or {}),
        )
        self._cost = cost
        self._decode = decode
        self._encode = encode
        self._instances = instances
        self._stack = wants_array(function) if stack is None else stack
        self._size = size
        self._inline = inline
        self._clock = clock
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self._lane: Lane | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._without_room: deque[_Call] = deque()

    # ---------------------------------------------------------------- life

    async def open(self) -> None:
        """Begin; as `async with` does. Raises RuntimeError if it is open already."""
        if self._lane is not None:
            raise RuntimeError(f"{self!r} is open already")
        self._loop = asyncio.get_running_loop()
        self._lane = Lane(self.name, "1", _SPEC, self._make_pool(), batching=self._batching, queue=self._queue, clock=self._clock)

    def _make_pool(self) -> Pool:
        clock, function = self._clock, self._function
        count = range(self._instances)
        decode, encode = self._decode, self._encode
        hooked = decode is not None or encode is not None
        if self._is_async:
            tasks: list[AsyncRunner] = [AsyncFunctionRunner(function, self._stack, clock) for _ in count]
            if hooked:
                tasks = [AsyncHookedRunner(function, self._stack, clock, decode=decode, encode=encode) for _ in count]
            return TaskPool(self.name, tasks, clock)
        runners: list[Runner] = [FunctionRunner(function, self._stack, clock) for _ in count]
        if hooked:
            runners = [HookedRunner(function, self._stack, clock, decode=decode, encode=encode) for _ in count]
        return InlinePool(runners[0], clock) if self._inline else ThreadPool(self.name, runners, clock)

    async def close(self, *, drain: bool = True, grace_seconds: float = 5.0) -> bool:
        """Refuse new calls, answer those that were accepted (unless `drain` is off: then those that wait fail), end the threads.

        A function that does not return within `grace_seconds` after that is left behind, and the result is False. Closing twice
        does nothing.
        """
        lane, self._lane = self._lane, None
        if lane is None:
            return True
        error = Draining(f"{self!r} was closed")
        lane.on_room = None
        while self._without_room:
            self._without_room.popleft().fail(error)
        try:
            if drain:
                await lane.drain()
            return await lane.close(grace_seconds)
        except BaseException:
            lane.stop()
            raise

    async def __aenter__(self) -> Batcher[In, Out]:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close(drain=kind is None)

    def __del__(self) -> None:
        lane = getattr(self, "_lane", None)
        if lane is not None:
            lane.stop()
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=1)

    def __repr__(self) -> str:
        return f"<Batcher {self.name}>"

    # ---------------------------------------------------------------- calls

    async def __call__(
        self, item: In, *, timeout_ms: float | None = None, wait: bool = False, priority: int = 0, tenant: str | None = None
    ) -> Out:
        """One item's result.

        `timeout_ms`: how long it may wait to be run (the smaller of this and the batcher's own counts). `wait`: if the queue is
        full, wait for room in it instead of raising. `priority`: the level, 1 is highest, 0 the default one. Raises what the
        function raised for this item; QueueFull, Overloaded, TooLarge, BadRequest (a priority that there is not), DeadlineExceeded,
        ModelFailed; RuntimeError if the batcher is not open on this loop.
        """
        lane = self._lane
        loop = asyncio.get_running_loop()
        if lane is None:
            raise RuntimeError(f"{self!r} is not open: use it inside `async with`")
        if loop is not self._loop:
            raise RuntimeError(f"{self!r} belongs to another event loop")
        call = _Call(loop.create_future(), item, self._rows(item, lane), self._signature(item))
        call.level, call.tenant = priority, tenant
        if self._cost is not None:
            call.cost = self._cost_of(item, self._cost, lane)
        if timeout_ms is not None:
            _check_ms("timeout_ms", timeout_ms)
            call.deadline_ns = self._clock() + int(timeout_ms * _NS_PER_MS)
        if self._without_room:
            if not wait:
                raise self._refused(Refuse("queue_full", "rows", self._queue.max_queue_rows or 0, lane.snapshot().held_rows))
            self._wait_for_room(call, timeout_ms)
        elif (refuse := lane.submit(call.new_ticket())) is not None:
            if not wait or refuse.reason != "queue_full":
                raise self._refused(refuse)
            self._wait_for_room(call, timeout_ms)
        try:
            return await call.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            if call.ticket is not None:
                lane.cancel(call.ticket)
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()

    def _rows(self, item: In, lane: Lane) -> int:
        if self._size is None:
            return 1
        try:
            rows = self._size(item)
        except Exception:
            lane.stats.loop_errors += 1
            raise
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"size gave {rows!r} for an item; it must be a positive integer")
        return rows

    def _cost_of(self, item: In, cost: Callable[[Any], float], lane: Lane) -> float:
        try:
            value = cost(item)
        except Exception:
            lane.stats.loop_errors += 1
            raise
        if not _is_positive(value):
            raise ValueError(f"cost gave {value!r} for an item; it must be a finite number above 0")
        return float(value)

    def _signature(self, item: In) -> Hashable:
        if not self._stack or self._decode is not None:
            return None
        if not isinstance(item, np.ndarray | np.generic):
            raise TypeError(f"{self!r} stacks numpy arrays, but an item is a {type(item).__name__}")
        return (item.shape, item.dtype.str if not item.dtype.hasobject else item.dtype)

    def _wait_for_room(self, call: _Call, timeout_ms: float | None) -> None:
        self._without_room.append(call)
        if timeout_ms is not None and self._loop is not None:
            error = DeadlineExceeded(f"no room in the queue within {timeout_ms:g} ms")
            call.timer = self._loop.call_later(timeout_ms / 1000.0, call.fail, error)
        if self._lane is not None:
            self._lane.on_room = self._let_in

    def _let_in(self) -> None:
        """There is room in the queue: those who waited for it come in, in their order, as many as fit."""
        lane, waiting = self._lane, self._without_room
        while waiting and lane is not None:
            call = waiting[0]
            if not call.future.done():
                if lane.is_full():
                    return
                if lane.submit(call.new_ticket()) is not None:
                    call.ticket = None
                    return
                if call.timer is not None:
                    call.timer.cancel()
            waiting.popleft()
        if lane is not None:
            lane.on_room = None

    def _refused(self, refuse: Refuse) -> Exception:
        if refuse.reason == "bad_request":
            return BadRequest(f"{refuse.bound}: {refuse.used} is outside the range up to {refuse.limit}")
        if refuse.reason == "too_large" and refuse.bound == "cost":
            return TooLarge(f"an item costs {refuse.used}, but a batch of {self!r} may cost at most {refuse.limit}")
        if refuse.reason == "too_large":
            return TooLarge(f"an item of {refuse.used} rows is larger than {self!r} can take at once ({refuse.limit})")
        if refuse.reason == "draining":
            return Draining(f"{self!r} is being closed")
        retry_after_ms = self._lane.retry_after_ms() if self._lane is not None else None
        message = f"the queue of {self!r} is full: {refuse.used} of {refuse.limit} {refuse.bound} are taken"
        return QueueFull(message, retry_after_ms=retry_after_ms)

    # ---------------------------------------------------------------- looking

    @property
    def stats(self) -> Recorder:
        """Counts and times since it was opened. Raises RuntimeError if it is not open."""
        if self._lane is None:
            raise RuntimeError(f"{self!r} is not open")
        return self._lane.stats

    @property
    def waiting(self) -> int:
        """Items that have not been started yet, those that wait for room in the queue included."""
        return len(self._without_room) + (self._lane.snapshot().waiting_requests if self._lane is not None else 0)


class _Call:
    """One awaited call, and the ticket that stands for it."""

    __slots__ = ("cost", "deadline_ns", "future", "item", "level", "rows", "signature", "tenant", "ticket", "timer")

    def __init__(self, future: asyncio.Future[Any], item: Any, rows: int, signature: Hashable) -> None:
        self.future = future
        self.item = item
        self.rows = rows
        self.signature = signature
        self.cost = 0.0
        self.level = 0
        self.tenant: str | None = None
        self.deadline_ns: int | None = None
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None

    def new_ticket(self) -> Ticket:
        self.ticket = ticket = Ticket(
            self.rows, 0, self.signature, self.item, self._ended, self.deadline_ns, self.level, self.tenant
        )
        if self.cost:
            ticket.cost = self.cost
        return ticket

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _ended(self, ticket: Ticket) -> None:
        future = self.future
        self.ticket = None
        if future.done():
            return
        error = ticket.error
        if error is None:
            future.set_result(ticket.answer[ticket.answer_row])
            return
        cause = error.__cause__
        if isinstance(error, ModelFailed) and isinstance(cause, Exception) and not isinstance(cause, StopIteration):
            error = cause  # what the function itself raised
        future.set_exception(error)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _check_ms(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of milliseconds, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be 0 or more and finite, not {value}")
