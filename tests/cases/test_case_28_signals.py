"""Case 28: SIGTERM with work under way, when idle, and twice; in a process of its own, with real signals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.compose import StopWishes
from shoal.testing.models import python_model
from shoal.testing.process import ServingProcess, serving
from shoal.testing.raw_http import RawClient, get, infer


def row(number: float) -> np.ndarray:
    """A row that is known by its first number."""
    return np.full((1, 4), number, np.float32)


class Door:
    """A model's door in another process: two named pipes, through which it says that it came and waits to be let in."""

    def __init__(self, directory: Path) -> None:
        self.came, self.go = directory / "came", directory / "go"
        os.mkfifo(self.came)
        os.mkfifo(self.go)
        self.model = python_model(
            directory,
            f"""
            class Model:
                inputs = {{"x": ("FP32", (4,))}}
                outputs = {{"y": ("FP32", (4,))}}
                held = False
                def __call__(self, x):
                    if (x == 1).any():
                        with open({str(self.came)!r}, "wb"):
                            pass
                        with open({str(self.go)!r}, "rb"):
                            pass
                    return 2 * x
            """,
        )

    def wait(self) -> None:
        """Return when the model stands at the door."""
        with self.came.open("rb"):
            pass

    def open(self) -> None:
        """Let it in."""
        with self.go.open("wb"):
            pass


@contextlib.contextmanager
def busy(directory: Path) -> Iterator[tuple[ServingProcess, Door, list[RawClient]]]:
    """A server with one request running and five accepted; of the last five the bodies are still to be sent.

    What was told to go on (100) has its place in the queue, which is the only thing that a client can know from outside.
    """
    door = Door(directory)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(serving(door.model, "--http-port", "0", "--name", "m"))
        clients = [stack.enter_context(RawClient(process.port)) for _ in range(6)]
        clients[0].send(infer("m", {"x": row(1)}))
        door.wait()
        for number, client in enumerate(clients[1:], start=2):
            request = infer("m", {"x": row(number)}, Expect="100-continue")
            client.send(request[: request.index(b"\r\n\r\n") + 4])
            assert client.response().status == 100
        yield process, door, clients


def finish_bodies(clients: list[RawClient]) -> None:
    """Send the bodies that are outstanding."""
    for number, client in enumerate(clients[1:], start=2):
        request = infer("m", {"x": row(number)}, Expect="100-continue")
        client.send(request[request.index(b"\r\n\r\n") + 4 :])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_accepted_work_is_answered(tmp_path: Path, name: str) -> None:
    """One running and five accepted: all six are answered, new ones are 503, readiness goes, and the process ends with 0."""
    with busy(tmp_path) as (process, door, clients), RawClient(process.port) as late:
        assert late.ask(get("/v2/health/ready")).status == 200
        process.signal(name)
        process.wait_line("draining")
        answer = late.ask(infer("m", {"x": row(9)}))
        assert (answer.status, answer.json()["reason"]) == (503, "draining")
        with RawClient(process.port) as other:
            assert other.ask(get("/v2/health/ready")).status == 503
        with RawClient(process.port) as other:
            assert other.ask(get("/v2/health/live")).status == 200
        finish_bodies(clients)
        door.open()
        for number, client in enumerate(clients, start=1):
            answer = client.response()
            assert (answer.status, answer.tensors()["y"][0, 0]) == (200, 2.0 * number)
            assert answer.headers["connection"] == "close"
            client.close()
        assert process.wait() == 0
        assert process.lines[-1] == "drained"


def test_pipelined_requests_are_all_answered(tmp_path: Path) -> None:
    """Six requests on one connection: stopping ends it behind the last answer, not behind the first."""
    door = Door(tmp_path)
    with serving(door.model, "--http-port", "0", "--name", "m") as process, RawClient(process.port) as client:
        last = infer("m", {"x": row(6)}, Expect="100-continue")
        end = last.index(b"\r\n\r\n") + 4
        client.send(infer("m", {"x": row(1)}))
        door.wait()
        client.send(b"".join(infer("m", {"x": row(number)}) for number in range(2, 6)) + last[:end])
        assert client.response().status == 100  # so what came before has been read too
        process.signal("SIGTERM")
        process.wait_line("draining")
        client.send(last[end:])
        door.open()
        assert [client.response().tensors()["y"][0, 0] for _ in range(6)] == [2.0 * number for number in range(1, 7)]
        assert client.at_end()
        client.close()
        assert process.wait() == 0


@pytest.mark.parametrize("connections", [0, 3])
def test_idle_server_ends_at_once(tmp_path: Path, connections: int) -> None:
    """With nothing to do it ends without waiting, open idle connections or not."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(serving("digits", "--http-port", "0"))
        clients = [stack.enter_context(RawClient(process.port)) for _ in range(connections)]
        assert all(client.ask(get("/v2/health/live")).status == 200 for client in clients)
        process.signal("SIGTERM")
        assert process.wait() == 0
        assert all(client.at_end() for client in clients)
        assert process.lines[-1] == "drained"


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    """The model stands still and would for ever: the second signal does not wait for it."""
    with busy(tmp_path) as (process, _, clients):
        process.signal("SIGTERM")
        process.wait_line("draining")
        process.signal("SIGINT")
        assert process.wait() == 128 + 2
        assert all(client.at_end() for client in clients)


def test_same_signal_again_is_the_same_wish() -> None:
    """Within a fifth of a second of the last one that counted a signal is a repetition; later, or of another kind, it counts."""
    wishes = StopWishes()
    told = [(15, 10.0), (15, 10.05), (15, 10.19), (15, 10.25), (15, 10.3), (2, 10.31), (2, 10.4), (15, 11.0)]
    assert [wishes.count(number, seconds) for number, seconds in told] == [1, 0, 0, 2, 0, 3, 0, 4]


def test_signal_that_comes_twice_drains(tmp_path: Path) -> None:
    """A process group is told as a whole and the server once more: it drains, and answers what it has accepted."""
    with busy(tmp_path) as (process, door, clients):
        process.signal("SIGTERM")
        process.signal("SIGTERM")
        process.wait_line("draining")
        finish_bodies(clients)
        door.open()
        assert [client.response().status for client in clients] == [200] * 6
        for client in clients:
            client.close()
        assert process.wait() == 0


def test_drain_timeout(tmp_path: Path) -> None:
    """A model that never ends holds the server no longer than the time set for draining; the exit status tells."""
    door = Door(tmp_path)
    arguments = (door.model, "--http-port", "0", "--name", "m", "--drain-timeout-ms", "100")
    with serving(*arguments) as process, RawClient(process.port) as client:
        client.send(infer("m", {"x": row(1)}))
        door.wait()
        process.signal("SIGTERM")
        answer = client.response()  # its connection is not just cut
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert process.wait() == 1
        assert any("drain timeout" in line for line in process.lines)
