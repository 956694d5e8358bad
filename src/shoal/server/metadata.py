"""Answers about models, out of the engine's present state: metadata, configuration, statistics, repository index."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal import __version__
from shoal.config.settings import ServerSettings
from shoal.engine.registry import Engine, ModelState
from shoal.protocols import oip_metadata
from shoal.protocols.oip_metadata import IndexEntry

__all__ = [
    "index_answer",
    "model_config_answer",
    "model_metadata_answer",
    "server_metadata_answer",
    "statistics_answer",
]


def server_metadata_answer(settings: ServerSettings) -> bytes:
    """Name, version, extensions, and the size limits in force."""
    limits = {"max_body_bytes": settings.max_body_bytes, "max_header_bytes": settings.max_header_bytes}
    return oip_metadata.server_metadata(__version__, limits=limits)


def model_metadata_answer(engine: Engine, name: str, version: str | None) -> bytes:
    """What a model takes and gives. Raises UnknownModel, UnknownVersion, NotReady."""
    lane = engine.lane(name, version)
    return oip_metadata.model_metadata(name, engine.versions(name), lane.spec)


def model_config_answer(engine: Engine, name: str, version: str | None) -> bytes:
    """A model's configuration in the words of existing clients. Raises UnknownModel, UnknownVersion, NotReady."""
    lane = engine.lane(name, version)
    return oip_metadata.model_config(name, lane.spec, engine.status(name, version).settings)


def statistics_answer(engine: Engine, name: str | None, version: str | None) -> bytes:
    """The statistics extension, for one model (all its versions unless one is named) or for all; with our own figures beside it.

    Existing clients pass over the key `shoal`: dispatch reasons, what waits, and how requests ended otherwise. Raises UnknownModel,
    UnknownVersion, NotReady.
    """
    if name is not None:
        engine.lane(name, version)
    entries: list[dict[str, Any]] = []
    for lane in engine.lanes():
        if name is not None and (lane.name != name or version not in (None, lane.version)):
            continue
        stats, snapshot = lane.stats, lane.snapshot()
        entry = stats.as_oip(lane.name, lane.version)
        entry["shoal"] = {
            "mean_batch_rows": round(stats.mean_batch_rows(), 3),
            "padding_factor": round(stats.padding_factor(), 3),
            "dispatch": {reason: count for reason, count in snapshot.batches.items() if count},
            "waiting_requests": snapshot.waiting_requests,
            "waiting_rows": snapshot.waiting_rows,
            "running_rows": snapshot.running_rows,
            "oldest_wait_ms": round(snapshot.oldest_wait_ns / 1e6, 3),
            "refused": dict(stats.refused),
            "expired": stats.expired,
            "cancelled": stats.cancelled,
            "discarded_rows": stats.discarded_rows,
            "bisections": stats.bisections,
            "reruns": stats.reruns,
            "ran_alone": stats.ran_alone,
            "out_of_memory": stats.out_of_memory,
            "memory_cap_rows": lane.memory_cap_rows,
            "workers_lost": stats.workers_lost,
            "loop_errors": stats.loop_errors,
        }
        entries.append(entry)
    return msgspec.json.encode({"model_stats": entries})


def index_answer(engine: Engine, *, ready_only: bool) -> bytes:
    """All versions with their states, and why those that are not ready are not."""
    return oip_metadata.repository_index(
        [
            IndexEntry(name=status.name, version=status.version, state=status.state.value, reason=status.reason or None)
            for status in engine.states
            if status.state is ModelState.READY or not ready_only
        ]
    )
