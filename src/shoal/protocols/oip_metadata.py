"""The descriptive answers of Open Inference Protocol over HTTP: server and model metadata, model configuration, statistics, index.

Pure functions from settings, specs and plain counts to JSON bytes. Who counts, and which models exist, is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from shoal.config.settings import ModelSettings
from shoal.datatypes import ModelSpec, TensorSpec

__all__ = [
    "EXTENSIONS",
    "BatchStatistics",
    "Duration",
    "IndexEntry",
    "InferenceStatistics",
    "ModelStatistics",
    "model_config",
    "model_metadata",
    "model_statistics",
    "repository_index",
    "server_metadata",
]

EXTENSIONS: Final = ("binary_tensor_data", "classification", "model_configuration", "parameters", "schedule_policy", "statistics")
_encode = msgspec.json.Encoder().encode


class Duration(msgspec.Struct, frozen=True):
    """How often something happened and how long it took altogether, in nanoseconds."""

    count: int = 0
    ns: int = 0


_NOTHING: Final = Duration()


class InferenceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request durations: the whole of answered and failed requests, and the stages of answered ones. Counts are requests."""

    success: Duration = _NOTHING
    fail: Duration = _NOTHING
    queue: Duration = _NOTHING
    compute_input: Duration = _NOTHING
    compute_infer: Duration = _NOTHING
    compute_output: Duration = _NOTHING
    cache_hit: Duration = _NOTHING
    cache_miss: Duration = _NOTHING


class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of all executions with `batch_size` rows. Counts are executions."""

    batch_size: int
    compute_input: Duration = _NOTHING
    compute_infer: Duration = _NOTHING
    compute_output: Duration = _NOTHING


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one model version.

    `last_inference` is milliseconds since the epoch, 0 if there was none; `inference_count` counts rows, `execution_count` batches.
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference_stats: InferenceStatistics = InferenceStatistics()
    batch_stats: Sequence[BatchStatistics] = ()


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the repository index. `reason` says why a model is not READY."""

    name: str
    version: str | None = None
    state: Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"] | None = None
    reason: str | None = None


def server_metadata(version: str, extensions: Sequence[str] = EXTENSIONS, limits: Mapping[str, int] | None = None) -> bytes:
    """Answer of GET `/v2`. `limits` (ours; clients ignore it) shows the size limits in force."""
    body: dict[str, Any] = {"name": "shoal", "version": version, "extensions": extensions}
    if limits is not None:
        body["limits"] = limits
    return _encode(body)


def _describe(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for tensor in tensors:
        described.append({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape})
        if tensor.optional:
            described[-1]["optional"] = True
    return described


def model_metadata(name: str, versions: Sequence[str], spec: ModelSpec) -> bytes:
    """Answer of GET `/v2/models/{name}`: shapes with the batch dimension, -1 for what varies.

    Inputs that clients may leave out have `optional: true`, here as in the configuration; existing clients pass over it.
    """
    inputs, outputs = _describe(spec.inputs), _describe(spec.outputs)
    return _encode({"name": name, "versions": versions, "platform": spec.platform, "inputs": inputs, "outputs": outputs})


def _config_tensors(tensors: Sequence[TensorSpec], batchable: bool) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for tensor in tensors:
        dims = tensor.row_shape if batchable else tensor.shape
        data_type = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
        entry: dict[str, Any] = {"name": tensor.name, "data_type": data_type, "dims": dims or (1,)}
        if not dims:
            entry["reshape"] = {"shape": ()}  # the form that existing clients know for a tensor without dimensions
        if tensor.optional:
            entry["optional"] = True
        entries.append(entry)
    return entries


def _microseconds(milliseconds: float | None) -> int:
    return round(milliseconds * 1000) if milliseconds else 0


def model_config(name: str, spec: ModelSpec, settings: ModelSettings, *, backend: str | None = None) -> bytes:
    """Answer of GET `/v2/models/{name}/config`, in the words of Triton's model configuration, as existing clients parse it.

    `max_batch_size` is 0 for a model that does not batch; dims have no batch dimension where it does. `backend` defaults to the
    first word of the platform. A queue bound in rows has no word there; `max_queue_size` is the bound in requests, 0 for none.
    """
    batching, queue = settings.batching, settings.queue
    config: dict[str, Any] = {
        "name": name,
        "platform": spec.platform,
        "backend": backend or spec.platform.partition("_")[0],
        "version_policy": {"specific": {"versions": [int(settings.version) if settings.version.isdecimal() else 1]}},
        "max_batch_size": batching.max_batch_size if spec.batchable else 0,
        "input": _config_tensors(spec.inputs, spec.batchable),
        "output": _config_tensors(spec.outputs, spec.batchable),
        "instance_group": [{"name": f"{name}_0", "kind": "KIND_CPU", "count": settings.instances}],
    }
    if spec.batchable:
        config["dynamic_batching"] = {
            "preferred_batch_size": batching.preferred_batch_sizes,
            "max_queue_delay_microseconds": _microseconds(batching.max_delay_ms),
            "preserve_ordering": False,
            "priority_levels": queue.priority_levels if queue.priority_levels > 1 else 0,
            "default_priority_level": queue.default_priority if queue.priority_levels > 1 else 0,
            "default_queue_policy": {
                "timeout_action": queue.timeout_action.upper(),
                "default_timeout_microseconds": _microseconds(queue.default_timeout_ms),
                "allow_timeout_override": queue.allow_timeout_override,
                "max_queue_size": queue.max_queue_requests or 0,
            },
        }
    return _encode(config)


def model_statistics(models: Sequence[ModelStatistics]) -> bytes:
    """Answer of GET `/v2/models/{name}/stats` and `/v2/models/stats`."""
    return _encode({"model_stats": models})


def repository_index(entries: Sequence[IndexEntry]) -> bytes:
    """Answer of POST `/v2/repository/index`."""
    return _encode(entries)
