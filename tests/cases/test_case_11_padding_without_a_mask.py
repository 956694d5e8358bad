"""Case 11: texts of 18 and 3 tokens padded together, for a model that cannot tell padding from data, and for one that can."""

from __future__ import annotations

from pathlib import Path

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
    (error,) = errors_of(check_settings(Settings(models={"m": ModelSettings(path=path, batching=batching)})))
    assert error.where == "models.m.batching.lengths.ids.mask"
    assert "name the input that tells it" in error.message


@pytest.mark.parametrize("send_mask", [True, False])
def test_the_short_one_is_answered_as_if_alone(tmp_path: Path, send_mask: bool) -> None:
    """Both run in one padded batch; each gets the mean of its own numbers, whether the client sends the mask or leaves it out."""
    path, door = gated_model(tmp_path, SOURCE)
    batching = BatchingSettings(lengths={"ids": LengthSettings(policy="pad", mask="mask", pad_value=7.0)})
    model = ModelSettings(path=path, probe=False, execution="thread", batching=batching)
    texts = [np.arange(1, size + 1, dtype=np.float32).reshape(1, size) for size in (2, 18, 3)]
    with running_server(local_settings({"m": model})) as server:
        clients = [RawClient(server.port) for _ in texts]
        for index, (client, text) in enumerate(zip(clients, texts, strict=True)):
            mask = {"mask": np.ones_like(text)} if send_mask else {}
            client.send(infer("m", {"ids": text, **mask}))
            if index == 0:
                door.wait_entered()
            else:
                server.wait_until(lambda index=index: server.server.engine.lane("m").waiting_requests == index)
        door.open()
        means = [client.response().tensors()["mean"].tolist() for client in clients]
        assert means == [[[1.5]], [[9.5]], [[2.0]]]
        assert door.notes == [(1, 2), (2, 18)]
        for client in clients:
            client.close()
