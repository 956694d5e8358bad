"""Plans and templates: requests of the same form share their decoding, and nobody gets anybody else's id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.server.plan import without_id
from shoal.testing.models import doubling
from shoal.testing.raw_http import RawClient, post
from shoal.testing.server import local_settings, running_server


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=20), st.booleans())
def test_id_is_told_apart_or_left_alone(request_id: str, spaced: bool) -> None:
    """What is taken out is exactly the id, and putting it back gives the same JSON value; other JSON stays as it is."""
    rest: dict[str, Any] = {"inputs": [{"name": "x"}]}
    text = json.dumps({"id": request_id, **rest}, separators=(", ", ": ") if spaced else (",", ":"))
    left, found = without_id(text.encode())
    if found is None:
        assert left == text.encode()
    else:
        assert json.loads(left) == rest
        assert found.decode("ascii") == request_id


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"id":', b'{"id":"a"}', b'{"id":"a\\n","b":1}', b'{"id":"\xc3\xa9","b":1}', b'{ "id":"a","b":1}']
)
def test_doubtful_ids_are_left_to_the_decoder(text: bytes) -> None:
    """Escapes, other alphabets, other places: the whole JSON is decoded as usual."""
    assert without_id(text) == (text, None)


def _request(array: np.ndarray[Any, Any], request_id: str | None, first: bool = True) -> bytes:
    entry: dict[str, Any] = {
        "inputs": [{"name": "x", "shape": array.shape, "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}]
    }
    entry["parameters"] = {"binary_data_output": True}
    if request_id is not None:
        entry = {"id": request_id, **entry} if first else {**entry, "id": request_id}
    head = json.dumps(entry, separators=(",", ":")).encode()
    return post("/v2/models/m/infer", head + array.tobytes(), Inference_Header_Content_Length=len(head))


def test_every_answer_has_its_own_id_and_tensor(tmp_path: Path) -> None:
    """With and without ids, wherever they stand, on known and unknown shapes: id, shape and values are those of the request."""
    ids = [None, "a", "b" * 200, "sp ace", 'quo"te', "é", None, "a", "c", "", "x" * 300]
    with running_server(local_settings({"m": doubling(tmp_path, -1)})) as server, RawClient(server.port) as client:
        for turn in range(3):
            for number, request_id in enumerate(ids):
                for width in (1, 3, 2000):
                    array = np.full((1 + turn, width), number, np.float32)
                    answer = client.ask(_request(array, request_id, first=number % 3 != 2))
                    assert answer.status == 200
                    length = int(answer.headers["inference-header-content-length"])
                    assert json.loads(answer.body[:length]).get("id") == (request_id or None)
                    assert np.array_equal(answer.tensors()["y"], 2 * array)


def test_id_does_not_hide_what_is_wrong_with_the_rest(tmp_path: Path) -> None:
    """A second id, or a fault behind the id, is refused although the first id was taken out."""
    with running_server(local_settings({"m": doubling(tmp_path, 4)})) as server, RawClient(server.port) as client:
        good = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
        for text in (b'{"id":"a","id":"b",' + good[1:], b'{"id":"a",' + good[:-1], b'{"id":"a",}'):
            assert client.ask(post("/v2/models/m/infer", text)).status == 400
        assert client.ask(post("/v2/models/m/infer", b'{"id":"a",' + good[1:])).json()["id"] == "a"
