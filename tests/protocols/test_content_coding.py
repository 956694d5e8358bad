"""Content codings: round trips, bounded unfolding, exact ends, and the choice by Accept-Encoding."""

from __future__ import annotations

import contextlib
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadRequest, NotSupported, ShoalError, TooLarge
from shoal.protocols.content_coding import CODINGS, choose_coding, decode_content, encode_content

MAX = 1 << 20


@pytest.mark.parametrize("coding", CODINGS)
@given(st.binary(max_size=3000), st.integers(1, 200))
@settings(deadline=None, max_examples=40)
def test_round_trip(coding: str, data: bytes, times: int) -> None:
    """Decoding what was encoded gives the same bytes."""
    assert decode_content(coding, encode_content(coding, data * times), MAX) == data * times


def test_standard_formats() -> None:
    """gzip is gzip and deflate is zlib, as the standard library and clients have them; names ignore case and spaces."""
    assert gzip.decompress(encode_content("gzip", b"abc")) == zlib.decompress(encode_content("deflate", b"abc")) == b"abc"
    assert decode_content(" GZIP ", gzip.compress(b"abc"), MAX) == decode_content("x-gzip", gzip.compress(b"abc"), MAX) == b"abc"
    assert decode_content("deflate", memoryview(zlib.compress(b"abc", 9)), MAX) == b"abc"
    assert decode_content("identity", b"abc", MAX) == b"abc"


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 262_144, 262_145, 1_000_000])
def test_limit_is_exact(coding: str, size: int) -> None:
    """A body of exactly the limit passes, one byte more is TooLarge: at chunk borders too."""
    encoded = encode_content(coding, bytes(size))
    assert len(decode_content(coding, encoded, size)) == size
    if size:
        with pytest.raises(TooLarge, match=f"limit of {size - 1} bytes"):
            decode_content(coding, encoded, size - 1)


def test_bomb_takes_no_memory() -> None:
    """A small body that would unfold to 200 MB is refused without holding more than about its limit."""
    machine = zlib.compressobj(9)
    bomb = b"".join(machine.compress(bytes(1 << 20)) for _ in range(200)) + machine.flush()
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode_content("deflate", bomb, MAX)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * MAX


@pytest.mark.parametrize("coding", CODINGS)
def test_truncated_and_garbage(coding: str) -> None:
    """Every proper prefix of a body, and anything after its end, is a BadRequest."""
    encoded = encode_content(coding, bytes(range(256)) * 4)
    for end in range(len(encoded)):
        with pytest.raises(BadRequest):
            decode_content(coding, encoded[:end], MAX)
    with pytest.raises(BadRequest):
        decode_content(coding, encoded + b"x", MAX)
    with pytest.raises(BadRequest):
        decode_content(coding, encoded + bytes(100), MAX)


def test_wrong_checksum() -> None:
    """A body whose checksum is wrong is refused."""
    for coding in CODINGS:
        encoded = bytearray(encode_content(coding, b"abc" * 100))
        encoded[-1 if coding == "deflate" else -5] ^= 1
        with pytest.raises(BadRequest, match="not valid"):
            decode_content(coding, encoded, MAX)


def test_members() -> None:
    """Several gzip members are one body, across input chunks too; a flood of empty ones is refused."""
    pieces = [bytes([index]) * 9000 + bytes(range(256)) for index in range(50)]
    assert decode_content("gzip", b"".join(map(gzip.compress, pieces)), MAX) == b"".join(pieces)
    with pytest.raises(BadRequest, match="more than 1024 members"):
        decode_content("gzip", gzip.compress(b"") * 5000, MAX)


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=200), st.booleans())
@settings(deadline=None, max_examples=200)
def test_decoding_is_total(coding: str, data: bytes, with_header: bool) -> None:
    """Arbitrary bytes, also behind a valid start, are decoded or refused with one of our errors."""
    start = encode_content(coding, b"abcdefgh" * 20)[:12] if with_header else b""
    with contextlib.suppress(ShoalError):
        decode_content(coding, start + data, 1000)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, deflate", "compress", "é"])
def test_unknown_codings(coding: str) -> None:
    """Other codings are refused as not supported, naming what would be."""
    with pytest.raises(NotSupported, match="use gzip or deflate"):
        decode_content(coding, b"", MAX)


@pytest.mark.parametrize(
    ("header", "choice"),
    [
        (None, None),
        ("", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "gzip"),
        ("deflate;q=0.9, gzip;q=0.5", "deflate"),
        ("GZIP ; Q=1.0", "gzip"),
        ("x-gzip", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0, *", "deflate"),
        ("*", "gzip"),
        ("*;q=0", None),
        ("br, zstd", None),
        ("identity", None),
        ("identity, gzip;q=0.5", None),
        ("identity;q=0.5, gzip", "gzip"),
        ("identity;q=0", None),
        ("gzip;q=nonsense", None),
        ("gzip;q=nan", None),
        ("gzip;q=7", None),
        (",;,;q=1,", None),
    ],
)
def test_choice(header: str | None, choice: str | None) -> None:
    """Case 36: the coding of the answer follows the header's q-values; nonsense means no coding."""
    assert choose_coding(header) == choice


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=100)
def test_choice_is_total(header: str) -> None:
    """Any header value gives one of our codings or none."""
    assert choose_coding(header) in (*CODINGS, None)
