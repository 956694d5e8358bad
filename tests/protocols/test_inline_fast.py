"""The short way for inline data against the long one: the same arrays, the same refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.datatypes import DATATYPES
from shoal.errors import BadRequest
from shoal.protocols import inline_fast, oip_inline
from shoal.protocols.inline_fast import parse_plain
from shoal.protocols.oip_inline import parse_inline

NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]


def outcome(text: bytes, datatype: str, shape: tuple[int, ...]) -> Any:
    """The array's dtype, shape and bytes, or the refusal."""
    elements = int(np.prod(shape))
    try:
        array = parse_inline(text, DATATYPES[datatype], shape, elements, "x")
    except BadRequest as error:
        return str(error)
    content = array.tolist() if array.dtype.hasobject else array.tobytes()
    return array.dtype, array.shape, content


VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-200, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.sampled_from(["NaN", "Infinity", 0.0, -0.0, 65519.99, 65520.0, 3.4028235677973366e38, 2**63, 2**64 - 1]),
    st.sampled_from([[], {}, [1], [[1]]]),
)


@given(st.data())
@settings(deadline=None, max_examples=250)
def test_both_ways_agree(data: st.DataObject) -> None:
    """Whatever is sent for whatever datatype and shape, with the short way or without it the outcome is the same."""
    datatype = data.draw(st.sampled_from([*NUMERIC, "BYTES"]))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    one = data.draw(st.sampled_from([VALUES, st.integers(0, 100), st.floats(-1e5, 1e5), st.booleans(), st.text(max_size=3)]))
    count = int(np.prod(shape)) + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    tree: Any = data.draw(st.lists(one, min_size=count, max_size=count))
    for dimension in reversed(shape[1:] if data.draw(st.booleans()) else ()):
        tree = [tree[start : start + dimension] for start in range(0, len(tree), dimension)]
    text = json.dumps(tree, separators=data.draw(st.sampled_from([(",", ":"), (" , ", ": ")]))).encode()
    got = outcome(text, datatype, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oip_inline, "parse_plain", lambda *arguments: None)
        assert outcome(text, datatype, shape) == got


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_pieces_are_the_whole(data: st.DataObject) -> None:
    """Decoding piece by piece, whatever a piece's size, gives what decoding at once gives, also for text that was damaged."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    array = np.arange(int(np.prod(shape))).reshape(shape)
    space = data.draw(st.sampled_from([(",", ":"), (" , ", ": ")]))
    text = bytearray(json.dumps(array.tolist(), separators=space).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        position = data.draw(st.integers(0, len(text)))
        text[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"[", b"]", b",", b" ", b"1", b"", b"]]"])
        )
    got = outcome(bytes(text), "INT16", shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline_fast, "_CHUNK_BYTES", data.draw(st.integers(0, 12)))
        assert outcome(bytes(text), "INT16", shape) == got


@pytest.mark.parametrize("datatype", NUMERIC)
def test_long_data_is_decoded_in_pieces(datatype: str) -> None:
    """Texts of many pieces, flat and nested as JSON libraries write them, are decoded on the short way and exactly."""
    dtype = DATATYPES[datatype].numpy
    array = np.random.default_rng(0).integers(0, 2, (4, 50_000, 3)).astype(dtype)
    for tree in (array.reshape(-1).tolist(), array.tolist()):
        text = json.dumps(tree).encode()
        assert len(text) > 4 * inline_fast._CHUNK_BYTES
        got = parse_plain(text, DATATYPES[datatype], array.shape, array.size)
        assert got is not None and got.dtype == dtype and np.array_equal(got, array)
        assert parse_plain(text, DATATYPES[datatype], (*array.shape, 2), 2 * array.size) is None


@pytest.mark.parametrize(
    "text", [b"[1,,2]", b"[1,2,]", b"[,1,2]", b"[1,2", b"1,2]", b"[1,2]]", b"[[1],2]", b"[1 2,3]", b"[1]2,[3]"]
)
@pytest.mark.parametrize("chunk_bytes", [0, 1, 2, 3, 1000])
def test_malformed_lists_stay_malformed_in_pieces(text: bytes, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cut makes a valid list of an invalid one."""
    monkeypatch.setattr(inline_fast, "_CHUNK_BYTES", chunk_bytes)
    for shape in ((2,), (3,), (1, 2), (2, 1)):
        assert parse_plain(text, DATATYPES["FP32"], shape, int(np.prod(shape))) is None
