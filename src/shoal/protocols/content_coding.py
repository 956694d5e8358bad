"""Content codings of HTTP bodies: gzip and deflate (zlib format), bounded in size both ways, and the choice by Accept-Encoding.

Bytes in, bytes out. A body that would unfold to more than the limit is refused before the memory for it is taken.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Final, TypeAlias

from shoal.errors import BadRequest, NotSupported, TooLarge

__all__ = ["CODINGS", "choose_coding", "decode_content", "encode_content"]

Bytes: TypeAlias = bytes | bytearray | memoryview

CODINGS: Final = ("gzip", "deflate")
_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_CHUNK_BYTES: Final = 64 << 10
_STEP_BYTES: Final = 256 << 10
_MAX_MEMBERS: Final = 1024
_LEVEL: Final = 1  # tensors compress badly; a higher level costs much time and wins little


def _unfold(data: memoryview, coding: str, max_bytes: int) -> bytes:
    """Unfold member after member. Input goes in by small chunks, because zlib hands back a copy of what it did not use."""
    pieces: list[bytes] = []
    room = max_bytes
    position = 0
    for _ in range(_MAX_MEMBERS):
        machine = zlib.decompressobj(wbits=_WINDOW_BITS[coding])
        chunk: Bytes = b""
        while not machine.eof:
            if not chunk:
                chunk = data[position : position + _CHUNK_BYTES]
                position += len(chunk)
            fed = len(chunk)
            try:
                # One byte more than there is room for tells a body that fits exactly from one that does not.
                piece = machine.decompress(chunk, min(room + 1, _STEP_BYTES))
            except zlib.error:
                raise BadRequest(f"the body is not valid {coding} data") from None
            chunk = machine.unconsumed_tail
            room -= len(piece)
            if room < 0:
                raise TooLarge(f"the {coding} body unfolds to more than the limit of {max_bytes} bytes")
            if piece:
                pieces.append(piece)
            elif not fed and not machine.eof:
                raise BadRequest(f"the {coding} body is cut short")
        position -= len(machine.unused_data)
        if position == len(data):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if coding == "deflate":
            raise BadRequest(f"{len(data) - position} bytes follow the end of the deflate body")
    raise BadRequest(f"the gzip body has more than {_MAX_MEMBERS} members")


def decode_content(coding: str, body: Bytes, max_bytes: int) -> bytes:
    """The unfolded body. `coding` is the value of Content-Encoding: `identity`, `gzip` (several members are fine) or `deflate`.

    Raises `TooLarge` beyond `max_bytes`, `BadRequest` for data that is invalid, cut short or followed by something else,
    `NotSupported` for other codings and for several at once.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        if len(body) > max_bytes:
            raise TooLarge(f"the body has {len(body)} bytes, the limit is {max_bytes}")
        return bytes(body)
    if name not in _WINDOW_BITS:
        raise NotSupported(f"Content-Encoding {coding[:100]!r} is not supported; use gzip or deflate")
    return _unfold(memoryview(body), name, max_bytes)


def encode_content(coding: str, body: Bytes) -> bytes:
    """The body in `coding`, which is one of `CODINGS`. The same input gives the same bytes (no time stamp inside)."""
    if coding == "gzip":
        return gzip.compress(body, compresslevel=_LEVEL, mtime=0)
    if coding == "deflate":
        return zlib.compress(body, level=_LEVEL)
    raise ValueError(f"unknown content coding {coding!r}")


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return quality if 0.0 <= quality <= 1.0 else 0.0
    return 1.0


def choose_coding(accept_encoding: str | None) -> str | None:
    """The best of `CODINGS` that an Accept-Encoding value allows, or None for an answer as it is.

    The higher q wins, gzip on a tie; `*` stands for the codings not named. An answer as it is needs no permission to be given
    here: when a client forbids even that (`identity;q=0`) and allows nothing we have, it gets the plain body all the same.
    """
    if not accept_encoding:
        return None
    qualities: dict[str, float] = {}
    for item in accept_encoding.split(","):
        name, *parameters = item.split(";")
        name = name.strip().lower()
        if name:
            qualities["gzip" if name == "x-gzip" else name] = _quality(parameters)
    rest = qualities.get("*", 0.0)
    best, best_quality = None, 0.0
    for coding in CODINGS:
        quality = qualities.get(coding, rest)
        if quality > best_quality:
            best, best_quality = coding, quality
    return best if best_quality >= qualities.get("identity", 0.0) else None
