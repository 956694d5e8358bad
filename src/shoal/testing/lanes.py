"""Lanes for tests: a fake model whose every call can be held at a gate, tickets with tagged rows, and a list of endings.

    backend = FakeBackend(gate=Gate())
    async with open_lane([backend]) as lane:
        endings = Endings()
        lane.submit(tagged_ticket([1.0, 2.0], endings))
        await endings.wait(1)

The model's rule is `y = 2 x + 1` on single FP32 values, so whose row an answer belongs to can be told from the answer alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from shoal.backends.base import Array, Backend
from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.core.ticket import Ticket, TicketState
from shoal.datatypes import ModelSpec, TensorSpec
from shoal.engine.executor import Pool, ThreadPool
from shoal.engine.lane import Lane
from shoal.engine.local_pools import InlinePool
from shoal.engine.runner import TensorRunner
from shoal.tensors.payload import Payload
from shoal.testing.gates import Gate

__all__ = ["TAGGED", "Endings", "FakeBackend", "answer_values", "open_lane", "tagged_ticket"]

TAGGED = ModelSpec("fake", (TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),))


class FakeBackend:
    """A model made of a function of one array. `calls` lists the values of every call, in order; a gate holds it inside each."""

    def __init__(
        self, function: Callable[[Array], Any] | None = None, *, gate: Gate | None = None, spec: ModelSpec = TAGGED
    ) -> None:
        self.spec = spec
        self.calls: list[list[float]] = []
        self.closed = 0
        self._function = function or (lambda x: 2 * x + 1)
        self._gate = gate

    def run(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Sequence[Array]:
        """Note the rows, wait at the gate, call the function."""
        values = inputs[0].reshape(-1).tolist()
        self.calls.append(values)
        if self._gate is not None:
            self._gate.enter(values)
        return [self._function(inputs[0])]

    def clone(self) -> FakeBackend:
        """Another with the same function and gate."""
        return FakeBackend(self._function, gate=self._gate, spec=self.spec)

    def close(self) -> None:
        """Counted."""
        self.closed += 1


class Endings:
    """Tickets in the order in which their endings came. Give it as `on_end`."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def __call__(self, ticket: Ticket) -> None:
        """Called by the lane."""
        self.tickets.append(ticket)
        for count, future in self._waiting:
            if len(self.tickets) >= count and not future.done():
                future.set_result(None)

    async def wait(self, count: int) -> list[Ticket]:
        """All endings so far, as soon as there are `count`. Raises TimeoutError after 30 s, which only a broken lane needs."""
        if len(self.tickets) < count:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, future))
            await asyncio.wait_for(future, 30.0)
        return self.tickets


def tagged_ticket(
    values: Sequence[float],
    on_end: Callable[[Ticket], None] | None = None,
    *,
    deadline_ns: int | None = None,
    level: int = 0,
    signature: object = "tagged",
) -> Ticket:
    """One request with a row for each value."""
    data = np.array(values, np.float32).tobytes()
    payload = Payload((memoryview(data),), ((1,),))
    return Ticket(len(values), len(data), signature, payload, on_end, deadline_ns, level)


def answer_values(ticket: Ticket) -> list[float]:
    """The values that an answered ticket got. Raises AssertionError for any other ending."""
    assert ticket.state is TicketState.ANSWERED, (ticket.state.name, ticket.error)
    values: list[float] = ticket.answer.array(0, ticket.answer_row, ticket.rows).reshape(-1).tolist()
    return values


@asynccontextmanager
async def open_lane(
    backends: Sequence[Backend],
    *,
    batching: BatchingSettings | None = None,
    queue: QueueSettings | None = None,
    stage: bool = True,
    inline: bool = False,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[Lane]:
    """A lane with one executor for each backend; closed at the end with a grace of 10 s."""
    batching = batching or BatchingSettings()
    runners = [TensorRunner(backend, max(1, batching.max_batch_size), clock) for backend in backends]
    pool: Pool = InlinePool(runners[0], clock) if inline else ThreadPool("test", runners, clock)
    lane = Lane("test", "1", backends[0].spec, pool, batching=batching, queue=queue or QueueSettings(), stage=stage, clock=clock)
    try:
        yield lane
    finally:
        await lane.close(10.0)
