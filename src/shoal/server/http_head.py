"""The head of an HTTP request, as far as this server cares: which bytes follow, where the request goes, what it asks for.

Header names are recognised here and values checked here; llhttp has already refused whatever is not HTTP. No sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shoal.errors import BadRequest

__all__ = ["Head", "set_header"]

_MAX_KNOWN_SPELLINGS: Final = 512
_MAX_KNOWN_NAME_BYTES: Final = 64
_BLANKS: Final = b" \t"


class Head:
    """One request head. Immutable once parsed, and shared by all requests whose heads are the same bytes.

    `content_length` is 0 without a body and meaningless when `chunked`. `infer_header_length` is None unless the client sent
    `Inference-Header-Content-Length`. `route` is filled in by the server. `error` is set when a header's value is unusable: the
    request is answered with it, and the connection stays in step.
    """

    __slots__ = (
        "accept_encoding",
        "chunked",
        "coding_asked",
        "content_encoding",
        "content_length",
        "error",
        "expect_continue",
        "http_1_0",
        "infer_header_length",
        "keep_alive",
        "method",
        "plain",
        "plan",
        "priority",
        "repeatable",
        "request_id",
        "response_coding",
        "route",
        "target",
        "tenant",
        "timeout_ms",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.content_length = 0
        self.chunked = False
        self.keep_alive = True
        self.http_1_0 = False
        self.expect_continue = False
        self.infer_header_length: int | None = None
        self.content_encoding: str | None = None
        self.accept_encoding: str | None = None
        # Chosen from accept_encoding once the head is complete. A client that names one coding asks for it; a list is what HTTP
        # libraries send on their own.
        self.response_coding: str | None = None
        self.coding_asked = False
        self.request_id: bytes | None = None
        self.timeout_ms: float | None = None
        self.priority: int | None = None
        self.tenant: str | None = None
        self.error: BadRequest | None = None
        self.route: Any = None
        # Asks for nothing that needs a look at each request: see `HttpServer.parse_head`.
        self.plain = False
        # What the route made of the last body that came with this head, for the route to use again.
        self.plan: Any = None
        # False where another request with the same head is improbable or would need the parser's own state.
        self.repeatable = True


def _integer(name: str, value: bytes, lowest: int, highest: int) -> int:
    digits = value.strip(_BLANKS)  # llhttp lets blanks stand behind a value
    if not digits.isdigit() or len(digits) > 19 or not lowest <= (number := int(digits)) <= highest:
        raise BadRequest(f"header {name}: expected a whole number from {lowest} to {highest}, got {value[:64]!r}")
    return number


def _content_length(head: Head, value: bytes) -> None:
    head.content_length = _integer("content-length", value, 0, 2**63 - 1)


def _transfer_encoding(head: Head, value: bytes) -> None:
    # llhttp has seen to it that the last coding is `chunked` and that there is no length beside it.
    known = not head.chunked and value.strip(_BLANKS).lower() == b"chunked"
    head.chunked = True
    head.repeatable = False
    if not known:
        raise BadRequest(f"header transfer-encoding: only chunked is understood, once, got {value[:64]!r}")


def _expect(head: Head, value: bytes) -> None:
    head.repeatable = False
    if value.strip(_BLANKS).lower() != b"100-continue":
        raise BadRequest(f"header expect: only 100-continue is understood, got {value[:64]!r}")
    head.expect_continue = True


def _infer_header_length(head: Head, value: bytes) -> None:
    head.infer_header_length = _integer("inference-header-content-length", value, 0, 2**63 - 1)


def _text(name: str, value: bytes, longest: int) -> str:
    if len(value) > longest:
        raise BadRequest(f"header {name}: at most {longest} bytes, got {len(value)}")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest(f"header {name}: not valid UTF-8") from None


def _content_encoding(head: Head, value: bytes) -> None:
    coding = _text("content-encoding", value, 64).strip().lower()
    head.content_encoding = coding if coding and coding != "identity" else None


def _accept_encoding(head: Head, value: bytes) -> None:
    text = _text("accept-encoding", value, 1024)
    head.accept_encoding = text if head.accept_encoding is None else f"{head.accept_encoding},{text}"


def _request_id(head: Head, value: bytes) -> None:
    head.repeatable = False
    if len(value) > 256:
        raise BadRequest(f"header x-request-id: at most 256 bytes, got {len(value)}")
    head.request_id = value


def _timeout(head: Head, value: bytes) -> None:
    try:
        timeout_ms = float(value)
    except ValueError:
        timeout_ms = -1.0
    if not 0 < timeout_ms <= 1e9:  # also refuses NaN
        raise BadRequest(f"header x-request-timeout-ms: expected milliseconds above 0 and up to 1e9, got {value[:64]!r}")
    head.timeout_ms = timeout_ms


def _priority(head: Head, value: bytes) -> None:
    head.priority = _integer("x-priority", value, 0, 2**31 - 1)


def _tenant(head: Head, value: bytes) -> None:
    head.tenant = _text("x-tenant", value, 256)


_Setter = Callable[[Head, bytes], None]

_SETTERS: Final[dict[bytes, _Setter]] = {
    b"content-length": _content_length,
    b"transfer-encoding": _transfer_encoding,
    b"expect": _expect,
    b"inference-header-content-length": _infer_header_length,
    b"content-encoding": _content_encoding,
    b"accept-encoding": _accept_encoding,
    b"x-request-id": _request_id,
    b"x-request-timeout-ms": _timeout,
    b"x-priority": _priority,
    b"x-tenant": _tenant,
}

# Clients spell a name the same way every time, so the lower-casing is remembered; bounded, because they choose the spelling.
_spellings: dict[bytes, _Setter | None] = dict(_SETTERS)


def set_header(head: Head, name: bytes, value: bytes) -> None:
    """Take one header into `head`; one with an unusable value sets `head.error`."""
    try:
        setter = _spellings[name]
    except KeyError:
        setter = _SETTERS.get(name.lower())
        if len(_spellings) < _MAX_KNOWN_SPELLINGS and len(name) <= _MAX_KNOWN_NAME_BYTES:
            _spellings[name] = setter
    if setter is not None:
        try:
            setter(head, value)
        except BadRequest as error:
            head.error = head.error or error.with_traceback(None)  # whose frames refer to the head
