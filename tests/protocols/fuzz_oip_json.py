"""Random and mutated inference requests against the HTTP/JSON codec: every one is decoded or refused with one of our errors.

Run by hand with a count and a seed, `python tests/protocols/fuzz_oip_json.py 200000 7`; the tests run a small, fixed part of it.
Plain random bytes and mutations of valid requests; no coverage guidance, no extra dependency.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from shoal.datatypes import ModelSpec, TensorSpec
from shoal.errors import ShoalError
from shoal.protocols.oip_json import Limits, decode_head, decode_raw, split_binary
from shoal.tensors.signature import bind

LIMITS = Limits(max_request_bytes=1 << 20)
SPEC = ModelSpec("test", (TensorSpec("x", "FP32", (-1, -1)), TensorSpec("s", "BYTES", (-1,))), ())
RAW_SPECS = tuple(
    ModelSpec("test", (TensorSpec("x", datatype, shape),), ())
    for datatype, shape in (("FP32", (-1, 4)), ("FP32", (-1, -1, 3)), ("BYTES", (-1, 1)), ("INT8", (-1, -1, -1)), ("FP16", (-1,)))
)
WORDS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 4, 5, 2**31, 2**63, 2**64, 2**200, 1.0, 1e300, "", "x", "s", "FP32", "INT8", "UINT64", "BOOL",
    "BF16", "FP16", "BYTES", "NaN", "-Infinity", "é", "\x00", "shape", "binary_data_size", "shared_memory_region", "sequence_id",
    "classification", "priority", "timeout", [], {}, [[]], [[1], [2, 3]], [1, [2]], [0], [1, 2], [-1, 4], {"a": [1]},
)  # fmt: skip


def valid_request(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A request that is fine, and the binary data behind it."""
    rows = rng.randint(1, 3)
    head: dict[str, Any] = {
        "inputs": [
            {"name": "x", "shape": [rows, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8 * rows}},
            {"name": "s", "shape": [rows], "datatype": "BYTES", "parameters": {"binary_data_size": 6 * rows}},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True, "classification": 2}}],
        "parameters": {"priority": 1, "timeout": 1000, "custom": "a:b", "binary_data_output": True},
        "id": "1",
    }
    tail = bytes(8 * rows) + b"\x02\x00\x00\x00ab" * rows
    if rng.random() < 0.5:
        head["inputs"][0] = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": [[1.5, "NaN"]] * rows}
        tail = tail[8 * rows :]
    return head, tail


def mutate_tree(rng: random.Random, node: Any) -> Any:
    """Replace, remove or double one random part of a JSON tree."""
    if isinstance(node, dict) and node and rng.random() < 0.8:
        key = rng.choice(list(node))
        action = rng.random()
        if action < 0.6:
            return {**node, key: mutate_tree(rng, node[key])}
        if action < 0.8:
            return {name: value for name, value in node.items() if name != key}
        return {**node, str(rng.choice(WORDS)): rng.choice(WORDS)}
    if isinstance(node, list) and node and rng.random() < 0.8:
        index = rng.randrange(len(node))
        action = rng.random()
        if action < 0.7:
            return [*node[:index], mutate_tree(rng, node[index]), *node[index + 1 :]]
        return [*node, node[index]] if action < 0.85 else node[:index]
    return rng.choice(WORDS)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, drop or insert a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(changed) + 1)
        action = rng.random()
        if action < 0.4 and position < len(changed):
            changed[position] = rng.choice(b'{}[]":,\\0-9eN\x00\xff') if rng.random() < 0.7 else rng.randrange(256)
        elif action < 0.7:
            del changed[position : position + rng.randint(1, 5)]
        else:
            changed[position:position] = rng.choice(
                (b"[", b"]", b"{", b'"', b"\\", b",", b"9" * 30, b"\xff", b"[" * 40, b'"name":"x",')
            )
    return bytes(changed)


def one_case(rng: random.Random) -> tuple[bytes, int]:
    """A body, and where its JSON ends."""
    kind = rng.random()
    if kind < 0.1:
        body = rng.randbytes(rng.randint(0, 200))
        return body, rng.randint(0, len(body))
    head, tail = valid_request(rng)
    if kind < 0.7:
        for _ in range(rng.randint(1, 3)):
            mutated = mutate_tree(rng, head)
            head = mutated if isinstance(mutated, dict) else head
    text = json.dumps(head).encode()
    if kind > 0.6:
        text = mutate_bytes(rng, text)
    if rng.random() < 0.2:
        tail = mutate_bytes(rng, tail)
    return text + tail, len(text)


def run(count: int, seed: int) -> dict[str, int]:
    """Decode `count` cases. Returns how many ended how; anything but one of our errors is raised with the case in it."""
    rng = random.Random(seed)
    endings: dict[str, int] = {}
    for _ in range(count):
        body, length = one_case(rng)
        try:
            head = decode_head(body[:length], LIMITS)
            parts = split_binary(head, memoryview(body), length)
            assert len(parts) == len(head.inputs)
            bind(SPEC, head.inputs)
            ending = "accepted"
        except ShoalError as error:
            assert str(error) and error.http_status in (400, 403, 413, 501), body
            ending = type(error).__name__
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {body!r} with JSON length {length}") from error
        endings[ending] = endings.get(ending, 0) + 1
        try:
            raw = decode_raw(rng.choice(RAW_SPECS), len(body), LIMITS)
            split_binary(raw, memoryview(body), 0)
        except ShoalError:
            pass
    return endings


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    begin = time.perf_counter()
    print(run(total, int(sys.argv[2]) if len(sys.argv) > 2 else 0), f"{time.perf_counter() - begin:.1f} s")
