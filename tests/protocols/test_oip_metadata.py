"""The descriptive answers have exactly the keys and shapes that existing clients read."""

from __future__ import annotations

import json

import pytest

from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings
from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.protocols.oip_metadata import (
    BatchStatistics,
    Duration,
    IndexEntry,
    InferenceStatistics,
    ModelStatistics,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)

SPEC = ModelSpec(
    "onnxruntime_onnx",
    (TensorSpec("image", "FP32", (-1, 1, 8, 8)), TensorSpec("text", "BYTES", (-1,))),
    (TensorSpec("logits", "FP32", (-1, 10)),),
)


def test_server_metadata() -> None:
    """Name, version, extensions; the limits in force when given (case 36)."""
    body = json.loads(server_metadata("0.1"))
    assert (body["name"], body["version"], set(body)) == ("shoal", "0.1", {"name", "version", "extensions"})
    assert "binary_tensor_data" in body["extensions"]
    assert json.loads(server_metadata("0.1", ["a"], {"max_body_bytes": 5})) == {
        "name": "shoal", "version": "0.1", "extensions": ["a"], "limits": {"max_body_bytes": 5},
    }  # fmt: skip


def test_model_metadata() -> None:
    """Shapes include the batch dimension, -1 for what varies."""
    assert json.loads(model_metadata("digits", ["1"], SPEC)) == {
        "name": "digits",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]},
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
    }


def test_model_config_of_a_batching_model() -> None:
    """The words of Triton's configuration: dims without the batch, TYPE_ names, times in microseconds."""
    settings = ModelSettings(
        path="x.onnx",
        version="3",
        instances=2,
        batching=BatchingSettings(max_batch_size=16, max_delay_ms=2.5, preferred_batch_sizes=(4, 8)),
        queue=QueueSettings(
            default_timeout_ms=100.0, timeout_action="delay", max_queue_requests=7, priority_levels=3, default_priority=2
        ),
    )
    assert json.loads(model_config("digits", SPEC, settings)) == {
        "name": "digits",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"specific": {"versions": [3]}},
        "max_batch_size": 16,
        "input": [
            {"name": "image", "data_type": "TYPE_FP32", "dims": [1, 8, 8]},
            {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}},
        ],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [10]}],
        "instance_group": [{"name": "digits_0", "kind": "KIND_CPU", "count": 2}],
        "dynamic_batching": {
            "preferred_batch_size": [4, 8],
            "max_queue_delay_microseconds": 2500,
            "preserve_ordering": False,
            "priority_levels": 3,
            "default_priority_level": 2,
            "default_queue_policy": {
                "timeout_action": "DELAY",
                "default_timeout_microseconds": 100_000,
                "allow_timeout_override": True,
                "max_queue_size": 7,
            },
        },
    }


def test_model_config_without_batching() -> None:
    """A model that does not batch has max_batch_size 0, whole dims and no batcher."""
    spec = ModelSpec("python", (TensorSpec("x", "INT8", (3, -1)),), (TensorSpec("y", "INT8", (-1,)),), batchable=False)
    config = json.loads(model_config("m", spec, ModelSettings(path="m.py:M"), backend="py"))
    assert (config["max_batch_size"], config["backend"], "dynamic_batching" in config) == (0, "py", False)
    assert config["input"] == [{"name": "x", "data_type": "TYPE_INT8", "dims": [3, -1]}]


@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_config_datatypes(datatype: str) -> None:
    """Every datatype has its TYPE_ name."""
    spec = ModelSpec("python", (TensorSpec("x", datatype, (-1, 2)),), ())
    config = json.loads(model_config("m", spec, ModelSettings(path="m.py:M")))
    assert config["input"][0]["data_type"] == ("TYPE_STRING" if datatype == "BYTES" else "TYPE_" + datatype)


def test_statistics() -> None:
    """All keys that performance tools read are there, with counts and nanoseconds."""
    stats = ModelStatistics(
        name="m",
        version="1",
        last_inference=5,
        inference_count=8,
        execution_count=2,
        inference_stats=InferenceStatistics(success=Duration(4, 100), queue=Duration(4, 40)),
        batch_stats=[BatchStatistics(batch_size=4, compute_infer=Duration(2, 50))],
    )
    nothing = {"count": 0, "ns": 0}
    assert json.loads(model_statistics([stats])) == {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "last_inference": 5,
                "inference_count": 8,
                "execution_count": 2,
                "inference_stats": {
                    "success": {"count": 4, "ns": 100},
                    "fail": nothing,
                    "queue": {"count": 4, "ns": 40},
                    "compute_input": nothing,
                    "compute_infer": nothing,
                    "compute_output": nothing,
                    "cache_hit": nothing,
                    "cache_miss": nothing,
                },
                "batch_stats": [
                    {"batch_size": 4, "compute_input": nothing, "compute_infer": {"count": 2, "ns": 50}, "compute_output": nothing}
                ],
            }
        ]
    }


def test_repository_index() -> None:
    """Entries show what is known of them and leave the rest out."""
    entries = [IndexEntry("a", "1", "READY"), IndexEntry("b", state="UNAVAILABLE", reason="no file")]
    assert json.loads(repository_index(entries)) == [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "state": "UNAVAILABLE", "reason": "no file"},
    ]
