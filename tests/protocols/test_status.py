"""The one table from errors to answers: every class has its row, hints are named, and nothing of the inside leaks."""

from __future__ import annotations

import json

import pytest

from shoal import errors
from shoal.errors import BadRequest, DeadlineInfeasible, ModelFailed, NotReady, Overloaded, QueueFull, QuotaExceeded, ShoalError
from shoal.protocols.status import error_body, error_message, grpc_code, http_status, retry_headers

TABLE = {
    "QueueFull": ("queue_full", 429, "RESOURCE_EXHAUSTED"),
    "Overloaded": ("overloaded", 429, "RESOURCE_EXHAUSTED"),
    "QuotaExceeded": ("quota", 429, "RESOURCE_EXHAUSTED"),
    "DeadlineInfeasible": ("deadline_infeasible", 429, "RESOURCE_EXHAUSTED"),
    "DeadlineExceeded": ("deadline_exceeded", 504, "DEADLINE_EXCEEDED"),
    "Draining": ("draining", 503, "UNAVAILABLE"),
    "NotReady": ("not_ready", 503, "UNAVAILABLE"),
    "WorkerLost": ("worker_lost", 503, "UNAVAILABLE"),
    "TooLarge": ("too_large", 413, "INVALID_ARGUMENT"),
    "BadRequest": ("bad_request", 400, "INVALID_ARGUMENT"),
    "UnknownModel": ("unknown_model", 404, "NOT_FOUND"),
    "UnknownVersion": ("unknown_version", 404, "NOT_FOUND"),
    "Unauthorized": ("unauthorized", 401, "UNAUTHENTICATED"),
    "Forbidden": ("forbidden", 403, "PERMISSION_DENIED"),
    "NotSupported": ("not_supported", 501, "UNIMPLEMENTED"),
    "ModelFailed": ("model_failed", 500, "INTERNAL"),
    "ClientGone": ("cancelled", 499, "CANCELLED"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    """Each cause has the reason, HTTP status and gRPC code of the design's table, and the key that existing clients look for."""
    error = getattr(errors, name)("why")
    reason, status, code = TABLE[name]
    body = json.loads(error_body(error))
    assert (body["reason"], http_status(error), grpc_code(error)) == (reason, status, code)
    assert body == {"error": "why", "reason": reason}
    assert list(retry_headers(error)) == []


def test_every_error_class_is_in_the_table() -> None:
    """A new error class cannot be forgotten here: all but the abstract ones and load-time errors have a row."""
    abstract = {"ShoalError", "Capacity", "Unavailable", "ClientError", "ConfigError"}
    assert set(errors.__all__) - abstract == set(TABLE)


def test_hint_in_sentence_body_and_headers() -> None:
    """The hint is in the sentence, in the body and in both headers; the queue is described."""
    error = QueueFull("the queue is full.", retry_after_ms=120, queue={"rows": 10, "limit_rows": 10})
    assert json.loads(error_body(error)) == {
        "error": "the queue is full. Try again in 120 ms.",
        "reason": "queue_full",
        "retry_after_ms": 120,
        "queue": {"rows": 10, "limit_rows": 10},
    }
    assert list(retry_headers(error)) == [("Retry-After", "1"), ("retry-after-ms", "120")]
    assert error_message(Overloaded("shed", retry_after_ms=5)) == "shed. Try again in 5 ms."


@pytest.mark.parametrize(("hint", "seconds"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (59_999, "60")])
def test_retry_after_is_whole_seconds_rounded_up(hint: int, seconds: str) -> None:
    """Retry-After is at least 1 and never sooner than the exact hint."""
    assert list(retry_headers(NotReady("loading", retry_after_ms=hint))) == [
        ("Retry-After", seconds),
        ("retry-after-ms", str(hint)),
    ]


def test_overload_status() -> None:
    """`overload_status` replaces 429 for all capacity errors and nothing else."""
    for error in (QueueFull("x"), Overloaded("x"), QuotaExceeded("x"), DeadlineInfeasible("x")):
        assert http_status(error, overload_status=503) == 503
    assert http_status(BadRequest("x"), overload_status=503) == 400
    assert http_status(ModelFailed("x", http_status=429), overload_status=503) == 429


@pytest.mark.parametrize(("wanted", "status"), [(418, 418), (400, 400), (599, 599), (200, 500), (302, 500), (600, 500), (-1, 500)])
def test_a_model_s_own_status(wanted: int, status: int) -> None:
    """A model may choose an error status; anything that a client would not take for an error becomes 500."""
    assert http_status(ModelFailed("x", http_status=wanted)) == status


def test_other_exceptions_show_nothing() -> None:
    """Whatever is not ours is "internal" and tells nothing of itself."""
    error = RuntimeError("/secret/path password=1")
    assert (http_status(error), grpc_code(error), list(retry_headers(error))) == (500, "INTERNAL", [])
    body = json.loads(error_body(error))
    assert body["reason"] == "internal" and "secret" not in body["error"] and body["error"] == error_message(error)


def test_unprintable_messages() -> None:
    """A message with lone surrogates (from a model's exception) still becomes a JSON body with its key."""
    body = json.loads(error_body(ModelFailed("bad \ud800 text")))
    assert body == {"error": "bad ? text", "reason": "model_failed"}


def test_unencodable_queue_description() -> None:
    """A queue description that is no JSON is left out rather than failing the answer."""
    body = json.loads(error_body(ShoalError("x", queue={"a": object()})))
    assert body == {"error": "x", "reason": "internal"}
