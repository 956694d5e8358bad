"""Case 22, simple form: the hint is backlog ÷ measured rate, lengthened by chance, rounded up to two digits, capped."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server

MAX_HINT_MS = 60_000


def _two_digits_up(milliseconds: float) -> int:
    step = 10 ** max(0, len(str(math.ceil(milliseconds))) - 2)
    return math.ceil(milliseconds / step) * step


def test_hint(tmp_path: Path) -> None:
    """Thirty refusals at two depths of backlog: each hint within backlog ÷ rate and a fifth more; they differ; headers agree."""
    path, gate = gated(tmp_path)
    model = ModelSettings(
        path=path, probe=False, batching=BatchingSettings(max_batch_size=2), queue=QueueSettings(max_queue_rows=12)
    )
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client, RawClient(server.port) as crowd:
        good = infer("m", {"x": np.ones((1, 4), np.float32)})
        calls = 0
        for _ in range(2):  # the first time the rate is not known yet
            gate.close()
            client.send(good)
            gate.wait_entered(calls + 1)
            client.send(good * 12)
            server.wait_waiting("m", 12)
            lane = server.lane("m")
            rate = server.call(lane.rows_per_second)
            hints = []
            for _ in range(30):
                answer = crowd.ask(good)
                assert answer.status == 429
                if rate is None:  # nothing was measured, and no probe ran that would tell what to expect
                    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
                    continue
                hint_ms = int(answer.headers["retry-after-ms"])
                exact_ms = 13 / rate * 1000  # twelve wait, one runs
                assert min(math.floor(exact_ms), MAX_HINT_MS) <= hint_ms <= min(_two_digits_up(exact_ms * 1.2 + 1), MAX_HINT_MS)
                assert int(answer.headers["retry-after"]) == max(1, math.ceil(hint_ms / 1000))
                hints.append(hint_ms)
            gate.open()
            assert [client.response().status for _ in range(13)] == [200] * 13
            server.settled()
            calls = len(gate.notes)
        assert rate is not None and rate > 0
        assert hints and (len(set(hints)) > 1 or max(hints) <= 6)  # a few milliseconds leave no room for chance


def test_obedient_client_is_served(tmp_path: Path) -> None:
    """A client that was refused and comes back when the backlog is gone is served."""
    path, gate = gated(tmp_path)
    model = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_rows=1))
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client, RawClient(server.port) as other:
        good = infer("m", {"x": np.ones((1, 4), np.float32)})
        client.send(good)
        gate.wait_entered()
        client.send(good)
        server.wait_waiting("m", 1)
        assert other.ask(good).status == 429
        gate.open()
        assert [client.response().status for _ in range(2)] == [200, 200]
        server.settled()
        assert other.ask(good).status == 200
