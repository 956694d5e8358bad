"""Case 11: texts of 18 and 3 tokens padded together, for a model that cannot tell padding from data, and for one that can."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.checks import check_settings, errors_of
from shoal.config.settings import BatchingSettings, LengthSettings, ModelSettings, Settings
from shoal.testing.models import gated_model
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server

SOURCE = """
class Model:
    inputs = {"ids": ("FP32", (-1,)), "mask": ("FP32", (-1,))}
    outputs = {"mean": ("FP32", (1,))}
    def __call__(self, ids, mask):
        GATE.enter(ids.shape)
        return ((ids * mask).sum(axis=1) / mask.sum(axis=1)).reshape(-1, 1).astype("float32")
"""


def test_padding_without_a_mask_is_refused(tmp_path: Path) -> None:
    """Settings that pad and do not say how the model is told are an error that names the way out."""
    path, _ = gated_model(tmp_path, SOURCE)
    batching = BatchingSettings(lengths={"ids": LengthSettings(policy="pad")})
    errors = errors_of(check_settings(Settings(models={"m": ModelSettings(path=path, batching=batching)})))
    assert [error.where.rpartition(".")[2] for error in errors] == ["pad_value", "mask"]
    assert "name the input that tells it" in errors[1].message


@pytest.mark.parametrize("send_mask", [True, False])
@pytest.mark.parametrize(
    ("policy", "edges", "sizes", "shapes"),
    [("bucket", (20,), (2, 18, 3), [(1, 20), (2, 20)]), ("pad", (), (2, 18, 15), [(1, 2), (2, 18)])],
)
def test_the_short_one_is_answered_as_if_alone(
    tmp_path: Path, send_mask: bool, policy: Any, edges: tuple[int, ...], sizes: tuple[int, ...], shapes: list[tuple[int, int]]
) -> None:
    """Two run in one padded batch; each gets the mean of its own numbers, whether the client sends the mask or leaves it out."""
    path, door = gated_model(tmp_path, SOURCE)
    length = LengthSettings(policy=policy, edges=edges, mask="mask", pad_value=7.0)
    batching = BatchingSettings(lengths={"ids": length})
    model = ModelSettings(path=path, probe=False, execution="thread", stage=False, batching=batching)
    texts = [np.arange(1, size + 1, dtype=np.float32).reshape(1, size) for size in sizes]
    with running_server(local_settings({"m": model})) as server, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in texts]
        for index, (client, text) in enumerate(zip(clients, texts, strict=True)):
            client.send(infer("m", {"ids": text, "mask": np.ones_like(text)} if send_mask else {"ids": text}))
            if index == 0:
                door.wait_entered()
            else:
                server.wait_waiting("m", index)
        door.open()
        means = [client.response().tensors()["mean"].tolist() for client in clients]
        assert means == [[[(size + 1) / 2]] for size in sizes]
        assert door.notes == shapes
        server.settled()
