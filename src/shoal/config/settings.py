"""Typed settings, one section per room, with units in the names. Loading and cross-field checks live beside this file.

Nothing here reads a file, an environment variable or the machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["BatchingSettings", "ModelSettings", "QueueSettings", "ServerSettings", "Settings"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword only, typos refused."""


class BatchingSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.batching]`: when a batch starts and how large it may be.

    A batch starts when an executor slot is free and its budget (`max_batch_size` rows) is full, or its oldest request has waited
    `max_delay_ms` since it was accepted. `max_delay_ms = 0` means: whenever a slot is free and something waits, run what waits,
    together. `preferred_batch_sizes` and `reorder` follow Triton's rules. A request larger than `max_batch_size` is cut and
    rejoined (`oversize = "split"`) or refused (`"reject"`).
    """

    max_batch_size: int = 64
    max_delay_ms: float = 0.0
    mode: Literal["fixed", "adaptive"] = "fixed"
    preferred_batch_sizes: tuple[int, ...] = ()
    allowed_batch_sizes: tuple[int, ...] = ()
    oversize: Literal["split", "reject"] = "split"
    reorder: bool = False


class QueueSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.queue]`: how much may wait, and for how long. `None` means no bound.

    `max_queue_*` count what waits for an executor (accepted, not yet started), exactly. `default_timeout_ms` applies to requests
    that bring none; a request's own timeout counts as it is when smaller, also where there is no default, unless
    `allow_timeout_override` is false. `timeout_action = "delay"` moves an expired request behind all others instead of
    failing it.
    """

    max_queue_requests: int | None = None
    max_queue_rows: int | None = 4096
    max_queue_bytes: int | None = 1 << 30
    default_timeout_ms: float | None = None
    allow_timeout_override: bool = True
    timeout_action: Literal["reject", "delay"] = "reject"
    slo_ms: float | None = None
    priority_levels: int = 1
    default_priority: int = 1


class ModelSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME]`: which file or object is served, and how it is executed.

    `path` names an ONNX file, or `file.py:Class` / `module:object` for a Python model. `instances` executors run batches at the
    same time; each may have one further batch `staged`. `threads` is the intra-op thread count of each instance (None: the
    CPU budget shared out). `execution`: `thread` runs batches in executor threads; `inline` on the event loop itself, which stands
    still meanwhile; `auto` takes the loop only for a model whose largest batch takes less time than handing it over would.
    `probe` runs the load-time batching checks.
    """

    path: str
    version: str = "1"
    instances: int = 1
    threads: int | None = None
    stage: bool = True
    execution: Literal["auto", "thread", "inline"] = "auto"
    probe: bool = True
    batching: BatchingSettings = BatchingSettings()
    queue: QueueSettings = QueueSettings()


class ServerSettings(Section, frozen=True, kw_only=True):
    """`[server]`: addresses, limits and timeouts of the front ends."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    admin_port: int = 8002
    stream_port: int = 8003
    tls_certificate: str | None = None
    tls_key: str | None = None
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_connections: int = 10_000
    max_pipelined_requests: int = 64
    header_timeout_ms: float = 10_000.0
    body_timeout_ms: float = 60_000.0
    idle_timeout_ms: float = 75_000.0
    drain_timeout_ms: float = 30_000.0
    write_buffer_bytes: int = 4 << 20
    overload_status: int = 429
    unready_when_full: bool = False
    strict_readiness: bool = True
    exit_on_load_error: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole `shoal.toml`."""

    server: ServerSettings = ServerSettings()
    models: dict[str, ModelSettings] = {}
