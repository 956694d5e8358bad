"""The caps that every codec checks before it takes memory. Plain numbers; no parsing here."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["DEFAULT_LIMITS", "Limits"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask for, checked before its tensors are looked at and before it is queued.

    `max_elements` is per tensor, `max_request_bytes` is the sum of all tensor bytes of one request (as stored, not as JSON text),
    `max_name_bytes` holds for tensor names, parameter names and the request id, `max_inputs` and `max_outputs` count tensors.
    `max_json_keys` counts all keys of the request's JSON together: making objects costs far more time than their text suggests.
    """

    max_rank: int = 16
    max_elements: int = 2**31 - 1
    max_name_bytes: int = 1024
    max_json_depth: int = 32
    max_json_keys: int = 4096
    max_inputs: int = 64
    max_outputs: int = 64
    max_request_bytes: int = 64 << 20


DEFAULT_LIMITS: Final = Limits()
