"""The ONE table from errors to what a client sees: HTTP status and headers, the JSON body, the gRPC code.

Each error class owns its status, reason and code (see `shoal.errors`); this file turns them into a protocol's bytes and knows the
two exceptions: `overload_status`, and that whatever is not ours is "internal" and tells nothing about the inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from shoal.errors import Capacity, ShoalError

__all__ = ["error_body", "error_message", "grpc_code", "http_status", "retry_headers"]

_INTERNAL: Final = "internal error; the server's log has the details"
_encode = msgspec.json.Encoder().encode


def http_status(error: BaseException, overload_status: int = 429) -> int:
    """HTTP status of an error. `overload_status` replaces 429 (503 gives Triton's answers back to those who need them)."""
    if not isinstance(error, ShoalError):
        return 500
    status = error.http_status
    if status == 429 and isinstance(error, Capacity):
        return overload_status
    # A model's own exception may bring a status; anything but an error would make clients take the body for an answer.
    return status if isinstance(status, int) and 400 <= status <= 599 else 500


def grpc_code(error: BaseException) -> str:
    """Name of the gRPC status code, for example `RESOURCE_EXHAUSTED`."""
    return error.grpc_code if isinstance(error, ShoalError) else "INTERNAL"


def error_message(error: BaseException) -> str:
    """The sentence for people. Many clients show nothing else, so it names the hint when there is one."""
    if not isinstance(error, ShoalError):
        return _INTERNAL
    message = error.message
    hint = error.retry_after_ms
    if hint is None:
        return message
    stop = "" if message.endswith((".", "!", "?")) else "."
    return f"{message}{stop} Try again in {hint} ms."


def error_body(error: BaseException) -> bytes:
    """JSON `{"error": sentence, "reason": word, "retry_after_ms"?, "queue"?}`; other exceptions show nothing of themselves."""
    if not isinstance(error, ShoalError):
        return _encode({"error": _INTERNAL, "reason": "internal"})
    body: dict[str, Any] = {"error": error_message(error), "reason": error.reason}
    if error.retry_after_ms is not None:
        body["retry_after_ms"] = error.retry_after_ms
    if error.queue is not None:
        body["queue"] = error.queue
    try:
        return _encode(body)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
        # A model's message may hold lone surrogates: a client must still get a body with the key it looks for.
        body["error"] = body["error"].encode("utf-8", "replace").decode("utf-8")
        body.pop("queue", None)
        return _encode(body)


def retry_headers(error: BaseException) -> Sequence[tuple[str, str]]:
    """`Retry-After` in whole seconds, rounded up and at least 1, and `retry-after-ms`; empty when the error has no hint."""
    hint = error.retry_after_ms if isinstance(error, ShoalError) else None
    if hint is None:
        return ()
    return (("Retry-After", str(max(1, -(-hint // 1000)))), ("retry-after-ms", str(hint)))
