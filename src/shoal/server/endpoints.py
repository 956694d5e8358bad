"""Which endpoint answers which path: the Open Inference Protocol over HTTP without inference itself (see `infer.py`).

Handlers are plain functions from a request to one answer; none of them waits for anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from shoal.config.settings import Settings
from shoal.engine.registry import Engine
from shoal.errors import BadRequest, ClientError, Forbidden, NotReady, NotSupported, ShoalError
from shoal.protocols.oip_json import Limits
from shoal.server.http_exchange import Exchange
from shoal.server.http_head import Head
from shoal.server.infer import InferRoute
from shoal.server.metadata import (
    index_answer,
    model_config_answer,
    model_metadata_answer,
    server_metadata_answer,
    statistics_answer,
)

__all__ = ["Router"]

_log = logging.getLogger("shoal")
_MAX_ROUTES: Final = 1024
_MAX_TARGET_BYTES: Final = 512  # longer ones are not remembered
_MAX_BODY_BYTES: Final = 64 << 10  # of requests that are no inference


class NoSuchEndpoint(ClientError):
    """No endpoint has this path, or not with this method."""

    reason = "unknown_endpoint"
    http_status = 404
    grpc_code = "UNIMPLEMENTED"


class _Route:
    """What a head leads to. `reserve` may refuse before the body is read; `receive` gets the body, whole.

    `lasting` routes are remembered; the others stand for things that do not exist, of which there are endlessly many.
    """

    lasting = True
    max_body_bytes = _MAX_BODY_BYTES

    def reserve(self, exchange: Exchange) -> ShoalError | None:
        """An error refuses the request before its body is read."""
        return None

    def grow(self, exchange: Exchange, size: int) -> ShoalError | None:
        """A body of unknown length has `size` bytes by now; an error refuses the request."""
        return None

    def receive(self, exchange: Exchange, body: bytes | memoryview) -> None:
        """Answer, now or later, through the exchange. The body is the route's to keep."""
        raise NotImplementedError

    def receive_part(self, exchange: Exchange, buffer: bytearray, start: int, stop: int) -> None:
        """The same for a body that lies in a buffer which is used again afterwards."""
        self.receive(exchange, bytes(memoryview(buffer)[start:stop]))


class _Answer(_Route):
    """A route whose answer is one function call."""

    def __init__(self, answer: Callable[[bytes | memoryview], bytes], *, lasting: bool) -> None:
        self._answer = answer
        self.lasting = lasting

    def receive(self, exchange: Exchange, body: bytes | memoryview) -> None:
        try:
            exchange.answer(self._answer(body))
        except ShoalError as error:
            exchange.fail(error)
        except Exception:
            _log.exception("endpoint %s failed", exchange.head.target[:256])
            exchange.fail(ShoalError("internal error"))


class _Refused(_Route):
    """A route for requests that cannot be served whatever their body says."""

    lasting = False

    def __init__(self, error: ShoalError, allow: str | None = None) -> None:
        self._error = error
        self._headers = () if allow is None else (("Allow", allow),)

    def reserve(self, exchange: Exchange) -> ShoalError | None:
        return self._error

    def receive(self, exchange: Exchange, body: bytes | memoryview) -> None:
        exchange.fail(self._error, headers=self._headers)


_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_SHARED_MEMORY = r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?/(?:status|register|unregister)"


class Router:
    """Finds the route of a request head. `draining` is set by the owner and turns readiness off."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.draining = False
        self._engine = engine
        self._settings = settings
        self._limits = Limits(max_request_bytes=settings.server.max_body_bytes)
        self._routes: dict[tuple[bytes, bytes], Any] = {}
        self._infer_routes: dict[tuple[str, str | None], InferRoute] = {}
        self._table: list[tuple[str, re.Pattern[str], Callable[..., bytes]]] = [
            (method, re.compile(path), answer)
            for method, path, answer in (
                ("GET", r"/v2/health/live", self._live),
                ("GET", r"/v2/health/ready", self._ready),
                ("GET", r"/v2", self._server_metadata),
                ("GET", r"/v2/models/stats", self._all_statistics),
                ("GET", _MODEL + "/ready", self._model_ready),
                ("GET", _MODEL, self._model_metadata),
                ("GET", _MODEL + "/config", self._model_config),
                ("GET", _MODEL + "/stats", self._model_statistics),
                ("POST", r"/v2/repository/index", self._repository_index),
                ("POST", r"/v2/repository/models/(?P<model>[^/]+)/(?:load|unload)", self._repository_control),
                ("GET", _SHARED_MEMORY, self._shared_memory),
                ("POST", _SHARED_MEMORY, self._shared_memory),
                ("GET", r"/v2(?:/models/(?P<model>[^/]+))?/trace/setting", self._trace_settings),
                ("POST", r"/v2(?:/models/(?P<model>[^/]+))?/trace/setting", self._update_trace_settings),
                ("GET", r"/v2/logging", self._log_settings),
                ("POST", r"/v2/logging", self._update_log_settings),
            )
        ]
        self._infer_path = re.compile(_MODEL + "/infer")
        self._logging: dict[str, Any] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }

    def route(self, head: Head) -> Any:
        """The route of a head: something with `reserve(exchange)` and `receive(exchange, body)`."""
        if head.error is not None:
            return _Refused(head.error)
        key = (head.method, head.target)
        route = self._routes.get(key)
        if route is None:
            route = self._find(head.method.decode("latin-1"), head.target.decode("latin-1"))
            if route.lasting and len(head.target) <= _MAX_TARGET_BYTES:
                if len(self._routes) >= _MAX_ROUTES:
                    self._routes.clear()
                self._routes[key] = route
        return route

    def _find(self, method: str, target: str) -> Any:
        path = target.partition("?")[0]
        if path.startswith(("http://", "https://")):  # absolute form, as proxies send it
            path = "/" + path.partition("://")[2].partition("/")[2]
        if len(path) > 1:
            path = path.removesuffix("/")
        methods: list[str] = []
        if match := self._infer_path.fullmatch(path):
            if method == "POST":
                return self._infer_route(*(unquote(part) if part else None for part in match.group("model", "version")))
            methods.append("POST")
        for wanted, pattern, answer in self._table:
            if match := pattern.fullmatch(path):
                if wanted == method or (wanted == "GET" and method == "HEAD"):
                    names = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                    return _Answer(self._bound(answer, names), lasting=self._is_known(names.get("model"), names.get("version")))
                methods.append(wanted)
        if methods:
            allowed = sorted(set(methods))
            error = _MethodNotAllowed(f"{method} is not possible on {path}; use {' or '.join(allowed)}")
            return _Refused(error, allow=", ".join(allowed))
        return _Refused(NoSuchEndpoint(f"no endpoint {path[:256]}; the protocol's paths begin with /v2"))

    @staticmethod
    def _bound(answer: Callable[..., bytes], names: dict[str, str]) -> Callable[[bytes | memoryview], bytes]:
        return lambda body: answer(body, **names)

    def _is_known(self, model: str | None, version: str | None) -> bool:
        """Whether there is such a model, ready or not; True where no model is named."""
        try:
            return model is None or self._engine.status(model, version) is not None
        except ShoalError:
            return False

    def _infer_route(self, model: str | None, version: str | None) -> Any:
        key = (model or "", version)
        route = self._infer_routes.get(key)
        if route is None:
            try:
                self._engine.status(*key)
            except ShoalError as error:
                return _Refused(error.with_traceback(None))
            route = self._infer_routes[key] = InferRoute(self._engine, *key, self._limits)
        return route

    # --- health -----------------------------------------------------------------------------------------------------------------

    def _live(self, body: bytes | memoryview) -> bytes:
        return b""

    def _ready(self, body: bytes | memoryview) -> bytes:
        if self.draining:
            raise NotReady("the server is shutting down")
        self._engine.check_ready()
        if self._settings.server.unready_when_full:
            for lane in self._engine.lanes():
                if lane.is_full():
                    raise NotReady(f'the queue of model "{lane.name}" is full')
        return b""

    def _model_ready(self, body: bytes | memoryview, model: str, version: str | None = None) -> bytes:
        if self.draining:
            raise NotReady("the server is shutting down")
        self._engine.lane(model, version)
        return b""

    # --- metadata, configuration, statistics ----------------------------------------------------------------------------------

    def _server_metadata(self, body: bytes | memoryview) -> bytes:
        return server_metadata_answer(self._settings.server)

    def _model_metadata(self, body: bytes | memoryview, model: str, version: str | None = None) -> bytes:
        return model_metadata_answer(self._engine, model, version)

    def _model_config(self, body: bytes | memoryview, model: str, version: str | None = None) -> bytes:
        return model_config_answer(self._engine, model, version)

    def _model_statistics(self, body: bytes | memoryview, model: str, version: str | None = None) -> bytes:
        return statistics_answer(self._engine, model, version)

    def _all_statistics(self, body: bytes | memoryview) -> bytes:
        return statistics_answer(self._engine, None, None)

    # --- repository ---------------------------------------------------------------------------------------------------------------

    def _repository_index(self, body: bytes | memoryview) -> bytes:
        ready_only = bool(_json_object(body, {"ready": False})["ready"])
        return index_answer(self._engine, ready_only=ready_only)

    def _repository_control(self, body: bytes | memoryview, model: str) -> bytes:
        raise Forbidden("loading and unloading models over the network is switched off")

    def _shared_memory(self, body: bytes | memoryview) -> bytes:
        raise NotSupported("the shared memory extension is not available in this server")

    # --- trace and log settings ---------------------------------------------------------------------------------------------------

    def _trace_settings(self, body: bytes | memoryview, model: str | None = None) -> bytes:
        if model is not None:
            self._engine.lane(model, None)
        return msgspec.json.encode({"trace_level": ["OFF"], "trace_rate": "0", "trace_count": "-1", "log_frequency": "0"})

    def _update_trace_settings(self, body: bytes | memoryview, model: str | None = None) -> bytes:
        wanted = _json_object(body, {})
        level = wanted.get("trace_level")
        if level not in (None, "OFF", ["OFF"]):
            raise NotSupported("tracing is not available in this server; trace_level can only be OFF")
        return self._trace_settings(body, model)

    def _log_settings(self, body: bytes | memoryview) -> bytes:
        return msgspec.json.encode(self._logging)

    def _update_log_settings(self, body: bytes | memoryview) -> bytes:
        wanted = _json_object(body, {})
        updated = dict(self._logging)
        for key, value in wanted.items():
            if key not in updated:
                raise BadRequest(f'logging: unknown setting "{key}"; known are {", ".join(sorted(updated))}')
            if type(value) is not type(updated[key]) or (key == "log_verbose_level" and not 0 <= value <= 9):
                raise BadRequest(f'logging: "{key}" cannot be {value!r}')
            if key in ("log_file", "log_format") and value != updated[key]:
                raise NotSupported(f'logging: "{key}" cannot be changed while the server runs')
            updated[key] = value
        self._logging = updated
        level = logging.CRITICAL
        for key, value in (("log_error", logging.ERROR), ("log_warning", logging.WARNING), ("log_info", logging.INFO)):
            if updated[key]:
                level = value
        _log.setLevel(logging.DEBUG if updated["log_verbose_level"] else level)
        return self._log_settings(body)


class _MethodNotAllowed(NoSuchEndpoint):
    http_status = 405


def _json_object(body: bytes | memoryview, defaults: dict[str, Any]) -> dict[str, Any]:
    """A small JSON object from a body that may be empty."""
    if len(body) == 0:
        return dict(defaults)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"body: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadRequest("body: expected a JSON object")
    return {**defaults, **value}
