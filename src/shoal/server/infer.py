"""The way of an inference from its wire form to a ticket and back: decode, bind, queue, encode. HTTP's share of it.

A `Plan` is everything about a request that its JSON head fixes: rows, signature, where each tensor lies in the body, what is
answered and how. Clients that send tensors in binary repeat the same JSON for every request, so plans are kept by those bytes, and
such a request costs neither JSON decoding nor validation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, cast

from shoal.core.decisions import Refuse
from shoal.core.ticket import Ticket
from shoal.engine.lane import Lane
from shoal.engine.registry import Engine
from shoal.errors import BadRequest, Draining, Overloaded, QueueFull, ShoalError, TooLarge
from shoal.protocols.content_coding import decode_content
from shoal.protocols.oip_json import (
    InferHead,
    Limits,
    OutputTensor,
    decode_head,
    decode_raw,
    encode_binary_head,
    encode_response,
    split_binary,
)
from shoal.server.http_exchange import Exchange
from shoal.tensors.payload import Payload
from shoal.tensors.scatter import Answer
from shoal.tensors.signature import bind

__all__ = ["InferRoute", "refusal_error"]

_MAX_PLANS: Final = 256
_MAX_PLAN_KEY_BYTES: Final = 4096
_JOIN_BYTES: Final = 16 << 10
_NS_PER_US: Final = 1_000
_NS_PER_MS: Final = 1_000_000


class Plan:
    """One shape of request to one model version; shared by all requests whose JSON is the same bytes."""

    __slots__ = (
        "binding",
        "head",
        "lane",
        "outputs",
        "payload_bytes",
        "plain",
        "priority",
        "rows",
        "signature",
        "single",
        "template",
        "template_shapes",
        "timeout_ns",
    )

    def __init__(self, lane: Lane, head: InferHead) -> None:
        spec = lane.spec
        binding = bind(spec, head.inputs)
        self.lane = lane
        self.head = head
        self.binding = binding
        self.rows: int = binding.rows
        self.signature = binding.signature
        self.priority = head.priority
        self.timeout_ns = None if head.timeout_us is None else head.timeout_us * _NS_PER_US
        self.payload_bytes = head.total_bytes
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
        self.single = head.single_slice
        # Every output as it is, in binary: the response's JSON and head depend on the shapes alone.
        self.plain = (
            head.id is None
            and not spec.echo_parameters
            and all(binary and not k and spec.outputs[index].datatype != "BYTES" for index, binary, k in self.outputs)
        )
        self.template: tuple[bytes, bytes, bool] | None = None
        self.template_shapes: tuple[tuple[int, ...], ...] = ()


class InferRoute:
    """`POST /v2/models/NAME[/versions/V]/infer`."""

    def __init__(
        self, engine: Engine, model: str, version: str | None, limits: Limits, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._engine = engine
        self._model = model
        self._version = version
        self._limits = limits
        self._clock = clock
        self._lane: Lane | None = None
        self._plans: dict[bytes, Plan] = {}

    def _current_lane(self) -> Lane:
        """The lane that serves this model now; plans of another are forgotten. Raises UnknownModel, NotReady, …"""
        lane = self._engine.lane(self._model, self._version)
        if lane is not self._lane:
            self._lane = lane
            self._plans = {}
        return lane

    def reserve(self, exchange: Exchange) -> ShoalError | None:
        """Hold a place in the queue before the body is read; an error refuses the request."""
        try:
            lane = self._current_lane()
        except ShoalError as error:
            return error
        head = exchange.head
        ticket = Ticket(1, 0 if head.chunked else head.content_length)
        refuse = lane.reserve(ticket)
        if refuse is not None:
            return refusal_error(lane, refuse)
        exchange.ticket = ticket
        exchange.lane = lane
        return None

    def receive(self, exchange: Exchange, body: bytes | memoryview) -> None:
        """The body is here: make it a ticket, or answer with what is wrong with it."""
        try:
            lane = self._current_lane()
            ticket = exchange.ticket
            if ticket is None:
                ticket = Ticket()
                if lane.full:
                    # Refused without looking at the body, as a request is whose body has not arrived.
                    refuse = lane.reserve(ticket)
                    if refuse is not None:
                        raise refusal_error(lane, refuse)
            elif lane is not exchange.lane:
                # The model was reloaded while the body arrived; the held place was in the old one's queue.
                exchange.lane.cancel(ticket)  # type: ignore[union-attr]
                ticket = Ticket()
                exchange.ticket = None
            head = exchange.head
            if head.content_encoding is not None:
                body = decode_content(head.content_encoding, body, self._limits.max_request_bytes)
            plan, payload = self._decode(lane, head.infer_header_length, body)
            exchange.plan = plan
            ticket.rows = plan.rows
            ticket.payload_bytes = plan.payload_bytes
            ticket.signature = plan.signature
            ticket.payload = payload
            ticket.on_end = exchange.ticket_ended
            ticket.level = plan.priority or head.priority or 0
            ticket.tenant = head.tenant
            if plan.timeout_ns is not None or head.timeout_ms is not None:
                ticket.deadline_ns = self._deadline_ns(plan.timeout_ns, head.timeout_ms)
            refuse = lane.submit(ticket)
            if refuse is not None:
                raise refusal_error(lane, refuse)
            exchange.ticket = ticket
            exchange.lane = lane
        except ShoalError as error:
            exchange.abandon()
            exchange.fail(error)

    def _deadline_ns(self, timeout_ns: int | None, timeout_ms: float | None) -> int:
        candidates = [int(timeout_ms * _NS_PER_MS)] if timeout_ms is not None else []
        if timeout_ns is not None:
            candidates.append(timeout_ns)
        return self._clock() + min(candidates)

    def _decode(self, lane: Lane, header_length: int | None, body: bytes | memoryview) -> tuple[Plan, Payload]:
        if header_length is None:
            header_length = len(body)
        elif header_length > len(body):
            raise BadRequest(f"inference-header-content-length is {header_length}, but the body has {len(body)} bytes")
        elif header_length == 0:
            head = decode_raw(lane.spec, len(body), self._limits)
            return self._bind(Plan(lane, head), body, 0)
        key = bytes(body[:header_length])
        plan = self._plans.get(key)
        if plan is None:
            head = decode_head(key, self._limits)
            plan = Plan(lane, head)
            if head.cacheable and head.id is None and header_length <= _MAX_PLAN_KEY_BYTES:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        return self._bind(plan, body, header_length)

    @staticmethod
    def _bind(plan: Plan, body: bytes | memoryview, start: int) -> tuple[Plan, Payload]:
        """Pair a plan with the tensors of one body, in the model's order of inputs."""
        head = plan.head
        if plan.single and len(body) - start == plan.payload_bytes:
            return plan, Payload((memoryview(body)[start:],), plan.binding.row_shapes, head.parameters)
        tensors = split_binary(head, memoryview(body), start)
        return plan, Payload(tuple([tensors[index] for index in plan.binding.order]), plan.binding.row_shapes, head.parameters)

    def finish(self, exchange: Exchange, ticket: Ticket) -> None:
        """The ticket has its ending: answer."""
        if ticket.error is not None:
            error = ticket.error
            exchange.fail(error if isinstance(error, ShoalError) else ShoalError("internal error"))
            return
        plan = cast(Plan, exchange.plan)
        answer = ticket.answer
        start, rows = ticket.answer_row, ticket.rows
        head = exchange.head
        server = exchange.connection.server
        if not plan.plain or head.response_coding is not None or not exchange.keep_alive or server.draining or head.http_1_0:
            self._finish_any(exchange, plan, ticket)
            return
        template = plan.template
        if template is None or (plan.template_shapes is not answer.tail_shapes and plan.template_shapes != answer.tail_shapes):
            template = plan.template = self._render_template(plan, answer, rows)
            plan.template_shapes = answer.tail_shapes
        front, middle, joined = template
        request_id = head.request_id or server.next_request_id()
        parts: list[bytes | memoryview] = [front, request_id, middle]
        for index, _, _ in plan.outputs:
            parts.append(answer.view(index, start, rows))
        exchange.answered = True
        exchange.connection.send(exchange, [b"".join(parts)] if joined else [b"".join(parts[:3]), *parts[3:]])

    def _render_template(self, plan: Plan, answer: Answer, rows: int) -> tuple[bytes, bytes, bool]:
        """The response up to the request id, from there up to the first tensor, and whether all of it is small."""
        lane = plan.lane
        outputs = []
        total = 0
        for index, _, _ in plan.outputs:
            spec = lane.spec.outputs[index]
            size = len(answer.view(index, 0, rows))
            total += size
            outputs.append((spec.name, spec.datatype, answer.shape(index, rows), size))
        json = encode_binary_head(lane.name, lane.version, None, outputs)
        front = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
            b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\nx-request-id: " % (len(json), len(json) + total)
        )
        return front, b"\r\n\r\n" + json, total < _JOIN_BYTES

    def _finish_any(self, exchange: Exchange, plan: Plan, ticket: Ticket) -> None:
        """Outputs as JSON, classification, ids, echoed parameters, compression: everything that is not the plain binary answer."""
        lane = plan.lane
        spec = lane.spec
        answer, start, rows = ticket.answer, ticket.answer_row, ticket.rows
        outputs = []
        for index, binary, classes in plan.outputs:
            output = spec.outputs[index]
            array = answer.array(index, start, rows)
            outputs.append(
                OutputTensor(
                    output.name,
                    output.datatype,
                    array.shape,
                    array,
                    binary=binary,
                    classification=classes,
                    labels=spec.labels.get(output.name),
                    batched=spec.batchable,
                )
            )
        parameters = plan.head.parameters if spec.echo_parameters else None
        try:
            json, buffers = encode_response(lane.name, lane.version, plan.head.id, parameters, outputs)
        except ShoalError as error:
            exchange.fail(error)
            return
        if buffers:
            exchange.answer(
                b"".join((json, *buffers)),
                content_type=b"application/octet-stream",
                headers=(("Inference-Header-Content-Length", str(len(json))),),
            )
        else:
            exchange.answer(json)


def refusal_error(lane: Lane, refuse: Refuse) -> ShoalError:
    """What a refusal of the scheduler means to the client."""
    if refuse.reason == "queue_full":
        queue = lane.queue_state()
        message = f'the queue of model "{lane.name}" is full: {refuse.used} of {refuse.limit} {refuse.bound} are taken'
        return QueueFull(message, retry_after_ms=lane.retry_after_ms(), queue=queue)
    if refuse.reason == "overloaded":
        return Overloaded(f'model "{lane.name}" is overloaded', retry_after_ms=lane.retry_after_ms(), queue=lane.queue_state())
    if refuse.reason == "too_large":
        return TooLarge(f'the request has {refuse.used} rows, but model "{lane.name}" takes at most {refuse.limit} in a batch')
    if refuse.reason == "draining":
        return Draining("the server is shutting down and takes no new requests")
    return BadRequest(f"{refuse.bound}: {refuse.used} is outside the range up to {refuse.limit}")
