"""Case 36 over HTTP: headers of compressed answers are right, and the size limit is the one that is set and shown."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from shoal.testing.models import doubling
from shoal.testing.raw_http import RawClient, get, infer, infer_parts, post
from shoal.testing.server import local_settings, running_server

LIMIT = 2 << 20


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("br, gzip;q=0.1", "gzip"),
        ("br", None),
        ("gzip;q=0", None),
        ("identity", None),
    ],
)
def test_headers_of_compressed_answers(tmp_path: Path, accept: str, coding: str | None) -> None:
    """Content-Encoding says what it is, Content-Length is that of the bytes sent, the JSON's length is that before compression."""
    with running_server(local_settings({"m": doubling(tmp_path, -1)})) as server, RawClient(server.port) as client:
        array = np.ones((1, 5000), np.float32)
        answer = client.ask(infer("m", {"x": array}, Accept_Encoding=accept))
        assert answer.headers.get("content-encoding") == coding
        if coding is not None:
            assert len(answer.body) < 5000
            answer.body = gzip.decompress(answer.body) if coding == "gzip" else zlib.decompress(answer.body)
        assert np.array_equal(answer.tensors()["y"], 2 * array)


def test_limit_is_exact_and_shown(tmp_path: Path) -> None:
    """A body of exactly the limit passes, one byte more is 413 and names the limit, which the server's metadata show."""
    with running_server(local_settings({"m": doubling(tmp_path, -1)}, max_body_bytes=LIMIT)) as server:
        with RawClient(server.port) as client:
            assert client.ask(get("/v2")).json()["limits"]["max_body_bytes"] == LIMIT
            front, _ = infer_parts({"x": np.zeros((1, 500_000), np.float32)})
            entry = json.loads(front)
            tail = bytes(500_000 * 4)
            front = json.dumps(entry).encode().ljust(LIMIT - len(tail))  # blanks behind the JSON make it exactly the limit
            answer = client.ask(post("/v2/models/m/infer", front + tail, Inference_Header_Content_Length=len(front)))
            assert answer.tensors()["y"].shape == (1, 500_000)
            for chunks in (None, [front, tail, b" "]):
                with RawClient(server.port) as larger:
                    larger.send_what_is_taken(post("/v2/models/m/infer", front + tail + b" ", chunks=chunks))
                    answer = larger.response()
                    assert (answer.status, answer.json()["reason"]) == (413, "too_large")
                    assert str(LIMIT) in answer.json()["error"]
        server.settled()


def test_default_limit_takes_large_tensors(tmp_path: Path) -> None:
    """Without a setting, more than the 2 MB and 4 MB that others stop at."""
    with running_server(local_settings({"m": doubling(tmp_path, -1)})) as server, RawClient(server.port) as client:
        array = np.random.default_rng(2).standard_normal((1, 1_600_000), np.float32)
        assert np.array_equal(client.ask(infer("m", {"x": array})).tensors()["y"], 2 * array)
