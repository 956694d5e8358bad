"""Shoal as a library in a FastAPI application: each request brings one image, the model sees what came together.

    .venv/bin/uvicorn --app-dir examples fastapi_app:app --port 9000
    curl -s http://127.0.0.1:9000/classify -H 'content-type: application/json' -d "{\"pixels\": $(python3 -c 'print([0] * 64)')}"
    curl -s http://127.0.0.1:9000/batches

The application keeps its own web framework, its own event loop and its own way to run the model; `Batcher` only gathers the calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from shoal import Batcher
from shoal.errors import Capacity
from shoal.models import digits_path

session = onnxruntime.InferenceSession(digits_path(), providers=["CPUExecutionProvider"])


def classify(images: np.ndarray) -> np.ndarray:
    """[N, 1, 8, 8] to [N] digits. Annotated with arrays, so Shoal stacks the images; it runs in a thread beside the event loop."""
    (logits,) = session.run(["logits"], {"image": images})
    return logits.argmax(axis=1)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # Opened with the application, on its event loop; at shutdown what was accepted is answered first.
    async with Batcher(classify, max_batch_size=64, max_delay_ms=2, max_queue_rows=1000) as batcher:
        app.state.classify = batcher
        yield


app = FastAPI(title="Handwritten digits", lifespan=lifespan)


class Image(BaseModel):
    """An image of 8 by 8 pixels, row by row, 0 (white) to 16 (black)."""

    pixels: Annotated[list[Annotated[float, Field(ge=0, le=16)]], Field(min_length=64, max_length=64)]


@app.post("/classify")
async def answer(image: Image, request: Request) -> dict[str, int]:
    try:
        digit = await request.app.state.classify(np.array(image.pixels, np.float32).reshape(1, 8, 8))
    except Capacity as full:  # more waits than may wait: say so at once, instead of letting everyone wait
        seconds = str(-(-(full.retry_after_ms or 1000) // 1000))
        raise HTTPException(full.http_status, full.message, headers={"retry-after": seconds}) from None
    return {"digit": int(digit)}


@app.get("/batches")
async def batches(request: Request) -> dict[str, int]:
    stats = request.app.state.classify.stats
    return {"images": stats.inferences, "runs": stats.executions}
