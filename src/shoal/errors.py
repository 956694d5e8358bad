"""The exception tree of Shoal, and what every error knows about itself.

    ShoalError
    ├── Capacity                 try again later: the request was fine, the server was full
    │   ├── QueueFull            a bound on requests, rows, bytes or memory
    │   ├── Overloaded           shed for another: evicted, standing queue, lower priority
    │   ├── QuotaExceeded        the tenant's own allowance
    │   └── DeadlineInfeasible   could not be met even at the head of the queue
    ├── DeadlineExceeded         expired while waiting
    ├── Unavailable              the server or the model cannot take work now
    │   ├── Draining
    │   ├── NotReady
    │   └── WorkerLost
    ├── ClientError              the request itself is at fault
    │   ├── BadRequest           names the field
    │   ├── TooLarge
    │   ├── UnknownModel
    │   ├── UnknownVersion
    │   ├── Unauthorized
    │   ├── Forbidden
    │   └── NotSupported         a part of the protocol that this server does not have
    ├── ModelFailed              the model's own exception, or rows out differ from rows in
    ├── ClientGone               nobody is left to answer
    └── ConfigError              settings or model files are wrong; raised while loading only

Each class owns its reason word, its HTTP status, its gRPC code and whether a retry can help. Turning that into bytes of a protocol
happens in `protocols/status.py` and nowhere else. Nothing in here imports anything of Shoal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "BadRequest",
    "Capacity",
    "ClientError",
    "ClientGone",
    "ConfigError",
    "DeadlineExceeded",
    "DeadlineInfeasible",
    "Draining",
    "Forbidden",
    "ModelFailed",
    "NotReady",
    "NotSupported",
    "Overloaded",
    "QueueFull",
    "QuotaExceeded",
    "ShoalError",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "UnknownModel",
    "UnknownVersion",
    "WorkerLost",
]


class ShoalError(Exception):
    """Root of everything that Shoal raises on purpose.

    `retry_after_ms` is the computed hint, where there is one; `queue` describes the queue that refused (rows, limits), for the
    body of the answer. `http_status` may be overridden per instance by a model's own exception (see `ModelFailed`).
    """

    reason: ClassVar[str] = "internal"
    http_status: int = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retry_helps: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_ms: int | None = None, queue: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.queue = queue


class Capacity(ShoalError):
    """The request was fine; there was no room for it."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_helps = True


class QueueFull(Capacity):
    """A bound on requests, rows, bytes or memory was reached."""

    reason = "queue_full"


class Overloaded(Capacity):
    """Shed in favour of others: evicted, standing queue, or lower priority."""

    reason = "overloaded"


class QuotaExceeded(Capacity):
    """The tenant's own allowance is used up."""

    reason = "quota"


class DeadlineInfeasible(Capacity):
    """The deadline could not be met even at the head of the queue."""

    reason = "deadline_infeasible"


class DeadlineExceeded(ShoalError):
    """The request expired while it waited."""

    reason = "deadline_exceeded"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class Unavailable(ShoalError):
    """The server or the model cannot take work now."""

    reason = "unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"


class Draining(Unavailable):
    """The server finishes what it has and takes nothing new."""

    reason = "draining"


class NotReady(Unavailable):
    """The model is not loaded, or failed to load; the message says why."""

    reason = "not_ready"
    retry_helps = True


class WorkerLost(Unavailable):
    """The executor that ran this request died."""

    reason = "worker_lost"
    retry_helps = True


class ClientError(ShoalError):
    """The request itself is at fault; sending it again cannot succeed."""

    reason = "bad_request"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class BadRequest(ClientError):
    """Malformed or contradictory; the message names the field."""


class TooLarge(ClientError):
    """Body over the size limit, or more rows than one batch may hold where splitting is off."""

    reason = "too_large"
    http_status = 413


class UnknownModel(ClientError):
    """No model of that name is served."""

    reason = "unknown_model"
    http_status = 404
    grpc_code = "NOT_FOUND"


class UnknownVersion(ClientError):
    """The model is served, but not in that version."""

    reason = "unknown_version"
    http_status = 404
    grpc_code = "NOT_FOUND"


class Unauthorized(ClientError):
    """No valid credentials."""

    reason = "unauthorized"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class Forbidden(ClientError):
    """Known, but not allowed; or a feature that is switched off."""

    reason = "forbidden"
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class NotSupported(ClientError):
    """A part of the protocol that this server does not have (yet)."""

    reason = "not_supported"
    http_status = 501
    grpc_code = "UNIMPLEMENTED"


class ModelFailed(ShoalError):
    """The model raised, or returned another number of rows than it was given.

    A Python model may raise an exception with an integer attribute `http_status` (400…599); the answer then carries it.
    """

    reason = "model_failed"

    def __init__(self, message: str, *, http_status: int | None = None) -> None:
        super().__init__(message)
        if http_status is not None:
            self.http_status = http_status


class ClientGone(ShoalError):
    """The client closed its connection or cancelled its call; nobody reads this."""

    reason = "cancelled"
    http_status = 499
    grpc_code = "CANCELLED"


class ConfigError(ShoalError):
    """Settings or model files are wrong. The message says what to change."""

    reason = "config"
