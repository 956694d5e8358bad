"""The way of an inference from its wire form to a ticket and back: decode, bind, queue, encode. HTTP's share of it.

A `Plan` is everything about a request that its JSON head fixes: rows, signature, where each tensor lies in the body, what is
answered and how. Clients that send tensors in binary repeat the same JSON for every request, so plans are kept by those bytes, and
such a request costs neither JSON decoding nor validation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from shoal.core.decisions import Refuse
from shoal.core.ticket import Ticket
from shoal.engine.lane import Lane
from shoal.engine.registry import Engine
from shoal.errors import BadRequest, Draining, Overloaded, QueueFull, ShoalError, TooLarge
from shoal.protocols.content_coding import decode_content
from shoal.protocols.oip_json import (
    Limits,
    OutputTensor,
    decode_head,
    decode_raw,
    encode_response,
    split_binary,
)
from shoal.server.http_exchange import COMPRESS_BYTES, Exchange
from shoal.server.http_head import Head
from shoal.server.plan import Plan, Template, without_id
from shoal.tensors.lengths import ABSENT
from shoal.tensors.payload import Payload
from shoal.tensors.scatter import Answer

__all__ = ["InferRoute", "refusal_error"]

_log = logging.getLogger("shoal")
_MAX_PLANS: Final = 256
_MAX_REFUSALS: Final = 256
_MAX_PLAN_KEY_BYTES: Final = 4096
_NS_PER_MS: Final = 1_000_000


class InferRoute:
    """`POST /v2/models/NAME[/versions/V]/infer`."""

    lasting = True

    def __init__(
        self, engine: Engine, model: str, version: str | None, limits: Limits, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.max_body_bytes = limits.max_request_bytes
        self._engine = engine
        self._model = model
        self._version = version
        self._limits = limits
        self._clock = clock
        self._lane: Lane | None = None
        self._epoch = -1
        self._plans: dict[bytes, Plan] = {}
        self._refusals: dict[tuple[Refuse, int, int], tuple[bytes, bytes]] = {}
        self._on_end = self._finish

    def _current_lane(self) -> Lane:
        """The lane that serves this model now; plans of another are forgotten. Raises UnknownModel, NotReady, …"""
        engine = self._engine
        lane = self._lane
        if lane is None or self._epoch != engine.epoch:
            lane = engine.lane(self._model, self._version)
            self._epoch = engine.epoch
            if lane is not self._lane:
                self._lane = lane
                self._plans = {}
                self._refusals = {}
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

    def grow(self, exchange: Exchange, size: int) -> ShoalError | None:
        """A body whose length was not announced has `size` bytes by now; an error refuses the request."""
        ticket, lane = exchange.ticket, exchange.lane
        if ticket is None or lane is None:
            return None
        refuse = lane.grow(ticket, size)
        return None if refuse is None else refusal_error(lane, refuse)

    def receive_part(self, exchange: Exchange, buffer: bytearray, start: int, stop: int) -> None:
        """The body is `buffer[start:stop]`, and the buffer is used again: the shortest way for a request like the last one."""
        head = exchange.head
        plan = head.plan
        lane = self._lane
        if lane is not None and lane.is_full() and self._epoch == self._engine.epoch and exchange.ticket is None:
            refuse = lane.turn_away()  # without a look at the body, as if it had not arrived
            if refuse is not None:
                self._refuse(exchange, lane, refuse)
                return
        if (
            plan is None
            or plan.lane is not lane  # made before the model was loaded anew
            or stop - start != plan.body_bytes
            or self._epoch != self._engine.epoch
            or not buffer.startswith(plan.key, start)
        ):
            self.receive(exchange, bytes(memoryview(buffer)[start:stop]))
            return
        payload = Payload((buffer[start + plan.json_bytes : stop],), plan.row_shapes, plan.parameters)
        exchange.plan = plan
        on_end = self._on_end
        if head.plain and plan.timeout_ns is None:
            ticket = Ticket(
                plan.rows, plan.payload_bytes, plan.signature, payload, on_end, None, plan.priority, plan.tenant, exchange
            )
        else:
            deadline_ns = self._deadline_ns(plan, head)
            level = plan.priority or head.priority or 0
            tenant = head.tenant or plan.tenant
            ticket = Ticket(plan.rows, plan.payload_bytes, plan.signature, payload, on_end, deadline_ns, level, tenant, exchange)
        if plan.cost:
            ticket.cost = plan.cost
        if plan.length:
            ticket.length = plan.length
        refuse = lane.submit(ticket)
        if refuse is None:
            exchange.ticket = ticket
            exchange.lane = lane
        else:
            self._refuse(exchange, lane, refuse)

    def receive(self, exchange: Exchange, body: bytes | memoryview) -> None:
        """The body is here: make it a ticket, or answer with what is wrong with it."""
        try:
            lane = self._current_lane()
            ticket = exchange.ticket
            if ticket is not None and lane is not exchange.lane:
                # The model was reloaded while the body arrived; the held place was in the old one's queue.
                exchange.release()
                ticket = None
            if ticket is None:
                ticket = Ticket()
                refuse = lane.turn_away()  # without a look at the body, as if it had not arrived
                if refuse is not None:
                    self._refuse(exchange, lane, refuse)
                    return
            head = exchange.head
            if head.content_encoding is not None:
                body = decode_content(head.content_encoding, body, self._limits.max_request_bytes)
            plan, ticket.payload = self._decode(lane, exchange, body)
            exchange.plan = plan
            ticket.rows = plan.rows
            ticket.payload_bytes = plan.payload_bytes
            ticket.signature = plan.signature
            ticket.on_end = self._on_end
            ticket.owner = exchange
            ticket.level = plan.priority or head.priority or 0
            ticket.tenant = head.tenant or plan.tenant
            if plan.cost:
                ticket.cost = plan.cost
            if plan.length:
                ticket.length = plan.length
            ticket.deadline_ns = self._deadline_ns(plan, head)
            refuse = lane.submit(ticket)
            if refuse is not None:
                raise refusal_error(lane, refuse)
            exchange.ticket = ticket
            exchange.lane = lane
        except ShoalError as error:
            exchange.release()
            exchange.fail(error)

    def _refuse(self, exchange: Exchange, lane: Lane, refuse: Refuse) -> None:
        """Answer a refusal. While a queue is full thousands are alike but for their ids, so their answers are rendered once."""
        server = exchange.connection.server
        if refuse.reason != "queue_full" or not exchange.head.plain or exchange.ticket is not None or server.draining:
            exchange.fail(refusal_error(lane, refuse))
            return
        hint_ms = lane.retry_after_ms()
        key = (refuse, hint_ms, lane.waiting_requests)
        rendered = self._refusals.get(key)
        if rendered is None:
            if len(self._refusals) >= _MAX_REFUSALS:
                self._refusals.clear()
            rendered = self._refusals[key] = exchange.render_error(refusal_error(lane, refuse, hint_ms))
        server.errors["queue_full"] += 1
        exchange.answered = True
        exchange.connection.send_one(
            exchange, b"%b%b%x%b" % (rendered[0], server.request_prefix, next(server.request_numbers), rendered[1])
        )

    def _deadline_ns(self, plan: Plan, head: Head) -> int | None:
        """The smaller of the two timeouts that a request may bring, from now on; None if it brings none."""
        timeouts_ns = [] if plan.timeout_ns is None else [plan.timeout_ns]
        if head.timeout_ms is not None:
            timeouts_ns.append(int(head.timeout_ms * _NS_PER_MS))
        return self._clock() + min(timeouts_ns) if timeouts_ns else None

    def _decode(self, lane: Lane, exchange: Exchange, body: bytes | memoryview) -> tuple[Plan, Payload]:
        """A body's plan, made or remembered, and its tensors in the model's order."""
        head = exchange.head
        json_bytes = head.infer_header_length
        if json_bytes is None:
            json_bytes = len(body)
        elif json_bytes > len(body):
            raise BadRequest(f"inference-header-content-length is {json_bytes}, but the body has {len(body)} bytes")
        elif json_bytes == 0:
            return self._bind(Plan(lane, decode_raw(lane.spec, len(body), self._limits), b""), body, 0)
        json = bytes(body[:json_bytes])
        plan = self._plans.get(json)
        if plan is None:
            key, infer_id = without_id(json)
            if infer_id is not None:
                plan = self._plans.get(key)
                if plan is None:
                    decode_head(json, self._limits)  # the whole of it must be right, not only what is left without the id
                exchange.infer_id = infer_id
        if plan is None:
            plan = Plan(lane, decode_head(key, self._limits), key)
            if plan.repeatable and json_bytes <= _MAX_PLAN_KEY_BYTES:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        if plan.repeatable and plan.single and exchange.infer_id is None and head.repeatable and head.content_encoding is None:
            head.plan = plan
        return self._bind(plan, body, json_bytes)

    @staticmethod
    def _bind(plan: Plan, body: bytes | memoryview, start: int) -> tuple[Plan, Payload]:
        if plan.single and len(body) - start == plan.payload_bytes:
            return plan, Payload((memoryview(body)[start:],), plan.row_shapes, plan.parameters)
        tensors = split_binary(plan.head, memoryview(body), start)
        if plan.lengths is None:
            return plan, Payload(tuple([tensors[index] for index in plan.order]), plan.row_shapes, plan.parameters)
        data = tuple([tensors[index] if index >= 0 else ABSENT for index in plan.order])
        payload = Payload(data, plan.row_shapes, plan.parameters)
        plan.lengths.check_payload(payload)
        return plan, payload

    def _finish(self, ticket: Ticket) -> None:
        """The ticket has its ending: answer."""
        exchange: Exchange = ticket.owner
        exchange.ticket = None
        if exchange.body is not None and ticket.parts is None:  # its rows have been copied into a batch that is done
            exchange.connection.server.bodies.give(exchange.body)
            exchange.body = None
        plan: Plan = exchange.plan
        template = plan.template
        server = exchange.connection.server
        answer: Answer = ticket.answer
        head = exchange.head
        if (
            ticket.error is not None
            or template is None
            or not head.plain
            or not exchange.keep_alive
            or server.draining
            or (head.response_coding is not None and template.size >= COMPRESS_BYTES)
        ):
            self._finish_any(exchange, plan, ticket)
            return
        if template.shapes is not answer.tail_shapes:
            if template.shapes != answer.tail_shapes:
                self._finish_any(exchange, plan, ticket)
                return
            template.shapes = answer.tail_shapes  # the next look is a comparison of identities
        exchange.answered = True
        only = template.only
        if exchange.infer_id is not None:
            tensors = [answer.view(index, ticket.answer_row, plan.rows) for index, _, _ in plan.outputs]
            front = template.front_with_id(exchange.infer_id, next(server.request_numbers))
            exchange.connection.send(exchange, [front, *tensors] if only is None else [b"".join((front, *tensors))])
            return
        if only is not None:
            size = template.size
            start = ticket.answer_row * size // plan.rows
            tensor = answer.views[only][start : start + size]  # type: ignore[index]  # None is for BYTES, which are not plain
            response = b"%b%x%b%b" % (template.front, next(server.request_numbers), template.middle, tensor)  # type: ignore[str-format]
            exchange.connection.send_one(exchange, response)
            return
        front = b"%b%x%b" % (template.front, next(server.request_numbers), template.middle)
        tensors = [answer.view(index, ticket.answer_row, plan.rows) for index, _, _ in plan.outputs]
        exchange.connection.send(exchange, [front, *tensors])

    def _finish_any(self, exchange: Exchange, plan: Plan, ticket: Ticket) -> None:
        """Every other answer: errors, outputs as JSON, classification, ids, parameters, compression, and the first of its kind."""
        if ticket.error is not None:
            error = ticket.error
            exchange.fail(error if isinstance(error, ShoalError) else ShoalError("internal error"))
            return
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
        request_id = plan.head.id if exchange.infer_id is None else exchange.infer_id.decode("ascii")
        try:
            json, buffers = encode_response(lane.name, lane.version, request_id, parameters, outputs)
        except Exception as error:  # a request without any answer would be worse than one that is told of our fault
            if not isinstance(error, ShoalError):
                _log.exception("the answer of model %s cannot be encoded", lane.name)
            exchange.fail(error if isinstance(error, ShoalError) else ShoalError("internal error"))
            return
        if plan.plain:
            plain_json = json if request_id is None else encode_response(lane.name, lane.version, None, parameters, outputs)[0]
            plan.template = Template(plan, answer, plain_json, exchange.connection.server.request_prefix)
        if buffers:
            exchange.answer(
                b"".join((json, *buffers)),
                content_type=b"application/octet-stream",
                headers=(("Inference-Header-Content-Length", str(len(json))),),
                compress=True,
            )
        else:
            exchange.answer(json, compress=True)


def refusal_error(lane: Lane, refuse: Refuse, hint_ms: int | None = None) -> ShoalError:
    """What a refusal of the scheduler means to the client; `hint_ms` if the hint has been drawn already."""
    if refuse.reason == "queue_full":
        queue = lane.queue_state()
        message = f'the queue of model "{lane.name}" is full: {refuse.used} of {refuse.limit} {refuse.bound} are taken'
        return QueueFull(message, retry_after_ms=hint_ms or lane.retry_after_ms(), queue=queue)
    if refuse.reason == "overloaded":
        return Overloaded(f'model "{lane.name}" is overloaded', retry_after_ms=lane.retry_after_ms(), queue=lane.queue_state())
    if refuse.reason == "too_large" and refuse.bound == "cost":
        return TooLarge(f'the request costs {refuse.used}, but a batch of model "{lane.name}" may cost at most {refuse.limit}')
    if refuse.reason == "too_large" and refuse.bound != "batch":
        return TooLarge(
            f'the request has {refuse.used} {refuse.bound}, but the queue of model "{lane.name}" holds at most {refuse.limit}'
        )
    if refuse.reason == "too_large":
        return TooLarge(f'the request has {refuse.used} rows, but model "{lane.name}" takes at most {refuse.limit} in a batch')
    if refuse.reason == "draining":
        return Draining("the server is shutting down and takes no new requests")
    return BadRequest(f"{refuse.bound}: {refuse.used} is outside the range up to {refuse.limit}")
