"""Every asynchronous test of this room runs on both event loops, and leaves no thread behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine to its end on a new loop."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """No executor outlives its test."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-")]
    assert left == []
