"""Rows in, rows out: whatever the members, sizes and splits, each row is in the batch once and its answer goes to its owner."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import ModelFailed
from shoal.tensors import assemble as assemble_module
from shoal.tensors.assemble import Assembler, row_parameters
from shoal.tensors.payload import Array, Payload
from shoal.tensors.scatter import Answer, BadElement, join_answers, make_answer, serialize_bytes


@dataclass
class Piece:
    """A member of a batch."""

    rows: int
    start_row: int
    payload: Payload


def spec_of(*datatypes: str, row_shape: tuple[int, ...] = (3,), batchable: bool = True) -> ModelSpec:
    """A model whose outputs are like its inputs."""
    tensors = tuple(
        TensorSpec(f"t{index}", datatype, (-1, *row_shape) if batchable else row_shape) for index, datatype in enumerate(datatypes)
    )
    return ModelSpec("test", tensors, tensors, batchable=batchable)


def random_rows(datatype: str, rows: int, row_shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Rows full of random bits (strings for BYTES)."""
    dtype = DATATYPES[datatype].numpy
    shape = (rows, *row_shape)
    if dtype.hasobject:
        flat = np.empty(int(np.prod(shape)), dtype=object)
        flat[:] = [rng.bytes(int(rng.integers(0, 5))) for _ in range(flat.size)]
        return flat.reshape(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def as_sent(array: Array, form: int) -> Any:
    """An array as it may come in a payload: as an array, or as bytes at an odd place of a body."""
    if form == 0 or array.dtype.hasobject:
        return array
    data = array.tobytes()
    if form == 1:
        return data
    return memoryview(bytearray(b"x" * form + data))[form:]


def same(left: Array, right: Array) -> bool:
    """Equal in shape, dtype and every bit."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    return left.tolist() == right.tolist() if left.dtype.hasobject else left.tobytes() == right.tobytes()


BATCHES = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)


@pytest.mark.parametrize("join_bytes", [64 << 10, 0])
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 5)])
@given(st.sampled_from(list(DATATYPES)), BATCHES, st.booleans(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_rows_go_in_and_come_back(
    join_bytes: int, row_shape: tuple[int, ...], datatype: str, sizes: list[tuple[int, int, int]], share: bool, seed: int
) -> None:
    """Members of all sizes, forms and splits: the batch is their rows in order, and each gets exactly its rows back."""
    rng = np.random.default_rng(seed)
    spec = spec_of(datatype, "INT16", row_shape=row_shape)
    members: list[Piece] = []
    wanted: list[list[Array]] = []
    for rows, before, after in sizes:
        form = int(rng.integers(0, 5))
        whole = [random_rows(name, before + rows + after, row_shape, rng) for name in (datatype, "INT16")]
        payload = Payload(tuple([as_sent(array, form) for array in whole]), (row_shape, row_shape))
        members.append(Piece(rows, before, payload))
        wanted.append([array[before : before + rows] for array in whole])
    total = sum(member.rows for member in members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble_module, "_JOIN_BYTES", join_bytes)
        assembler = Assembler(spec, 20, share_single=share)
        for _ in range(2):  # the second time into buffers that hold the first batch
            arrays = assembler.assemble(members)
            for index in range(2):
                assert same(arrays[index], np.concatenate([rows_of[index] for rows_of in wanted]))
                assert arrays[index].flags.c_contiguous and arrays[index].flags.aligned
                assert arrays[index].flags.writeable or share
    answer = make_answer(spec, [array.copy() for array in arrays], total)
    start = 0
    for member, rows_of in zip(members, wanted, strict=True):
        for index in range(2):
            got = answer.array(index, start, member.rows)
            assert same(got, rows_of[index])
            assert answer.shape(index, member.rows) == got.shape
            assert bytes(answer.view(index, start, member.rows)) == serialize_any(rows_of[index])
        start += member.rows


def serialize_any(array: Array) -> bytes:
    """The wire bytes of an array."""
    return serialize_bytes(array) if array.dtype.hasobject else array.tobytes()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["FP32", "BYTES", "BOOL"]), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_split_requests_are_rejoined_in_order(sizes: list[int], datatype: str, seed: int) -> None:
    """Case 9: a request cut into pieces that ran in batches with others comes back whole and in order."""
    rng = np.random.default_rng(seed)
    spec = spec_of(datatype)
    whole = random_rows(datatype, sum(sizes), (3,), rng)
    payload = Payload((as_sent(whole, 3),), ((3,),))
    assembler = Assembler(spec, 32)
    pieces: list[tuple[Answer, int, int]] = []
    done = 0
    for size in sizes:
        neighbour = random_rows(datatype, 2, (3,), rng)
        (batch,) = assembler.assemble([Piece(2, 0, Payload((neighbour,), ((3,),))), Piece(size, done, payload)])
        pieces.append((make_answer(spec, [batch.copy()], 2 + size), 2, size))
        done += size
    joined = join_answers(pieces)
    assert same(joined.array(0, 0, done), whole)
    assert bytes(joined.view(0, 0, done)) == serialize_any(whole)


def test_pieces_of_different_shapes_cannot_be_joined() -> None:
    """Pieces whose outputs differ behind the batch fail, naming the output and both shapes."""
    spec = spec_of("FP32", row_shape=(-1,))
    answers = [make_answer(spec, [np.zeros((1, size), np.float32)], 1) for size in (2, 3)]
    with pytest.raises(ModelFailed, match=r'output "t0": .*\[2\] and \[3\]'):
        join_answers([(answers[0], 0, 1), (answers[1], 0, 1)])


def test_large_batches_use_the_same_memory_again() -> None:
    """From batch to batch of one shape the buffer stays; a smaller batch is a part of it."""
    spec = spec_of("FP32", row_shape=(100_000,))
    assembler = Assembler(spec, 4)
    payload = Payload((bytes(400_000),), ((100_000,),))
    (first,) = assembler.assemble([Piece(1, 0, payload)] * 4)
    (second,) = assembler.assemble([Piece(1, 0, payload)] * 2)
    assert second.ctypes.data == first.ctypes.data
    assert (first.shape, second.shape) == ((4, 100_000), (2, 100_000))
    assert assembler.kept_bytes == 4 * 400_000


def test_kept_buffers_are_bounded() -> None:
    """Only the last few shapes are kept, and never more than the byte limit; batches beyond `max_rows` get their own memory."""
    assembler = Assembler(spec_of("UINT8", row_shape=(-1,)), 2)
    sizes = [100_000 + index for index in range(10)]
    for size in sizes:
        assembler.assemble([Piece(1, 0, Payload((bytes(size),), ((size,),)))])
    assert assembler.kept_bytes == 2 * sum(sizes[-4:])
    (array,) = assembler.assemble([Piece(1, 0, Payload((bytes(sizes[-1]),), ((sizes[-1],),)))] * 5)
    assert array.shape == (5, sizes[-1])
    assert assembler.kept_bytes == 2 * sum(sizes[-4:])


def test_byte_limit_of_kept_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes too large to keep are assembled all the same, and older ones make room for newer."""
    monkeypatch.setattr(assemble_module, "_KEPT_BYTES", 500_000)
    assembler = Assembler(spec_of("UINT8", "UINT8", row_shape=(-1,)), 2)

    def run(first: int, second: int) -> int:
        payload = Payload((b"a" * first, b"b" * second), ((first,), (second,)))
        one, two = assembler.assemble([Piece(1, 0, payload)])
        assert (one.tobytes(), two.tobytes()) == (b"a" * first, b"b" * second)
        return assembler.kept_bytes

    assert run(100_000, 80_000) == 360_000
    assert run(70_000, 70_001) == 280_002  # the first pair made room
    assert run(300_000, 70_000) == 280_002 + 140_000  # 600,000 bytes are never kept
    assert run(90_000, 90_000) == 140_000 + 360_000


def test_a_lone_large_member_may_be_shared() -> None:
    """With `share_single` an aligned lone member is not copied; an unaligned one is, and without the switch each is."""
    spec = spec_of("FP32", row_shape=(50_000,))
    body = bytearray(200_008)
    aligned = Piece(1, 0, Payload((memoryview(body)[4:200_004],), ((50_000,),)))
    odd = Piece(1, 0, Payload((memoryview(body)[1:200_001],), ((50_000,),)))
    shared = Assembler(spec, 4, share_single=True)
    assert np.shares_memory(shared.assemble([aligned])[0], np.frombuffer(body, np.uint8))
    assert not np.shares_memory(shared.assemble([odd])[0], np.frombuffer(body, np.uint8))
    assert not np.shares_memory(Assembler(spec, 4).assemble([aligned])[0], np.frombuffer(body, np.uint8))


def test_huge_pieces_are_copied_right() -> None:
    """Pieces large enough for a copy that lets other threads run arrive unchanged."""
    rng = np.random.default_rng(5)
    rows = [rng.bytes(1_200_001) for _ in range(3)]
    assembler = Assembler(spec_of("UINT8", row_shape=(1_200_001,)), 3)
    (array,) = assembler.assemble([Piece(1, 0, Payload((memoryview(row),), ((1_200_001,),))) for row in rows])
    assert array.tobytes() == b"".join(rows)


def test_byte_strings_do_not_outlive_their_batch() -> None:
    """BYTES elements are in no kept buffer: when the batch is gone, so are they."""

    class Element(bytes):
        """Bytes that can be watched."""

    spec = spec_of("BYTES", row_shape=(1,))
    assembler = Assembler(spec, 4)
    data = np.empty((1, 1), dtype=object)
    data[0, 0] = Element(b"abc")
    watch = weakref.ref(data)
    arrays = assembler.assemble([Piece(1, 0, Payload((data,), ((1,),)))])
    assert arrays[0].tolist() == [[b"abc"]]
    del arrays, data
    gc.collect()
    assert watch() is None
    assert assembler.kept_bytes == 0


def test_models_without_a_batch() -> None:
    """Whole tensors pass as they are, at every size, BYTES too; every caller gets the whole answer."""
    for size in (4, 100_000):
        spec = spec_of("FP32", "BYTES", row_shape=(2, size), batchable=False)
        numbers = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        texts = np.empty((2, size), dtype=object)
        texts[:] = b"x"
        payload = Payload((memoryview(numbers.tobytes()), texts), ((2, size), (2, size)))
        for _ in range(2):
            arrays = Assembler(spec, 8).assemble([Piece(1, 0, payload)])
            assert same(arrays[0], numbers) and same(arrays[1], texts)
        answer = make_answer(spec, [numbers, texts], 1)
        assert same(answer.array(0, 0, 1), numbers) and bytes(answer.view(0, 0, 1)) == numbers.tobytes()
        assert answer.shape(1, 1) == (2, size)


def test_scalar_output_without_a_batch() -> None:
    """A tensor without dimensions is answered as one element."""
    spec = ModelSpec("test", (), (TensorSpec("y", "FP32", ()),), batchable=False)
    answer = make_answer(spec, [np.array(1.5, np.float32)], 1)
    assert (answer.shape(0, 1), bytes(answer.view(0, 0, 1))) == ((), np.float32(1.5).tobytes())


@pytest.mark.parametrize("rows_out", [7, 240, 0])
def test_case_5_wrong_number_of_rows(rows_out: int) -> None:
    """Case 5: N-1, 30 N and 0 rows for N fail naming the output and both counts; nothing is sliced."""
    with pytest.raises(ModelFailed, match=f'output "t0": the model returned {rows_out} rows for 8'):
        make_answer(spec_of("FP32"), [np.zeros((rows_out, 3), np.float32)], 8)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "returned 0 outputs, expected 1"),
        ([np.zeros((2, 3), np.float32)] * 2, "returned 2 outputs, expected 1"),
        ([np.zeros((2, 3), np.float64)], r'output "t0": the model returned float64, expected FP32 \(float32\)'),
        ([np.zeros((2, 3), np.int32)], "returned int32, expected FP32"),
        ([np.zeros((2, 3), object)], "returned object, expected FP32"),
        ([np.float32(1)], "returned float32, expected an array of FP32"),
        ([np.array(1.0, np.float32)], "returned a scalar for 2 rows"),
        ([None], "returned NoneType, expected an array"),
        ([[[1.0]]], "returned list, expected an array"),
        ([np.ma.masked_array(np.ones((2, 3), np.float32), mask=[[True, False, False]] * 2)], "an array with masked values"),
    ],
)
def test_refused_outputs(outputs: list[Any], message: str) -> None:
    """A wrong number of outputs, another datatype or no array at all is the model's failure, said by name; nothing is cast."""
    with pytest.raises(ModelFailed, match=message):
        make_answer(spec_of("FP32"), outputs, 2)


def test_outputs_are_made_contiguous_and_little_endian() -> None:
    """Transposed, strided and big-endian outputs are answered as the values they show."""
    spec = spec_of("INT32", row_shape=(2,))
    for array in (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.arange(6, dtype=">i4").reshape(3, 2),
    ):
        answer = make_answer(spec, [array], 3)
        assert answer.array(0, 1, 1).tolist() == [array[1].tolist()]
        assert bytes(answer.view(0, 1, 1)) == array[1].astype("<i4").tobytes()


def test_subclasses_of_arrays_are_answered_as_plain_ones() -> None:
    """A masked array with nothing masked, a record array's column: their values, with no methods of their own in the way."""
    columns = np.rec.fromarrays([np.arange(2, dtype=np.int32)], names="a")
    for array in (np.ma.masked_array(np.arange(2, dtype=np.int32)), np.ma.masked_array([0, 1], [False, False], "<i4"), columns.a):
        answer = make_answer(spec_of("INT32", row_shape=()), [array], 2)
        assert type(answer.arrays[0]) is np.ndarray
        assert bytes(answer.view(0, 1, 1)) == b"\1\0\0\0"


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.int32])
def test_payloads_of_strided_arrays(dtype: Any) -> None:
    """An array that is not contiguous is gathered like any other, also where its length is the number of its bytes."""
    strided = np.array([1, 9, 0, 9, 1, 9]).astype(dtype)[::2]
    datatype = {np.int8: "INT8", np.bool_: "BOOL", np.int32: "INT32"}[dtype]
    members = [Piece(3, 0, Payload((strided,), ((),))), Piece(1, 0, Payload((np.zeros(1, dtype).tobytes(),), ((),)))]
    (got,) = Assembler(spec_of(datatype, row_shape=()), 8).assemble(members)
    assert got.tolist() == [1, 0, 1, 0]


def test_string_outputs() -> None:
    """BYTES outputs may be objects, numpy strings or numpy bytes; str elements are UTF-8 on the wire."""
    spec = spec_of("BYTES", row_shape=(1,))
    for array in (np.array([["é"], ["b"]]), np.array([["é"], ["b"]], object), np.array([["é".encode()], [b"b"]])):
        assert make_answer(spec, [array], 2).view(0, 0, 2) == b"\2\0\0\0\xc3\xa9\1\0\0\0b"


def test_bf16_outputs() -> None:
    """BF16 may come as uint16 or as an array of a bfloat16 type; the bits are the answer."""
    import ml_dtypes

    spec = spec_of("BF16", row_shape=(1,))
    array = np.array([[1.0], [-2.0]]).astype(ml_dtypes.bfloat16)
    assert bytes(make_answer(spec, [array], 2).view(0, 0, 2)) == bytes(make_answer(spec, [array.view(np.uint16)], 2).view(0, 0, 2))
    assert make_answer(spec, [array], 2).array(0, 0, 2).tolist() == [[0x3F80], [0xC000]]


def test_empty_rows_are_answered() -> None:
    """An output whose rows are empty (nothing was found) is answered with empty rows."""
    answer = make_answer(spec_of("FP32", row_shape=(-1,)), [np.empty((3, 0), np.float32)], 3)
    assert (bytes(answer.view(0, 1, 2)), answer.shape(0, 2)) == (b"", (2, 0))


def test_row_parameters() -> None:
    """Each row gets its own copy of its request's parameters; a request without any gives an empty one."""
    shared = {"id": "123"}
    members = [Piece(2, 0, Payload((), (), shared)), Piece(1, 0, Payload((), ()))]
    rows = row_parameters(members)
    assert rows == [{"id": "123"}, {"id": "123"}, {}]
    rows[0]["seen"] = 1
    assert (rows[1], shared) == ({"id": "123"}, {"id": "123"})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a", None], "element 0 of the row is NoneType, expected bytes or str"),
        ([b"a", 5], "element 0 of the row is int, expected bytes or str"),
        (["a", "\ud800"], "element 0 of the row is text that UTF-8 cannot carry"),
    ],
)
def test_refused_string_outputs(items: list[Any], message: str) -> None:
    """BYTES elements that are neither bytes nor text fail by name: a number would else become as many zero bytes."""
    array = np.empty((2, 1), dtype=object)
    array[:, 0] = items
    with pytest.raises(BadElement, match='output "t0": ' + message) as caught:
        make_answer(spec_of("BYTES", row_shape=(1,)), [array], 2)
    assert caught.value.row == 1
