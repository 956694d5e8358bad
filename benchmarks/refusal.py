"""A queue that is full and stays full: a Python model that blocks, and clients that fill its executor and its queue."""

from __future__ import annotations

import contextlib
import fcntl
import select
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import BenchmarkError, Cores, free_port
from benchmarks.payloads import Answer, Request
from benchmarks.servers import KINDS, Launch, RunningServer

REFUSED = 429
_MOST_HELD = 16
_WARM_REQUESTS = 50
_ANSWER_TIMEOUT_S = 0.3

# Waiting for a file lock costs no CPU, and the system lifts the lock when the benchmark dies.
_MODEL = '''
import fcntl

class Blocker:
    """Answers when nobody holds the lock."""

    inputs = {{"x": ("FP32", ({items},))}}
    outputs = {{"y": ("FP32", (1,))}}

    def __call__(self, x):
        with open({lock!r}) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
        return x[:, :1]
'''


@contextlib.contextmanager
def full_server(folder: Path, cores: Cores, request: Request, items: int) -> Iterator[RunningServer]:
    """A Shoal server that refuses everything while the context lasts; afterwards it must answer all that it had accepted.

    Raises BenchmarkError when it cannot be filled, refuses without a hint, or forgets an accepted request.
    """
    lock, source = folder / "gate.lock", folder / "blocker.py"
    lock.touch()
    source.write_text(_MODEL.format(items=items, lock=str(lock)))
    launch = Launch(f"{source}:Blocker", items, free_port(), 1, ("--max-queue-rows", "1"))
    with (
        RunningServer(KINDS["shoal"], cores.server, launch) as server,
        contextlib.ExitStack() as held,
        lock.open() as gate,
    ):
        # A hint when to come back is computed from answers given: a server that has given none knows none.
        for _ in range(_WARM_REQUESTS):
            if (answer := server.ask(request)).status != 200:
                raise BenchmarkError(f"the model that does not block yet answers {answer.status}: {answer.body[:300]!r}")
        fcntl.flock(gate, fcntl.LOCK_EX)
        waiting = []
        for _ in range(_MOST_HELD):
            connection = held.enter_context(contextlib.closing(server.connect(timeout_s=10.0)))
            connection.request("POST", request.path, request.body, request.headers)
            if not select.select([connection.sock], [], [], _ANSWER_TIMEOUT_S)[0]:
                waiting.append(connection)
                continue
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            _check_refusal(Answer(response.status, names, response.read()))
            break
        else:
            raise BenchmarkError(f"{_MOST_HELD} requests were accepted by a queue of one row")
        yield server
        fcntl.flock(gate, fcntl.LOCK_UN)
        statuses = [connection.getresponse().status for connection in waiting]
        if any(status != 200 for status in statuses):
            raise BenchmarkError(f"accepted requests were answered {statuses} when the model went on")


def _check_refusal(answer: Answer) -> None:
    if answer.status != REFUSED or b'"queue_full"' not in answer.body or "retry-after" not in answer.headers:
        raise BenchmarkError(f"not a refusal with a hint: {answer.status} {answer.headers} {answer.body[:300]!r}")
