"""Rules that settings must keep, alone and among each other, and what to change where one is broken.

Types and names are checked while loading (`loading.py`). Here the files that settings name are looked for, but never opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shoal.config.check_lengths import length_faults
from shoal.config.loading import EMBEDDED_MODELS, python_target
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings

__all__ = ["Problem", "check_settings", "errors_of", "warnings_of"]

MAX_TIME_MS = 86_400_000.0
"""No window, timeout or objective may be longer than a day: longer ones are slips of the unit, and overflow timers."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED_NAMES = {"stats": "/v2/models/stats is the address of the statistics of all models"}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One broken rule: where (`models.digits.batching.max_delay_ms`), what is wrong and what to change, and whether it is fatal."""

    where: str
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message}"


def check_settings(settings: Settings, *, cpu_count: int | None = None) -> list[Problem]:
    """Everything that is wrong with the settings as a whole, errors first; empty when all is well.

    `cpu_count` is the number of CPUs that the process may use; without it the thread budget is not judged. Whether a model can be
    loaded is not looked at; whether its file is there, is.
    """
    problems = list(_check_server(settings.server))
    if not settings.models:
        problems.append(Problem(where="models", message='no model is set up; add a table [models.NAME] with path = "..."'))
    folded: dict[str, str] = {}
    for name, model in settings.models.items():
        problems += _check_model(name, model, settings.server)
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            text = f"differs from the model {other!r} only in upper and lower case; clients will mix them up: rename one"
            problems.append(Problem(where=f"models.{name}", message=text, severity="warning"))
    if cpu_count is not None:
        problems += _check_threads(settings, cpu_count)
    return sorted(problems, key=lambda problem: problem.severity != "error")


def errors_of(problems: Sequence[Problem]) -> list[Problem]:
    """Those that keep the server from starting."""
    return [problem for problem in problems if problem.severity == "error"]


def warnings_of(problems: Sequence[Problem]) -> list[Problem]:
    """Those that are probably not meant, but work."""
    return [problem for problem in problems if problem.severity == "warning"]


class _Checker:
    """Collects the problems of one section; `section` goes before each setting's name."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.found: list[Problem] = []

    def error(self, name: str, message: str) -> None:
        self.found.append(Problem(where=f"{self.section}.{name}", message=message))

    def warn(self, name: str, message: str) -> None:
        self.found.append(Problem(where=f"{self.section}.{name}", message=message, severity="warning"))

    def at_least(self, name: str, value: int | None, least: int) -> bool:
        """False (and an error) when an integer that is set is smaller than `least`."""
        if value is not None and value < least:
            self.error(name, f"is {value}, must be {least} or more")
            return False
        return True

    def time_ms(self, name: str, value: float | None, *, zero_allowed: bool) -> bool:
        """False (and an error) when a time that is set is negative, infinite, not a number, or longer than a day."""
        if value is None:
            return True
        if not math.isfinite(value):
            self.error(name, f"is {value}, must be a finite number of milliseconds")
        elif value < 0:
            self.error(name, f"is {value:g}, must be 0 or more")
        elif value == 0 and not zero_allowed:
            self.error(name, "is 0, must be more than 0; leave it out for its default")
        elif value > MAX_TIME_MS:
            self.error(name, f"is {value:g} ms, more than a day; times are in milliseconds")
        else:
            return True
        return False


def _check_server(server: ServerSettings) -> Iterator[Problem]:
    check = _Checker("server")
    if not server.host or server.host != server.host.strip() or any(character.isspace() for character in server.host):
        check.error(
            "host", f"is {server.host!r}, must be an address or a host name, such as 127.0.0.1, or 0.0.0.0 for all interfaces"
        )
    elif "/" in server.host:
        check.error("host", f"is {server.host!r}, must be an address or a host name without a scheme or a path")
    used: dict[int, str] = {}
    for name in ("http_port", "grpc_port", "admin_port", "stream_port"):
        port = getattr(server, name)
        if not 0 <= port <= 65_535:
            check.error(name, f"is {port}, must be within 0…65535 (0 lets the system choose)")
        elif port and port in used:
            check.error(name, f"is {port}, which {used[port]} has already; give each its own port, or 0 to let the system choose")
        else:
            used[port] = name
    _check_tls(check, server)
    check.at_least("max_body_bytes", server.max_body_bytes, 1)
    check.at_least("max_header_bytes", server.max_header_bytes, 256)
    check.at_least("max_connections", server.max_connections, 1)
    check.at_least("max_pipelined_requests", server.max_pipelined_requests, 1)
    check.at_least("write_buffer_bytes", server.write_buffer_bytes, 1)
    for name in ("header_timeout_ms", "body_timeout_ms", "idle_timeout_ms"):
        check.time_ms(name, getattr(server, name), zero_allowed=False)
    check.time_ms("drain_timeout_ms", server.drain_timeout_ms, zero_allowed=True)
    if server.overload_status not in (429, 503):
        check.error("overload_status", f"is {server.overload_status}, must be 429 (the default) or 503 (as Triton answers)")
    yield from check.found


def _check_tls(check: _Checker, server: ServerSettings) -> None:
    if (server.tls_certificate is None) != (server.tls_key is None):
        present, absent = ("tls_certificate", "tls_key") if server.tls_key is None else ("tls_key", "tls_certificate")
        check.error(absent, f"is missing although {present} is set; TLS needs both, plain HTTP neither")
    for name in ("tls_certificate", "tls_key"):
        path = getattr(server, name)
        if path is not None and not Path(path).is_file():
            check.error(name, f"there is no file {path!r}; give the path of a PEM file")


def _check_model(name: str, model: ModelSettings, server: ServerSettings) -> Iterator[Problem]:
    where = f"models.{name}" if name else 'models.""'
    check = _Checker(where)
    if not _MODEL_NAME.fullmatch(name):
        what = "must be 1 to 128 letters, digits, '.', '_' or '-' of ASCII, the first a letter or digit: it is part of addresses"
        yield Problem(where=where, message=f"the model name {what}")
    elif name in _RESERVED_NAMES:
        yield Problem(where=where, message=f"the name {name!r} is taken: {_RESERVED_NAMES[name]}; choose another")
    _check_path(check, model.path)
    if not _MODEL_NAME.fullmatch(model.version):
        check.error("version", f'is {model.version!r}, must be a short word such as "1": it is part of addresses')
    check.at_least("instances", model.instances, 1)
    if model.execution == "inline" and model.instances > 1:
        check.error("execution", 'what runs on the event loop has one instance; set instances = 1 or execution = "thread"')
    check.at_least("threads", model.threads, 1)
    yield from check.found
    yield from _check_batching(f"{where}.batching", model.batching)
    yield from _check_queue(f"{where}.queue", model.queue, model.batching, server)


def _check_path(check: _Checker, path: str) -> None:
    if not path.strip():
        check.error("path", "is empty, must name an ONNX file, file.py:Class, module:object, or an embedded model such as digits")
        return
    if path in EMBEDDED_MODELS:
        return
    target = python_target(path)
    if target is not None and not target[0].endswith(".py"):
        return
    file = path if target is None else target[0]
    if "\0" in file:
        check.error("path", "holds a NUL character")
    elif Path(file).is_dir():
        check.error("path", f"{file!r} is a folder; give the model's file in it")
    elif not Path(file).is_file():
        embedded = ", ".join(sorted(EMBEDDED_MODELS))
        check.error("path", f"there is no file {file!r}; embedded models: {embedded}")
    elif target is None and file.endswith(".py"):
        check.error("path", f"{file!r} is a Python file; name the class or function in it too: {Path(file).name}:Class")


def _check_batching(where: str, batching: BatchingSettings) -> Iterator[Problem]:
    check = _Checker(where)
    limit_ok = check.at_least("max_batch_size", batching.max_batch_size, 1)
    check.time_ms("max_delay_ms", batching.max_delay_ms, zero_allowed=True)
    for name in ("preferred_batch_sizes", "allowed_batch_sizes"):
        sizes: tuple[int, ...] = getattr(batching, name)
        if list(sizes) != sorted(set(sizes)):
            check.error(name, f"is {list(sizes)}, must rise without repeats: write {sorted(set(sizes))}")
        if limit_ok:
            outside = [size for size in sizes if not 1 <= size <= batching.max_batch_size]
            if outside:
                text = f"{_listed(outside)} outside 1…{batching.max_batch_size}; remove them, or raise max_batch_size"
                check.error(name, text)
    _check_budget(check, batching)
    if not 0 <= batching.margin_sigmas <= 6:  # also what is not a number
        check.error("margin_sigmas", f"is {batching.margin_sigmas:g}, must be within 0…6")
    check.at_least("length_window", batching.length_window, 1)
    for name, fault in length_faults(batching.lengths):
        check.error(f"lengths.{name}", fault)
    if batching.early_drop and batching.order == "arrival":
        check.error("order", 'is "arrival", but early_drop works on deadlines; leave order out, or set early_drop = false')
    if batching.mode == "adaptive":
        if batching.preferred_batch_sizes:
            check.warn("preferred_batch_sizes", 'has no effect with mode = "adaptive", which finds the size by itself')
        if batching.max_delay_ms:
            check.warn(
                "max_delay_ms",
                f'with mode = "adaptive" it is the longest that a request may be held back: {batching.max_delay_ms:g} ms',
            )
    elif batching.preferred_batch_sizes and batching.max_delay_ms == 0:
        check.warn("preferred_batch_sizes", "has no effect while max_delay_ms = 0: nothing waits for a size; set max_delay_ms")
    yield from check.found


def _check_budget(check: _Checker, batching: BatchingSettings) -> None:
    limit = batching.max_batch_cost
    if limit is not None and not (math.isfinite(limit) and limit >= 1):
        check.error("max_batch_cost", f"is {limit:g}, must be a finite number of 1 or more: a single row costs that much")
    if batching.cost == "tokens":
        if not any(length.policy in ("pad", "bucket", "ragged") for length in batching.lengths.values()):
            text = 'is "tokens", but no input has a length policy that puts rows of different length into one batch; see lengths'
            check.error("cost", text)
    elif batching.cost != "rows":
        if python_target(batching.cost) is None:
            check.error("cost", f'is {batching.cost!r}, must be "rows", "tokens", or module:function')
        elif limit is None:
            check.warn("cost", "is asked of every request, but max_batch_cost sets no budget for it; set max_batch_cost")
    elif limit is not None and 1 <= limit < batching.max_batch_size:
        check.warn("max_batch_cost", f"is {limit:g} rows, less than max_batch_size = {batching.max_batch_size}, which it replaces")


def _check_queue(where: str, queue: QueueSettings, batching: BatchingSettings, server: ServerSettings) -> Iterator[Problem]:
    check = _Checker(where)
    check.at_least("max_queue_requests", queue.max_queue_requests, 1)
    rows, size = queue.max_queue_rows, queue.max_queue_bytes
    if check.at_least("max_queue_rows", rows, 1) and rows is not None and rows < batching.max_batch_size:
        text = f"is {rows}, less than max_batch_size = {batching.max_batch_size}: batches can never fill; raise it"
        check.warn("max_queue_rows", text)
    if check.at_least("max_queue_bytes", size, 1) and size is not None and size < server.max_body_bytes:
        text = f"is {size}, less than server.max_body_bytes = {server.max_body_bytes}: "
        check.warn("max_queue_bytes", text + "the largest bodies can never be queued; raise it, or lower max_body_bytes")
    delay_ms = batching.max_delay_ms if math.isfinite(batching.max_delay_ms) else -1.0
    for name, meaning in (
        ("slo_ms", "the objective could never be met"),
        ("default_timeout_ms", "lone requests would always expire"),
    ):
        value = getattr(queue, name)
        if check.time_ms(name, value, zero_allowed=False) and value is not None and value <= delay_ms:
            text = f"is {value:g}, must be more than max_delay_ms = {delay_ms:g}: {meaning}"
            check.error(name, f"{text}; raise it, or lower max_delay_ms")
    acts = batching.mode == "adaptive" or batching.early_drop or batching.order == "deadline"
    if queue.slo_ms is not None and not check.found and not acts:
        check.warn("slo_ms", 'has no effect: nothing acts on it; set mode = "adaptive", early_drop = true, or order = "deadline"')
    if queue.slo_ms is not None and queue.default_timeout_ms is not None and queue.default_timeout_ms < queue.slo_ms:
        check.warn(
            "default_timeout_ms", f"is {queue.default_timeout_ms:g}, less than slo_ms = {queue.slo_ms:g}: requests end before it"
        )
    if not queue.allow_timeout_override and queue.default_timeout_ms is None:
        check.warn(
            "allow_timeout_override", "is false without default_timeout_ms: no request ever times out; set default_timeout_ms"
        )
    if check.at_least("priority_levels", queue.priority_levels, 1) and not 1 <= queue.default_priority <= queue.priority_levels:
        text = f"is {queue.default_priority}, must be within 1…priority_levels ({queue.priority_levels}); 1 is the highest"
        check.error("default_priority", text)
    _check_levels(check, queue)
    _check_tenants(check, queue)
    yield from check.found


def _check_levels(check: _Checker, queue: QueueSettings) -> None:
    check.time_ms("aging_ms", queue.aging_ms, zero_allowed=False)
    if queue.aging_ms is not None and queue.priority_levels == 1:
        check.warn("aging_ms", "has little use with one priority level: there is nothing to rise to but the front of the queue")
    for level, own in queue.levels.items():
        if not 1 <= level <= queue.priority_levels:
            check.error(f"levels.{level}", f"there is no such level; levels are 1…priority_levels ({queue.priority_levels})")
        for name in ("max_queue_requests", "max_queue_rows", "max_queue_bytes"):
            value, whole = getattr(own, name), getattr(queue, name)
            if check.at_least(f"levels.{level}.{name}", value, 1) and value is not None and whole is not None and value > whole:
                check.warn(f"levels.{level}.{name}", f"is {value}, more than {name} = {whole} of the whole queue, which holds too")
        check.time_ms(f"levels.{level}.default_timeout_ms", own.default_timeout_ms, zero_allowed=False)


def _check_tenants(check: _Checker, queue: QueueSettings) -> None:
    check.at_least("max_tenants", queue.max_tenants, 1)
    for tenant, weight in queue.tenant_weights.items():
        if not tenant or len(tenant) > 128:
            check.error("tenant_weights", f"has the name {tenant[:40]!r}; tenants are named with 1 to 128 characters")
        if not (math.isfinite(weight) and weight > 0):
            check.error("tenant_weights", f"gives {tenant!r} the weight {weight:g}, must be a finite number above 0")


def _check_threads(settings: Settings, cpu_count: int) -> Iterator[Problem]:
    wanted = sum(max(model.instances, 0) * max(model.threads or 1, 0) for model in settings.models.values())
    if wanted > cpu_count:
        text = (
            f"all instances together ask for {wanted} threads, but the process may use {cpu_count} CPUs; lower instances or threads"
        )
        yield Problem(where="models", message=text, severity="warning")


def _listed(numbers: Sequence[int]) -> str:
    verb = "lies" if len(numbers) == 1 else "lie"
    return f"{', '.join(map(str, numbers))} {verb}"
