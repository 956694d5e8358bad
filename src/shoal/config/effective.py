"""Settings as text for people: what is in force, defaults included, for `shoal check` and for the lines at start-up."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.loading import EMBEDDED_MODELS
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings

__all__ = ["effective", "model_lines", "startup_lines"]

_LATER = {"grpc": "gRPC", "admin": "admin", "stream": "stream"}
"""Ports that have settings but no server in this version."""


_EXECUTION = {
    "auto": "in threads (on the event loop if that is cheaper)",
    "thread": "in threads",
    "inline": "on the event loop",
}


def effective(settings: Settings) -> str:
    """All settings in force, one section after the other, without a line feed at the end."""
    lines = _server_lines(settings.server)
    for name, model in settings.models.items():
        lines += model_lines(name, model)
    return "\n".join(lines)


def model_lines(name: str, model: ModelSettings) -> list[str]:
    """What is in force for one model: where it comes from, how it is executed, batched and queued."""
    source = f"{model.path} (embedded)" if model.path in EMBEDDED_MODELS else model.path
    threads = "its share of the CPUs" if model.threads is None else str(model.threads)
    staged = "one batch staged" if model.stage else "nothing staged"
    where = f"{_EXECUTION[model.execution]}, {model.instances} instance{_s(model.instances)}"
    return [
        f"model {name} (version {model.version}): {source}",
        f"  execution  {where}, threads each: {threads}, {staged}"
        + ("" if model.probe else ", load-time probe off")
        + {"read": "", "keep": ", profile kept", "off": ", profile ignored"}[model.profile],
        f"  batching   {_batching(model.batching)}",
        f"  queue      {_queue(model.queue)}",
        f"  deadlines  {_deadlines(model.queue)}",
    ]


def startup_lines(
    settings: Settings, thread_budget: Mapping[str, int], ports: Mapping[str, int], *, cpu_count: int | None = None
) -> list[str]:
    """What the server prints once it listens.

    `thread_budget` gives, for each model, the intra-op threads of one instance as chosen at load time; `ports` the ports that are
    really bound, by `http`, `grpc`, `admin`, `stream`, as far as those servers run. `cpu_count` is the number of usable CPUs.
    """
    server = settings.server
    scheme = "https" if server.tls_certificate else "http"
    lines = [f"http listening on {scheme}://{_host(server.host)}:{ports['http']}"] if "http" in ports else []
    lines += [f"{label} listening on {_host(server.host)}:{ports[key]}" for key, label in _LATER.items() if key in ports]
    for name, model in settings.models.items():
        lines += model_lines(name, model)
    parts = []
    total = 0
    for name, model in settings.models.items():
        each = thread_budget.get(name, model.threads or 1)
        total += model.instances * each
        parts.append(f"{name} {model.instances} x {each}")
    cpus = "" if cpu_count is None else f" on {cpu_count} CPU{_s(cpu_count)}"
    lines.append(f"threads: {total} for models{cpus}" + (f" ({', '.join(parts)})" if parts else ""))
    return lines


def _server_lines(server: ServerSettings) -> list[str]:
    tls = f"certificate {server.tls_certificate}, key {server.tls_key}" if server.tls_certificate else "off"
    later = ", ".join(f"{label} {_port(getattr(server, f'{key}_port'))}" for key, label in _LATER.items())
    full = "unready when a queue is full" if server.unready_when_full else "ready while queues are full"
    strict = "ready only with every model" if server.strict_readiness else "ready with any model"
    return [
        "server",
        f"  address    {server.host}, HTTP port {_port(server.http_port)} (set aside: {later})",
        f"  TLS        {tls}",
        f"  limits     body {_size(server.max_body_bytes)}, header {_size(server.max_header_bytes)}, "
        f"{server.max_connections} connections, {server.max_pipelined_requests} pipelined requests each, "
        f"write buffer {_size(server.write_buffer_bytes)}",
        f"  timeouts   header {_time(server.header_timeout_ms)}, body {_time(server.body_timeout_ms)}, "
        f"idle {_time(server.idle_timeout_ms)}, drain {_time(server.drain_timeout_ms)}",
        f"  overload   status {server.overload_status}, {full}, {strict}",
    ]


def _batching(batching: BatchingSettings) -> str:
    if batching.mode == "adaptive":
        held = "" if batching.max_delay_ms == 0 else f", held back for at most {_time(batching.max_delay_ms)}"
        delay = f"started when measured batch times and arrivals say so{held}"
    elif batching.max_delay_ms == 0:
        delay = "no delay (whenever an executor is free, what waits runs together)"
    else:
        delay = f"at most {_time(batching.max_delay_ms)} delay"
    parts = [batching.mode, f"up to {batching.max_batch_size} row{_s(batching.max_batch_size)}", delay]
    if batching.preferred_batch_sizes:
        parts.append(f"preferred sizes {_sizes(batching.preferred_batch_sizes)}")
    if batching.allowed_batch_sizes:
        parts.append(f"allowed sizes {_sizes(batching.allowed_batch_sizes)}")
    if batching.max_batch_cost is not None:
        parts.append(f"at most {batching.max_batch_cost:g} {'by ' if ':' in batching.cost else ''}{batching.cost} in a batch")
    for name, length in batching.lengths.items():
        parts.append(f"{name} by {length.policy}")
    parts.append("larger requests are split" if batching.oversize == "split" else "larger requests are refused")
    if batching.reorder:
        parts.append("reordering for equal shapes")
    return ", ".join(parts)


def _queue(queue: QueueSettings) -> str:
    bounds = [
        f"{queue.max_queue_requests} requests" if queue.max_queue_requests is not None else "",
        f"{queue.max_queue_rows} rows" if queue.max_queue_rows is not None else "",
        _size(queue.max_queue_bytes) if queue.max_queue_bytes is not None else "",
    ]
    named = [bound for bound in bounds if bound]
    text = f"at most {', '.join(named)}" if named else "no bound"
    if queue.priority_levels > 1:
        text += f", {queue.priority_levels} priority levels (default {queue.default_priority})"
    if queue.aging_ms is not None:
        text += f", a level up for each {_time(queue.aging_ms)} of waiting"
    if queue.tenant_weights:
        text += (
            f", tenants by weight ({', '.join(f'{name} {weight:g}' for name, weight in queue.tenant_weights.items())}, others 1)"
        )
    elif queue.fair_tenants:
        text += ", tenants share evenly"
    return text


def _deadlines(queue: QueueSettings) -> str:
    timeout = "no default timeout" if queue.default_timeout_ms is None else f"default timeout {_time(queue.default_timeout_ms)}"
    own = "requests may set their own" if queue.allow_timeout_override else "requests may not set their own"
    action = "expired requests fail" if queue.timeout_action == "reject" else "expired requests go behind all others"
    objective = "" if queue.slo_ms is None else f", objective {_time(queue.slo_ms)}"
    return f"{timeout}, {own}, {action}{objective}"


def _sizes(sizes: tuple[int, ...]) -> str:
    return "/".join(str(size) for size in sizes)


def _port(port: int) -> str:
    return str(port) if port else "chosen by the system"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _time(value_ms: float) -> str:
    return f"{value_ms / 1000:g} s" if value_ms >= 1000 else f"{value_ms:g} ms"


def _size(count_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count_bytes >= 1 << shift and count_bytes % (1 << shift) == 0:
            return f"{count_bytes >> shift} {unit}"
    return f"{count_bytes} bytes"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
