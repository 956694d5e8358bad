"""What requests of the same form have in common: the plan of a request, and the template of its answer. No sockets, no queue.

Clients that send tensors in binary repeat the same JSON for every request, but for its id. So what was made of that JSON once is
kept by its bytes (without the id), and the JSON of the answer likewise.
"""

from __future__ import annotations

import re
from typing import Final

from shoal.engine.lane import Lane
from shoal.errors import BadRequest
from shoal.protocols.oip_json import InferHead
from shoal.tensors.scatter import Answer
from shoal.tensors.signature import bind

__all__ = ["JOIN_BYTES", "Plan", "Template", "without_id"]

# Answers up to this size are sent as one buffer; beyond, the copy would cost more than a second buffer does.
JOIN_BYTES: Final = 16 << 10
_NS_PER_US: Final = 1_000
# An id where clients put it, in characters that mean themselves in JSON.
_ID: Final = re.compile(rb'\{"id": ?"([ !#-\[\]-~]{1,256})", ?')


def without_id(json: bytes) -> tuple[bytes, bytes | None]:
    """A request's JSON without the id at its beginning, and the id; the JSON as it is and None where there is none to be seen."""
    match = _ID.match(json)
    return (json, None) if match is None else (b"{" + json[match.end() :], match[1])


class Plan:
    """One shape of request to one model version; shared by all requests whose JSON is the same bytes."""

    __slots__ = (
        "body_bytes",
        "cost",
        "head",
        "json_bytes",
        "key",
        "lane",
        "length",
        "lengths",
        "order",
        "outputs",
        "parameters",
        "payload_bytes",
        "plain",
        "priority",
        "repeatable",
        "row_shapes",
        "rows",
        "signature",
        "single",
        "template",
        "tenant",
        "timeout_ns",
    )

    def __init__(self, lane: Lane, head: InferHead, key: bytes) -> None:
        spec = lane.spec
        self.lengths = lengths = lane.lengths
        binding = bind(spec, head.inputs) if lengths is None else lengths.bind(head.inputs)
        self.lane = lane
        self.head = head
        self.key = key
        self.json_bytes = len(key)
        self.body_bytes = len(key) + head.total_bytes
        # Whether the same JSON may come again: without an id of its own, and without tensors in it.
        self.repeatable = head.cacheable and head.id is None
        self.rows = binding.rows
        self.signature = binding.signature
        self.order = binding.order
        self.row_shapes = binding.row_shapes
        self.length = binding.length
        self.parameters = head.parameters
        self.priority = head.priority
        self.timeout_ns = None if head.timeout_us is None else head.timeout_us * _NS_PER_US
        self.payload_bytes = head.total_bytes
        tenant = head.parameters.get("tenant")
        if tenant is not None and not isinstance(tenant, str):
            raise BadRequest("parameters.tenant: expected a string, the name of the tenant that the request is for")
        self.tenant = tenant
        self.cost = lane.cost_of({tensor.name: tensor.shape for tensor in head.inputs}, head.parameters)
        names = {output.name: index for index, output in enumerate(spec.outputs)}
        # (index of the model's output, binary?, classes)
        self.outputs: list[tuple[int, bool, int]] = []
        if head.outputs is None:
            self.outputs = [(index, head.binary_default, 0) for index in range(len(names))]
        else:
            for wanted in head.outputs:
                index = names.get(wanted.name, -1)
                if index < 0:
                    raise BadRequest(f'outputs: the model has no output "{wanted.name}"; it has {", ".join(sorted(names))}')
                self.outputs.append((index, wanted.binary, wanted.classification))
        # One binary tensor of fixed element size: the body behind the JSON is the payload.
        self.single = head.single_slice and len(binding.order) == 1
        # Every output as it is, in binary: the response's JSON and head depend on the shapes alone.
        self.plain = (
            head.id is None
            and not spec.echo_parameters
            and all(binary and not k and spec.outputs[index].datatype != "BYTES" for index, binary, k in self.outputs)
        )
        self.template: Template | None = None


class Template:
    """What all plain answers to one plan have in common: the HTTP head up to the request's number, and from there to the tensors.

    `shapes` are the outputs' dimensions behind the rows for which it holds. `only` is the index of the model's output where it is
    the only one and small enough to be sent in one piece; `size` is the size of all tensors in bytes.
    """

    __slots__ = ("_after_id", "_before_id", "_prefix", "front", "middle", "only", "shapes", "size")

    def __init__(self, plan: Plan, answer: Answer, json: bytes, request_prefix: bytes) -> None:
        size = sum(len(answer.view(index, 0, plan.rows)) for index, _, _ in plan.outputs)
        self.front = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\nx-request-id: %b" % (len(json), len(json) + size, request_prefix)
        )
        self.middle = b"\r\n\r\n" + json
        self.shapes = answer.tail_shapes
        self.size = size
        self.only = plan.outputs[0][0] if len(plan.outputs) == 1 and size < JOIN_BYTES and answer.batched else None
        # Where an answer has an id it stands behind the version, as `encode_response` puts it.
        at = json.index(b',"outputs":')
        self._before_id, self._after_id = json[:at] + b',"id":"', b'"' + json[at:]
        self._prefix = request_prefix

    def front_with_id(self, request_id: bytes, number: int) -> bytes:
        """Everything before the tensors, for a request with an id (which means itself in JSON)."""
        json = b"%b%b%b" % (self._before_id, request_id, self._after_id)
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\nx-request-id: %b%x\r\n\r\n%b"
        ) % (len(json), len(json) + self.size, self._prefix, number, json)
