"""Case 21: what a full queue refuses is never decoded."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from shoal.config.settings import ModelSettings, QueueSettings
from shoal.testing.models import gated
from shoal.testing.raw_http import RawClient, infer, post
from shoal.testing.server import local_settings, running_server

LIMIT = 4


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_bodies_of_the_refused_are_not_looked_at(tmp_path: Path, size: int, coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the limit of bodies that decode to nonsense: all are told that the queue is full (looked at, they would be 400).

    The decoders are counted too: none is called for any of them, and those in the queue are answered.
    """
    import shoal.server.infer as route

    decoded: list[str] = []
    for name in ("decode_content", "decode_head"):
        original = getattr(route, name)
        monkeypatch.setattr(route, name, lambda *args, n=name, f=original, **kw: (decoded.append(n), f(*args, **kw))[1])
    path, gate = gated(tmp_path)
    model = ModelSettings(path=path, probe=False, queue=QueueSettings(max_queue_rows=LIMIT))
    nonsense = np.random.default_rng(3).bytes(size)
    bad = post("/v2/models/m/infer", gzip.compress(nonsense) if coding == "gzip" else nonsense, Content_Encoding=coding)
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client, RawClient(server.port) as crowd:
        good = infer("m", {"x": np.ones((1, 4), np.float32)})
        client.send(good)
        gate.wait_entered()
        client.send(good * LIMIT)
        server.wait_waiting("m", LIMIT)
        decoded.clear()
        for _ in range(10 * LIMIT):
            answer = crowd.ask(bad)
            assert (answer.status, answer.json()["reason"]) == (429, "queue_full")
        assert decoded == []
        gate.open()
        assert [client.response().status for _ in range(LIMIT + 1)] == [200] * (LIMIT + 1)
        assert crowd.ask(bad).status == 400  # and with room it is looked at
        server.settled()
