"""The guards before typed decoding: what counts as being in a string, and bounds on how much structure a text may have."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadRequest
from shoal.protocols import json_guard
from shoal.protocols.json_guard import check_depth, check_keys
from shoal.protocols.oip_json import Limits, decode_head

TENSOR = b'{"name":"x","shape":[1],"datatype":"INT8","data":[1]}'


def outside(text: bytes) -> bytes:
    """What is not in strings, told character by character."""
    kept, inside, escaped = bytearray(), False, False
    for byte in text:
        if not inside:
            inside = byte == ord('"')
            kept.append(0 if inside else byte)
        else:
            kept.append(0)
            if escaped:
                escaped = False
            elif byte == ord("\\"):
                escaped = True
            elif byte == ord('"'):
                kept[-1] = byte
                inside = False
    return bytes(kept)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_strings_are_told_apart_exactly(data: st.DataObject) -> None:
    """Whatever its strings hold and wherever a piece ends, just the characters outside of strings are left of a text."""
    tree = st.recursive(
        st.text('"\\[]{}:a', max_size=6), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\:', max_size=4), inner)
    )
    text = json.dumps(data.draw(tree)).encode()
    text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
    wanted = data.draw(st.sampled_from([b"[]{}", b":", b"[]{}:a,"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_guard, "_CHUNK_BYTES", data.draw(st.integers(1, 20)))
        got = b"".join([piece.tobytes() for piece in json_guard._outside_strings(text, wanted)])
    assert got.replace(b"\0", b"") == bytes(byte for byte in outside(text) if byte in wanted)


def test_keys_in_strings_do_not_count() -> None:
    """4,096 keys pass and one more does not; colons in strings are free."""
    check_keys(b'{"a":1,' + b'"k":2,' * 4095 + b"}", 4096)
    with pytest.raises(BadRequest, match="more keys than the limit of 4096"):
        check_keys(b'{"a":1,' + b'"k":2,' * 4096 + b"}", 4096)
    check_keys(b'{"a":"' + b":" * 10_000 + b'\\":"}', 4096)


@pytest.mark.parametrize(
    "text",
    [
        b"{" + b'"inputs":[],' * 100_000 + b'"inputs":[]}',
        b"{" + b'"id":"a",' * 100_000 + b'"inputs":[' + TENSOR + b"]}",
        b'{"inputs":[' + b",".join([TENSOR] * 100_000) + b"]}",
        b'{"inputs":[' + TENSOR + b'],"outputs":[' + b",".join([b'{"name":"y"}'] * 100_000) + b"]}",
        b'{"inputs":[' + TENSOR + b'],"parameters":{' + b",".join([b'"%d":1' % i for i in range(100_000)]) + b"}}",
        b'{"inputs":[' + TENSOR + b"]," + b",".join([b'"%d":1' % i for i in range(100_000)]) + b"}",
    ],
)
def test_floods_of_keys_are_refused_before_objects_are_made(text: bytes) -> None:
    """Keys by the hundred thousand, in whatever place, once kept the decoder busy for a quarter of a second per megabyte."""
    with pytest.raises(BadRequest, match="more keys than the limit of 4096"):
        decode_head(text)
    assert decode_head(b'{"inputs":[' + TENSOR + b"]}", Limits(max_json_keys=5)).total_bytes == 1


def test_depth_behind_many_strings() -> None:
    """Brackets after a million strings, escaped and not, are counted as before them."""
    check_depth(b"[" * 32 + b'"\\\\","\\"[",' * 100_000 + b"]" * 32, 32)
    with pytest.raises(BadRequest, match="nests deeper"):
        check_depth(b'"\\\\","\\"",' * 100_000 + b"[" * 33, 32)
