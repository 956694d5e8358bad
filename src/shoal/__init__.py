"""Shoal gathers independent inference requests into batches, runs each batch as one tensor operation, and answers one by one.

This module holds the public names of the library and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.batched_function import batched
    from shoal.batcher import Batcher

__all__ = ["Batcher", "__version__", "batched"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The library's names are imported when they are first asked for: `shoal --version` needs none of them."""
    if name == "Batcher":
        from shoal.batcher import Batcher

        return Batcher
    if name == "batched":
        from shoal.batched_function import batched

        return batched
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
