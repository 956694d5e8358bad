"""Case 4: "ok", nothing, "ok": success, error, success, and the server goes on."""

from __future__ import annotations

from pathlib import Path

from shoal.testing.company import together
from shoal.testing.models import gated_model
from shoal.testing.raw_http import RawClient, json_infer
from shoal.testing.server import local_settings, running_server

SOURCE = """
class Model:
    inputs = {"text": ("BYTES", (1,))}
    outputs = {"size": ("INT64", (1,))}
    def __call__(self, text):
        GATE.enter(text[:, 0].tolist())
        items = [None if item == b"None" else item for item in text[:, 0]]
        return np.array([[len(item)] for item in items])
"""


def ask(item: object) -> bytes:
    """A request with one string, or something in its place."""
    return json_infer("m", {"text": ("BYTES", [1, 1], [item])})


def test_null_in_the_json(tmp_path: Path) -> None:
    """A null is refused by name before it reaches a batch."""
    path, gate = gated_model(tmp_path, SOURCE)
    with running_server(local_settings({"m": path})) as server:
        answers = together(server, gate, "m", ask("first"), [ask("ok"), ask(None), ask("ok")], refused={1})
        assert [answer.status for answer in answers] == [200, 400, 200]
        assert "null" in answers[1].json()["error"]
        assert [answers[index].json()["outputs"][0]["data"] for index in (0, 2)] == [[2], [2]]


def test_nothing_inside_the_model(tmp_path: Path) -> None:
    """The model itself falls over one item (a TypeError): that one is 500, the others are answered, also those that come later."""
    path, gate = gated_model(tmp_path, SOURCE)
    with running_server(local_settings({"m": path})) as server:
        for _ in range(3):
            answers = together(server, gate, "m", ask("first"), [ask("ok"), ask("None"), ask("okay")])
            assert [answer.status for answer in answers] == [200, 500, 200]
            assert "TypeError" in answers[1].json()["error"]
            assert [answers[index].json()["outputs"][0]["data"] for index in (0, 2)] == [[2], [4]]
        with RawClient(server.port) as client:
            assert client.ask(ask("later")).json()["outputs"][0]["data"] == [5]
        stats = server.call(lambda: server.server.engine.lane("m").stats)
        assert (stats.fail.count, stats.loop_errors) == (3, 0)
