"""Typed settings, one section per room, with units in the names. Loading and cross-field checks live beside this file.

Nothing here reads a file, an environment variable or the machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "BatchingSettings",
    "LengthSettings",
    "LevelSettings",
    "ModelSettings",
    "QueueSettings",
    "ServerSettings",
    "Settings",
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword only, typos refused."""


class LengthSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.batching.lengths.INPUT]`: how rows of different length along one axis of an input share a batch.

    `axis` counts the batch as 0. `exact`: only rows of equal length share a batch. `bucket`: each row is padded to the next of
    `edges` (or to the next power of `ratio`), and rows of one bucket share a batch; longer ones than the last edge are refused.
    `pad`: any rows share a batch, padded to the longest. `ragged`: rows are laid end to end, without the batch's dimension, for
    models made for it. `max_length` refuses longer rows, whatever the policy.

    What is padded is filled with `pad_value` (BYTES: 0 stands for empty ones), and the model must be told, by `mask` (the input
    that is 1 where there is data and 0 where there is padding) or by `length` (the input that holds the length of each row). With
    `ragged` it is told by `offsets` (where each row begins, and at last where the last one ends: one number more than there are
    rows), by `length`, or by both. Mask and length are optional for clients then: what they leave out the server makes; offsets,
    and lengths of ragged rows, are always the server's.

    Inputs vary together, and must be of one length in a request, if their entries name the same mask or length, or if the model
    gives their axes the same name (`seq` in ONNX). Of the latter, those without an entry are padded with zeros.

    Outputs are cut back to the length of their request along each axis to which the model gives the same name. Where it does not,
    `outputs` says it, as in `{ hidden = [1], scores = [2, 3], pooled = [] }`: the axes that are as long as this input is.
    """

    policy: Literal["exact", "bucket", "pad", "ragged"] = "exact"
    axis: int = 1
    edges: tuple[int, ...] = ()
    ratio: float | None = None
    pad_value: float | None = None
    mask: str | None = None
    length: str | None = None
    offsets: str | None = None
    outputs: dict[str, tuple[int, ...]] = {}
    max_length: int | None = None


class BatchingSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.batching]`: when a batch starts and how large it may be.

    `mode = "fixed"`: a batch starts when an executor slot is free and its budget (`max_batch_size` rows, `max_batch_cost`) is full,
    or its oldest request has waited `max_delay_ms` since it was accepted. `max_delay_ms = 0` means: whenever a slot is free and
    something waits, run what waits, together. `mode = "adaptive"`: the measured batch times and arrivals decide when to start, what
    goes along, and what can no longer be answered in time; `max_delay_ms` is then the longest that the mode may hold a request back
    (0: its own choice). `adaptive_start` picks its rule for starting: `replay` tries several on recent traffic, `headway` keeps
    starts apart, `now` never holds.

    `preferred_batch_sizes` and `reorder` follow Triton's rules. With `allowed_batch_sizes` batches are padded up to one of these
    sizes, or cut down to one where that is cheaper per row. A request larger than `max_batch_size` is cut and rejoined (`oversize =
    "split"`) or refused (`"reject"`). `cost` says what `max_batch_cost` counts: rows, padded tokens (longest row times rows), or
    what `module:function` says of a request. `order` inside a tenant: by `arrival` or by `deadline` (None: deadline in adaptive
    mode). `early_drop` gives up, when a batch starts, what can no longer be answered in time (None: in adaptive mode);
    `margin_sigmas` is how many standard deviations of the batch time it allows for. `lengths` names the inputs whose rows differ in
    length; `length_window` is how many waiting requests, in multiples of `max_batch_size`, are looked through for rows of like
    length.
    """

    max_batch_size: int = 64
    max_delay_ms: float = 0.0
    mode: Literal["fixed", "adaptive"] = "fixed"
    adaptive_start: Literal["replay", "headway", "now"] = "replay"
    preferred_batch_sizes: tuple[int, ...] = ()
    allowed_batch_sizes: tuple[int, ...] = ()
    oversize: Literal["split", "reject"] = "split"
    reorder: bool = False
    max_batch_cost: float | None = None
    cost: str = "rows"
    order: Literal["arrival", "deadline"] | None = None
    early_drop: bool | None = None
    margin_sigmas: float = 1.64
    lengths: dict[str, LengthSettings] = {}
    length_window: int = 4


class LevelSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.queue.levels.N]`: what differs for priority level N; None takes the queue's own value. Bounds come on top."""

    max_queue_requests: int | None = None
    max_queue_rows: int | None = None
    max_queue_bytes: int | None = None
    default_timeout_ms: float | None = None
    allow_timeout_override: bool | None = None
    timeout_action: Literal["reject", "delay"] | None = None


class QueueSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME.queue]`: how much may wait, for how long, and in what order. `None` means no bound.

    `max_queue_*` count what waits for an executor (accepted, not yet started), exactly. `default_timeout_ms` applies to requests
    that bring none; a request's own timeout counts as it is when smaller, also where there is no default, unless
    `allow_timeout_override` is false. `timeout_action = "delay"` moves an expired request behind all others instead of
    failing it. `slo_ms` is the latency objective: the deadline, for ordering and early drop, of requests that bring none.

    Priority 1 is the highest level; `levels` gives single levels a policy of their own. Levels are strict, unless with `aging_ms` a
    request rises by one level each time it has waited that long, and goes before everything once it has waited its level times as
    long. Tenants share each level by weight (`tenant_weights`, 1 for others) when weights are given or `fair_tenants` is set;
    beyond `max_tenants` at once the rest share one place.
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
    levels: dict[int, LevelSettings] = {}
    aging_ms: float | None = None
    fair_tenants: bool = False
    tenant_weights: dict[str, float] = {}
    max_tenants: int = 256


class ModelSettings(Section, frozen=True, kw_only=True):
    """`[models.NAME]`: which file or object is served, and how it is executed.

    `path` names an ONNX file, or `file.py:Class` / `module:object` for a Python model. `instances` executors run batches at the
    same time; each may have one further batch `staged`. `threads` is the intra-op thread count of each instance (None: the
    CPU budget shared out). `execution`: `thread` runs batches in executor threads; `inline` on the event loop itself, which stands
    still meanwhile; `auto` takes the loop only for a model whose largest batch takes less time than handing it over would.
    `probe` runs the load-time batching checks. `profile`: batch times that were learned are kept in a small file next to the model
    when it is unloaded (`keep`), and are what the next server begins with (`keep`, `read`).
    """

    path: str
    version: str = "1"
    instances: int = 1
    threads: int | None = None
    stage: bool = True
    execution: Literal["auto", "thread", "inline"] = "auto"
    probe: bool = True
    profile: Literal["read", "keep", "off"] = "read"
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
