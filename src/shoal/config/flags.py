"""Settings from command-line flags: a whole `Settings` for one model, or a settings file with parts of `[server]` replaced.

Flags that were not given are `None` and leave the default, or the file's value, in place. Parsing of words is the CLI's work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.loading import EMBEDDED_MODELS, python_target
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings

__all__ = ["default_model_name", "settings_for_model", "with_server_flags"]


def default_model_name(model: str) -> str:
    """The name of a model when none is given: the file's stem, or the class or function in lower case.

    `digits` → `digits`, `path/ResNet 50.onnx` → `ResNet-50`, `my_models.py:Sentiment` → `sentiment`.
    """
    if model in EMBEDDED_MODELS:
        return model
    target = python_target(model)
    word = Path(model).stem if target is None else target[1].rpartition(".")[2].lower()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-._") or "model"


def settings_for_model(model: str, flags: Mapping[str, Any], *, name: str | None = None) -> Settings:
    """Settings that serve one model. `flags` maps settings' own names (`max_batch_size`, `http_port`, …) to values or `None`."""
    given = {key: value for key, value in flags.items() if value is not None}
    model_settings = ModelSettings(
        path=model,
        batching=BatchingSettings(**_taken(BatchingSettings, given)),
        queue=QueueSettings(**_taken(QueueSettings, given)),
        **_taken(ModelSettings, given),
    )
    server = ServerSettings(**_taken(ServerSettings, given))
    if given:
        raise TypeError(f"no such settings: {', '.join(sorted(given))}")
    return Settings(server=server, models={default_model_name(model) if name is None else name: model_settings})


def with_server_flags(settings: Settings, flags: Mapping[str, Any]) -> Settings:
    """The same settings with the `[server]` flags that were given (not `None`) in place of the file's values."""
    given = {key: value for key, value in flags.items() if value is not None}
    if not given:
        return settings
    return msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **given))


def _taken(kind: type[msgspec.Struct], given: dict[str, Any]) -> dict[str, Any]:
    """Take those flags out of `given` that are settings of `kind`. No name stands in two sections, so the order does not matter."""
    return {name: given.pop(name) for name in kind.__struct_fields__ if name in given}
