"""Requests that are sure to be batched together: they wait while the model stands at its gate with another one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from shoal.testing.gates import Gate
from shoal.testing.raw_http import RawClient, Response
from shoal.testing.server import ThreadedServer

__all__ = ["together"]


def together(
    server: ThreadedServer, gate: Gate, model: str, first: bytes, requests: Sequence[bytes], *, refused: Collection[int] = ()
) -> list[Response]:
    """Send `first`, and when it has reached the closed gate all `requests`, in order, each on a connection of its own.

    They wait together; then the gate is opened. Those whose index is in `refused` are to be answered without waiting. Returns the
    answers to `requests`.
    """
    gate.close()
    calls = len(gate.notes)
    lane = server.lane(model)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(len(requests) + 1)]
        clients[0].send(first)
        gate.wait_entered(calls + 1)
        answers: dict[int, Response] = {}
        waiting = 0
        for index, (client, request) in enumerate(zip(clients[1:], requests, strict=True)):
            client.send(request)
            if index in refused:
                answers[index] = client.response()
            else:
                waiting += 1
                server.wait_until(lambda wanted=waiting: lane.snapshot().waiting_requests == wanted)  # type: ignore[misc]
        gate.open()
        clients[0].response()
        for index, client in enumerate(clients[1:]):
            if index not in refused:
                answers[index] = client.response()
    server.settled()
    return [answers[index] for index in range(len(requests))]
