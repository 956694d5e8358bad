"""A model's profile: what its batches take, kept in a small JSON file next to the model, so that a server begins with what the last
one has learned.

A profile only counts for what it was measured on: its fingerprint covers the model file, the libraries that run it, the processor,
the threads and whatever else decides about batch times. Nothing that is wrong with a profile is ever fatal: it is said in the log,
and the server learns anew. Reads and writes files; knows no lanes and no scheduler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.config.loading import EMBEDDED_MODELS, python_target
from shoal.config.settings import ModelSettings
from shoal.core.latency import LatencyModel

__all__ = ["fingerprint", "keep_profile", "profile_path", "read_profile"]

_log = logging.getLogger("shoal.engine")
_FORMAT: Final = 1
_SUFFIX: Final = ".profile.json"
_MOST_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 1 << 20


def profile_path(model_path: str) -> Path | None:
    """Where a model's profile lies: `model.onnx.profile.json`, `file.py.Class.profile.json`. None for a model that is no file."""
    if model_path in EMBEDDED_MODELS:
        return None
    target = python_target(model_path)
    if target is None:
        return Path(model_path + _SUFFIX)
    file, name = target
    return Path(f"{file}.{name}{_SUFFIX}") if file.endswith(".py") else None


def fingerprint(settings: ModelSettings, threads: int) -> dict[str, Any]:
    """What batch times depend on, in plain values. Reads the whole model file. Raises OSError where it cannot be read.

    Of the settings: how many instances with how many threads, how they are executed, what batches are padded to, and in what unit
    work is counted. A Python model that reads other files (weights) has to be measured anew by hand when those change.
    """
    target = python_target(settings.path)
    batching = settings.batching
    return {
        "model": _digest(Path(settings.path if target is None else target[0])),
        "object": "" if target is None else target[1],
        "instances": settings.instances,
        "threads": threads,
        "execution": settings.execution,
        "unit": batching.cost,
        "lengths": msgspec.to_builtins(batching.lengths),
        "allowed_batch_sizes": list(batching.allowed_batch_sizes),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "libraries": {name: metadata.version(name) for name in ("numpy", "onnxruntime")},
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _digest(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.lower().startswith(("model name", "cpu model", "processor model")):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()


def read_profile(path: Path, wanted: dict[str, Any], *, margin_sigmas: float) -> LatencyModel | None:
    """The batch times in a profile of just this fingerprint; None for anything else, which the log tells where there is a file."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("profile %s cannot be read, so batch times are learned anew: %s", path, error.strerror or error)
        return None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        content = msgspec.json.decode(data)
        if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("fingerprint"), dict):
            raise ValueError("it is not a profile of this format")
        found = content["fingerprint"]
        # JSON has no tuples, so what is compared has been through it too.
        expected = msgspec.json.decode(msgspec.json.encode(wanted))
        other = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
        if other:
            _log.info("profile %s is of another %s, so batch times are learned anew", path, ", ".join(other))
            return None
        batch_times = content.get("batch_times")
        return LatencyModel.from_record(batch_times if isinstance(batch_times, dict) else {}, margin_sigmas=margin_sigmas)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        _log.warning("profile %s is of no use, so batch times are learned anew: %s", path, error)
        return None


def keep_profile(path: Path, fingerprint: dict[str, Any], latency: LatencyModel) -> bool:
    """Write a profile, whole or not at all. False, with a line in the log, if that fails."""
    content = {"format": _FORMAT, "fingerprint": fingerprint, "batch_times": latency.to_record()}
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", suffix=".new", delete=False) as file:
            new = Path(file.name)
            try:
                file.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
                file.flush()
                os.fsync(file.fileno())
                new.chmod(0o644)  # temporary files are for their owner only
                new.replace(path)
            except BaseException:
                new.unlink()
                raise
    except OSError as error:
        _log.warning("profile %s could not be kept: %s", path, error.strerror or error)
        return False
    return True
