"""Ten thousand tagged rows over two hundred connections, with clients that vanish and clients that send garbage."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings
from shoal.testing.models import python_model
from shoal.testing.raw_http import infer
from shoal.testing.server import local_settings, running_server

ROWS = 10_000
CONNECTIONS = 200
SAFETY_SECONDS = 60.0
# What a row becomes depends on the row alone, and on all of it; a part that is lost or moved cannot go unnoticed.
SOURCE = """
class Model:
    inputs = {"tag": ("INT64", (1,)), "noise": ("FP32", (6,))}
    outputs = {"tag": ("INT64", (1,)), "sum": ("FP32", (1,))}
    def __call__(self, tag, noise):
        return {"tag": tag * 3 + 1, "sum": noise.sum(axis=1, keepdims=True)}
"""


@dataclass
class Tally:
    """What the clients saw."""

    answered_rows: int = 0
    mismatches: int = 0
    refused: int = 0
    vanished: int = 0
    garbage: int = 0
    unexpected: list[str] = field(default_factory=list)


class Client:
    """One of two hundred: opens a connection as often as it needs one, and checks every row that comes back."""

    def __init__(self, port: int, dice: random.Random, tally: Tally) -> None:
        self.port, self.dice, self.tally = port, dice, tally
        self.noise = np.random.default_rng(dice.randrange(2**32))
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """A fresh connection, if there is none."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    def leave(self, *, at_once: bool) -> None:
        """Close, or break off."""
        assert self.writer is not None
        if at_once:
            self.writer.transport.abort()
        else:
            self.writer.close()
        self.writer = None

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        return int(head[0].split(" ")[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def ask(self, tags: np.ndarray) -> None:
        """One request with these tags, now and then from a client that does not wait for the answer."""
        noise = self.noise.standard_normal((len(tags), 6), np.float32)
        request = infer("m", {"tag": tags, "noise": noise})
        if self.dice.random() < 0.02:
            await self.garbage(request)
        await self.connect()
        assert self.writer is not None
        if self.dice.random() < 0.05:
            self.tally.vanished += 1
            self.writer.write(request[: self.dice.randint(1, len(request))])
            if self.dice.random() < 0.5:
                await self.writer.drain()
            self.leave(at_once=self.dice.random() < 0.5)
            return
        self.writer.write(request)
        status, headers, body = await self.answer()
        if status == 429:
            self.tally.refused += 1
            return
        if status != 200:
            self.tally.unexpected.append(f"{status} {body[:200]!r}")
            return
        length = int(headers["inference-header-content-length"])
        got = np.frombuffer(body, np.int64, len(tags), length)
        sums = np.frombuffer(body, np.float32, len(tags), length + 8 * len(tags))
        good = (got == tags[:, 0] * 3 + 1) & np.isclose(sums, noise.sum(axis=1), rtol=1e-5, atol=1e-5)
        self.tally.answered_rows += int(good.sum())
        self.tally.mismatches += int((~good).sum()) + (len(body) != length + 12 * len(tags))

    async def garbage(self, request: bytes) -> None:
        """Bytes that are no request, or one that is spoilt; the server answers with an error or ends the connection."""
        await self.connect()
        assert self.writer is not None
        self.tally.garbage += 1
        if self.dice.random() < 0.5:
            data = self.dice.randbytes(self.dice.randint(1, 500)) + b"\r\n\r\n"
        else:
            data = request[:20] + b"\0" + request[21:]
        self.writer.write(data)
        try:
            while True:
                status, headers, _ = await self.answer()
                if status == 200:
                    self.tally.unexpected.append("garbage was answered with 200")
                if headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.leave(at_once=True)

    async def run(self, sizes: list[tuple[int, int]]) -> None:
        """Ask for everything that is this client's."""
        for first, count in sizes:
            await self.ask(np.arange(first, first + count, dtype=np.int64).reshape(-1, 1))
        if self.writer is not None:
            self.leave(at_once=False)


async def crowd(port: int, dice: random.Random, tally: Tally) -> int:
    """All clients at once; returns how many rows they asked for."""
    work: list[list[tuple[int, int]]] = [[] for _ in range(CONNECTIONS)]
    first = requests = 0
    while first < ROWS:
        count = min(dice.randint(1, 7), ROWS - first)
        work[requests % CONNECTIONS].append((first, count))
        first += count
        requests += 1
    clients = [Client(port, random.Random(dice.randrange(2**32)), tally) for _ in range(CONNECTIONS)]
    async with asyncio.timeout(SAFETY_SECONDS):
        await asyncio.gather(*(client.run(sizes) for client, sizes in zip(clients, work, strict=True)))
    return first


@pytest.mark.parametrize(
    ("batching", "queue", "instances"),
    [
        (BatchingSettings(max_batch_size=32), QueueSettings(), 1),
        (BatchingSettings(max_batch_size=5, max_delay_ms=1.0), QueueSettings(max_queue_rows=64), 2),
    ],
    ids=["no window", "window, splitting, short queue, two executors"],
)
def test_every_row_reaches_its_owner(tmp_path: Path, batching: BatchingSettings, queue: QueueSettings, instances: int) -> None:
    """No row is lost to a client that waited for it, none reaches another; nothing hangs, and nothing is left behind."""
    path = python_model(tmp_path, SOURCE)
    model = ModelSettings(path=path, probe=False, batching=batching, queue=queue, instances=instances)
    tally = Tally()
    with running_server(local_settings({"m": model})) as server:
        asked = asyncio.run(crowd(server.port, random.Random(20_260), tally))
        http = server.server.http
        server.wait_until(lambda: not http.connections)
        server.settled()
        lane = server.lane("m")
        snapshot = server.call(lane.snapshot)
    assert asked == ROWS
    assert (tally.mismatches, tally.unexpected) == (0, [])
    assert tally.vanished > 60 and tally.garbage > 20
    assert (snapshot.held_requests, snapshot.held_rows, snapshot.held_bytes) == (0, 0, 0)
    assert (snapshot.running_requests, snapshot.reserved_requests) == (0, 0)
    assert snapshot.accepted == snapshot.answered + snapshot.cancelled + snapshot.released + snapshot.failed + snapshot.expired
    assert snapshot.failed == 0
    if queue == QueueSettings():
        assert tally.refused == 0 and tally.answered_rows > 0.9 * ROWS
        assert lane.stats.mean_batch_rows() > 4  # they were gathered
