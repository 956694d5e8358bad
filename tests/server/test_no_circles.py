"""Requests leave no circles of references: a large body is freed with its last user, not when the garbage collector comes by."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from shoal.testing.models import doubling, python_model
from shoal.testing.raw_http import RawClient, infer, json_infer, post
from shoal.testing.server import ThreadedServer, local_settings, running_server

ROW = np.ones((1, 4), np.float32)
ROWS = np.ones((4090, 4), np.float32)

REQUESTS = {
    "small": (200, infer("m", {"x": ROW})),
    "id": (200, infer("m", {"x": ROW}, {"id": "a"})),
    "json": (200, json_infer("m", {"x": ("FP32", [1, 4], [1, 2, 3, 4])})),
    "cut, in a body of its own": (200, infer("m", {"x": ROWS})),
    "chunks": (400, post("/v2/models/m/infer", chunks=[b"{}"])),
    "bad head": (400, post("/v2/models/m/infer", b"{}", x_priority="x")),
    "bad json": (400, post("/v2/models/m/infer", b"{")),
    "unknown model": (404, infer("none", {"x": ROW})),
    "failed": (500, infer("bad", {"x": ROW})),
    "failed, cut": (500, infer("bad", {"x": ROWS})),
    "expired": (504, infer("m", {"x": ROW}, x_request_timeout_ms=0.0001)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """Two models; `bad` raises."""
    directory = tmp_path_factory.mktemp("models")
    source = """
    class Model:
        inputs = {"x": ("FP32", (4,))}
        outputs = {"y": ("FP32", (4,))}
        def __call__(self, x):
            raise ValueError("bad")
    """
    with running_server(local_settings({"m": doubling(directory), "bad": python_model(directory, source)})) as running:
        yield running
        running.settled()


@pytest.mark.parametrize("kind", REQUESTS)
def test_nothing_is_left_for_the_garbage_collector(server: ThreadedServer, kind: str) -> None:
    """Ten requests of a kind, with the collector off: none of Shoal's objects, and no frame, waits to be collected."""
    status, request = REQUESTS[kind]
    with RawClient(server.port) as client:
        for _ in range(3):
            assert client.ask(request).status == status
        server.settled()
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                assert client.ask(request).status == status
            server.settled()
            gc.set_debug(gc.DEBUG_SAVEALL)
            server.call(gc.collect)
            left = [type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("shoal")]
            left += [
                thing.f_code.co_name
                for thing in gc.garbage
                if type(thing).__name__ == "frame" and "shoal" in thing.f_code.co_filename
            ]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
