"""Case 30, bounded: thousands of requests of cycling rows and lengths, some of which expire, leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.core.batch import Batch
from shoal.core.ticket import Ticket
from shoal.server.http_exchange import Exchange
from shoal.testing.models import doubling
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server

ROWS = (16, 7, 7, 1, 13)
LENGTHS = (8, 16, 24, 32, 64, 96, 128, 256, 384, 512)


def living(kind: type) -> int:
    """How many objects of this kind there are."""
    return sum(type(item) is kind for item in gc.get_objects())


def test_cycling_shapes(tmp_path: Path) -> None:
    """3,000 requests, five row counts, ten lengths, every seventh with a deadline that may pass: right answers; tables are empty
    at the end, no ticket, batch or exchange lives on, and kept buffers are bounded however many shapes came by."""
    model = ModelSettings(path=doubling(tmp_path, -1), probe=False, batching=BatchingSettings(max_batch_size=32))
    with running_server(local_settings({"m": model})) as server:
        late = 0
        with RawClient(server.port) as client:
            for start in range(0, 3000, 30):
                arrays = []
                pieces = []
                for number in range(start, start + 30):
                    shape = (ROWS[number % 5], LENGTHS[number * 7 % 10])
                    array = np.full(shape, number, np.float32)
                    arrays.append(array)
                    headers = {"x_request_timeout_ms": 0.05} if number % 7 == 0 else {}
                    pieces.append(infer("m", {"x": array}, **headers))
                client.send(b"".join(pieces))
                for offset, array in enumerate(arrays):
                    answer = client.response()
                    if answer.status == 504:
                        assert (start + offset) % 7 == 0
                        late += 1
                    else:
                        assert np.array_equal(answer.tensors()["y"], 2 * array)
        server.settled()
        lane = server.lane("m")
        snapshot = server.call(lane.snapshot)
        assert (snapshot.held_requests, snapshot.held_rows, snapshot.held_bytes, snapshot.running_requests) == (0, 0, 0, 0)
        assert snapshot.answered + snapshot.expired == 3000 and snapshot.expired == late
        http = server.server.http
        server.wait_until(lambda: not http.connections)
        gc.collect()
        # An executor keeps the batch that it ran last until the next one comes.
        assert living(Ticket) <= 40 and living(Batch) <= 2 and living(Exchange) <= 40
        for runner in (worker.runner for worker in lane._pool._workers):  # type: ignore[attr-defined]
            assert len(runner._assembler._kept) <= 8
