"""A blocking HTTP client that sends exactly the bytes it is told, and builders for inference requests. For tests of servers.

Deliberately simple and independent of the server's own parser and codecs, so that they are not their own judges. Every socket has
a timeout as a safety net.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["RawClient", "Response", "get", "infer", "json_infer", "post"]

Array = np.ndarray[Any, np.dtype[Any]]

_SAFETY_SECONDS = 30.0
_NAMES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


@dataclass
class Response:
    """One response. Header names are in lower case; `body` is as it came."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body, or its JSON part, decoded."""
        length = int(self.headers.get("inference-header-content-length", len(self.body)))
        return json.loads(self.body[:length])

    def tensors(self) -> dict[str, Array]:
        """Output arrays by name, of an inference answer with numbers only (no BYTES)."""
        answer = self.json()
        position = int(self.headers.get("inference-header-content-length", len(self.body)))
        numpy_names = {value: key for key, value in _NAMES.items()}
        arrays: dict[str, Array] = {}
        for output in answer["outputs"]:
            dtype = np.dtype(numpy_names[output["datatype"]])
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = np.array(output["data"], dtype)
            else:
                array = np.frombuffer(self.body[position : position + size], dtype)
                position += size
            arrays[output["name"]] = array.reshape(output["shape"])
        assert position == len(self.body), "bytes are left over behind the outputs"
        return arrays


class RawClient:
    """One connection. Use as a context manager."""

    def __init__(self, port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        plain = socket.create_connection((host, port), timeout=_SAFETY_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket: socket.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        self._received = bytearray()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent; what comes can still be read."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def vanish(self) -> None:
        """Close with a reset, as a crashed client's system does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def send(self, *pieces: bytes) -> RawClient:
        """Send pieces, each with a call of its own."""
        for piece in pieces:
            self.socket.sendall(piece)
        return self

    def send_what_is_taken(self, data: bytes) -> None:
        """Send until the server stops us: a server may answer and end the connection before it has read everything."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def _more(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise EOFError(f"the server closed the connection; unread: {bytes(self._received[:200])!r}")
        self._received += data

    def response(self, *, head_only: bool = False) -> Response:
        """Read the next response. `head_only`: no body follows (HEAD). Raises EOFError when the connection ends first."""
        received = self._received
        while (end := received.find(b"\r\n\r\n")) < 0:
            self._more()
        first, *lines = bytes(received[:end]).decode("latin-1").split("\r\n")
        del received[: end + 4]
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"header {name} stands there twice"
            headers[name.lower()] = value.strip()
        status = int(first.split(" ")[1])
        length = 0 if head_only or status == 100 else int(headers["content-length"])
        while len(received) < length:
            self._more()
        body = bytes(received[:length])
        del received[:length]
        return Response(status, headers, body)

    def ask(self, request: bytes) -> Response:
        """Send one request and read its response."""
        return self.send(request).response()

    def at_end(self) -> bool:
        """Wait for the server to end the connection; True if nothing came before that."""
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionError:
            return not self._received
        self._received += data
        return not self._received

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(1 << 18):
                self._received += data
        data = bytes(self._received)
        self._received.clear()
        return data


def _headers(headers: Mapping[str, object]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def get(path: str, method: str = "GET", **headers: Any) -> bytes:
    """A request without a body. Keyword names become header names (`_` is written `-`)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\n".encode() + _headers(named) + b"\r\n"


def post(path: str, body: bytes = b"", *, chunks: Iterable[bytes] | None = None, **headers: Any) -> bytes:
    """A request with a body of known length, or in the given chunks."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if chunks is None:
        named.setdefault("Content-Length", len(body))
    else:
        named["Transfer-Encoding"] = "chunked"
        body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: test\r\n".encode() + _headers(named) + b"\r\n" + body


def infer_parts(inputs: Mapping[str, Array], fields: Mapping[str, Any] | None = None) -> tuple[bytes, bytes]:
    """JSON and binary part of a request with all tensors in binary; `fields` joins the JSON (id, parameters, outputs)."""
    head: dict[str, Any] = {"parameters": {"binary_data_output": True}, **(fields or {}), "inputs": []}
    tail = b""
    for name, array in inputs.items():
        data = np.ascontiguousarray(array).tobytes()
        entry = {"name": name, "shape": list(array.shape), "datatype": _NAMES[array.dtype.name]}
        head["inputs"].append({**entry, "parameters": {"binary_data_size": len(data)}})
        tail += data
    return json.dumps(head).encode(), tail


def infer(
    model: str,
    inputs: Mapping[str, Array],
    fields: Mapping[str, Any] | None = None,
    *,
    version: str | None = None,
    **headers: Any,
) -> bytes:
    """A whole inference request in binary."""
    front, tail = infer_parts(inputs, fields)
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    return post(path, front + tail, Inference_Header_Content_Length=len(front), **headers)


def json_infer(
    model: str, inputs: Mapping[str, tuple[str, Sequence[int], Any]], fields: Mapping[str, Any] | None = None, **headers: Any
) -> bytes:
    """A whole inference request in JSON; each input is (datatype, shape, data)."""
    head = {**(fields or {})}
    head["inputs"] = [
        {"name": name, "datatype": datatype, "shape": list(shape), "data": data} for name, (datatype, shape, data) in inputs.items()
    ]
    return post(f"/v2/models/{model}/infer", json.dumps(head).encode(), **headers)
