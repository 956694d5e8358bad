"""What goes over the wire: one request per protocol that a server speaks, and how its answer is read back."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field

import numpy as np

from benchmarks.models import Array

HEADER_LENGTH = "Inference-Header-Content-Length"
ID_SLOT = b"00000000"


@dataclass(frozen=True)
class Request:
    """One POST. With `id_at`, the eight bytes from there on are a decimal number that differs from request to request."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    id_at: int | None = None


@dataclass(frozen=True)
class Answer:
    """Status, headers (names in lower case) and body of a response."""

    status: int
    headers: dict[str, str]
    body: bytes


def raw_request(row: Array) -> Request:
    """The row's bytes and nothing else."""
    return Request("/", row.tobytes())


def oip_binary_request(model: str, row: Array, *, with_id: bool = False) -> Request:
    """The Open Inference Protocol with a binary tensor each way, as existing clients send it when they name no outputs."""
    tensor = {"name": "x", "shape": [1, row.size], "datatype": "FP32", "parameters": {"binary_data_size": row.nbytes}}
    head: dict[str, object] = {"id": ID_SLOT.decode()} if with_id else {}
    head |= {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps(head, separators=(",", ":")).encode()
    headers = {HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
    return Request(f"/v2/models/{model}/infer", text + row.tobytes(), headers, text.index(ID_SLOT) if with_id else None)


def oip_json_request(model: str, row: Array) -> Request:
    """The Open Inference Protocol with the numbers as JSON each way."""
    tensor = {"name": "x", "shape": [1, row.size], "datatype": "FP32", "data": [round(float(item), 6) for item in row]}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    return Request(f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})


def raw_row(answer: Answer) -> Array:
    """The one output of a raw answer."""
    return np.frombuffer(answer.body, dtype=np.float32)


def oip_row(answer: Answer) -> Array:
    """The first output of an Open Inference Protocol answer, binary or JSON."""
    length = int(answer.headers.get(HEADER_LENGTH.lower(), len(answer.body)))
    output = json.loads(answer.body[:length])["outputs"][0]
    if "data" in output:
        return np.asarray(output["data"], dtype=np.float32).ravel()
    return np.frombuffer(answer.body, dtype=np.float32, offset=length)


def send(connection: http.client.HTTPConnection, request: Request) -> Answer:
    """Send one request on a connection and read the answer."""
    connection.request("POST", request.path, request.body, request.headers)
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())
