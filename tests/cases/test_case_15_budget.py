"""Case 15: a budget of 1000 for each batch, and requests of 999, 1000, 1001 and 1002; nothing loops, nothing behind them waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shoal.batcher import Batcher
from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.errors import BadRequest, TooLarge
from shoal.testing.models import python_model
from shoal.testing.raw_http import RawClient, infer
from shoal.testing.server import local_settings, running_server

MODEL = """
class Model:
    inputs = {"x": ("FP32", (-1,))}
    outputs = {"y": ("FP32", (1,))}
    def __call__(self, x):
        return x.sum(axis=1, keepdims=True).astype("float32")

def cost(shapes, parameters):
    if parameters.get("say") == "nan":
        return float("nan")
    if parameters.get("say") == "raise":
        raise RuntimeError("no idea")
    return shapes["x"][1]
"""


def test_over_http(tmp_path: Path) -> None:
    """The exact limit passes, one more is 413 at once and says both numbers; NaN and exceptions fail that request alone."""
    path = python_model(tmp_path, MODEL)
    batching = BatchingSettings(max_batch_cost=1000, cost=path.rpartition(":")[0] + ":cost")
    model = ModelSettings(path=path, probe=False, batching=batching)
    with running_server(local_settings({"m": model})) as server, RawClient(server.port) as client:

        def ask(size: int, **parameters: str) -> object:
            answer = client.ask(
                infer("m", {"x": np.ones((1, size), np.float32)}, {"parameters": parameters} if parameters else None)
            )
            return (
                answer.tensors()["y"].item()
                if answer.status == 200
                else (answer.status, answer.json()["reason"], answer.json()["error"])
            )

        limit = 'the request costs {}, but a batch of model "m" may cost at most 1000'
        assert ask(1002) == (413, "too_large", limit.format(1002))
        assert ask(1001) == (413, "too_large", limit.format(1001))
        status, reason, text = ask(5, say="nan")  # type: ignore[misc]
        assert (status, reason, "gave nan" in text) == (500, "model_failed", True)
        status, reason, text = ask(5, say="raise")  # type: ignore[misc]
        assert (status, reason, "raised RuntimeError: no idea" in text) == (500, "model_failed", True)
        assert [ask(999), ask(1000)] == [999.0, 1000.0]
        server.settled()


def test_through_batcher() -> None:
    """The same in the library; a budget that two items exceed together makes two batches of them; bad costs are the caller's."""
    sizes: list[list[int]] = []

    async def double(items: list[int]) -> list[int]:
        sizes.append(list(items))
        return [2 * item for item in items]

    async def main() -> None:
        async with Batcher(
            double, max_batch_cost=1000, cost=lambda item: item, tenant_weights={"a": 2.0}, priority_levels=2
        ) as batch:
            with pytest.raises(TooLarge, match=r"an item costs 1002, but a batch of .* may cost at most 1000"):
                await batch(1002)
            with pytest.raises(TooLarge):
                await batch(1001)
            for nonsense in (0, float("nan"), float("inf"), "much"):
                with pytest.raises((ValueError, TypeError)):
                    await batch(nonsense)  # type: ignore[arg-type]
            with pytest.raises(BadRequest, match="priority"):
                await batch(1, priority=3)
            answers = await asyncio.gather(batch(999, tenant="a"), batch(1000), batch(400, tenant="b", priority=2), batch(600))
            assert list(answers) == [1998, 2000, 800, 1200]
            assert all(sum(batch) <= 1000 for batch in sizes)
            assert sorted(item for batch in sizes for item in batch) == [400, 600, 999, 1000]

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_cost": 0},
        {"max_batch_cost": float("nan")},
        {"tenant_weights": {"a": 0}},
        {"priority_levels": 0},
        {"mode": "wild"},
        {"slo_ms": -1},
    ],
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    """They are refused where they are written."""
    with pytest.raises(ValueError, match=next(iter(options)) if "tenant_weights" not in options else "weight of tenant 'a'"):
        Batcher(lambda items: items, **options)  # type: ignore[arg-type,call-overload]
