"""Python models: the convention, what is passed in, how results are put in order, and who owns memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backends.python import open_python
from shoal.backends.python_results import arrange, float_to_bfloat16
from shoal.datatypes import TensorSpec
from shoal.errors import ModelFailed

Write = Callable[..., str]

ADDER = """
class Model:
    inputs = {"a": ("FP32", (2,)), "b": ("FP32", (2,))}
    outputs = {"sum": ("FP32", (2,)), "first": ("INT64", ())}
    platform = "adder"
    echo_parameters = True
    labels = {"sum": ["x", "y"]}
    loads = 0

    def load(self):
        self.loads += 1

    def __call__(self, b, a):
        return a + 10 * b, a[:, 0].astype(np.int64)
"""


def test_a_class_is_described_and_run(model_file: Write) -> None:
    """Names, datatypes and shapes with a variable batch in front; arrays are passed by name, whatever the order of parameters."""
    backend = open_python(model_file(ADDER))
    spec = backend.spec
    assert spec.inputs == (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "FP32", (-1, 2)))
    assert spec.outputs == (TensorSpec("sum", "FP32", (-1, 2)), TensorSpec("first", "INT64", (-1,)))
    assert (spec.platform, spec.echo_parameters, spec.labels, spec.batchable) == ("adder", True, {"sum": ("x", "y")}, True)
    for rows in (1, 3):
        a, b = np.full((rows, 2), 3, np.float32), np.full((rows, 2), 4, np.float32)
        total, first = backend.run([a, b])
        assert total.tolist() == [[43, 43]] * rows
        assert first.tolist() == [3] * rows


def test_every_instance_is_loaded_once(model_file: Write) -> None:
    """`load` runs once per object, and a clone is an object of its own."""
    backend = open_python(model_file(ADDER))
    clone = backend.clone()
    models = [instance._call.__self__ for instance in (backend, clone)]  # type: ignore[attr-defined]
    assert models[0] is not models[1]
    assert [model.loads for model in models] == [1, 1]


@pytest.mark.parametrize(
    "source",
    [
        "def double(x):\n    return 2 * x\n",
        "double = lambda x: {'y': 2 * x}\n",
        "def double(*, x, **rest):\n    return (2 * x,)\n",
        "def double(**arrays):\n    return (2 * arrays['x']).tolist()\n",
        "class Kind:\n    def __call__(self, x, scale=2):\n        return scale * x\ndouble = Kind()\n",
        "class Kind:\n    @staticmethod\n    def twice(x):\n        return 2 * x\ndouble = Kind.twice\n",
        "import functools\ndef times(x, k):\n    return k * x\ndouble = functools.partial(times, k=2)\n",
    ],
)
def test_functions_and_callable_objects_work_too(model_file: Write, source: str) -> None:
    """Anything callable with `inputs` and `outputs`, however its parameters are declared, and whatever form its result has."""
    declared = "double.inputs = {'x': ('FP32', (2,))}\ndouble.outputs = {'y': ('FP32', (2,))}\n"
    backend = open_python(model_file(source + declared, "double"))
    assert backend.run([np.array([[1, 2], [3, 4]], np.float32)])[0].tolist() == [[2, 4], [6, 8]]


def test_names_that_are_no_identifiers_go_through_keyword_arguments(model_file: Write) -> None:
    """`input.1` reaches a model that takes `**arrays`."""
    source = """
    def model(**arrays):
        return -arrays["input.1"]
    model.inputs = {"input.1": ("INT8", ())}
    model.outputs = {"y": ("INT8", ())}
    """
    assert open_python(model_file(source, "model")).run([np.array([1, 2], np.int8)])[0].tolist() == [-1, -2]


def test_parameters_are_given_per_row_when_asked_for(model_file: Write) -> None:
    """Case 6: a parameter called `parameters` receives one mapping per row, unchanged strings included; without it nothing is."""
    source = """
    class Model:
        inputs = {"x": ("FP32", ())}
        outputs = {"id": ("BYTES", ())}
        def __call__(self, x, parameters=None):
            return [p.get("id", "none") for p in parameters]
    """
    backend = open_python(model_file(source))
    assert backend.spec.uses_parameters
    assert backend.run([np.zeros(2, np.float32)], [{"id": "123"}, {}])[0].tolist() == [b"123", b"none"]
    assert backend.run([np.zeros(2, np.float32)])[0].tolist() == [b"none", b"none"]
    assert not open_python(model_file(ADDER)).spec.uses_parameters


def test_an_input_called_parameters_stays_an_input(model_file: Write) -> None:
    """The name is only special where it is not an input."""
    source = (
        "def m(parameters):\n    return parameters\nm.inputs = {'parameters': ('INT32', ())}\nm.outputs = {'y': ('INT32', ())}\n"
    )
    backend = open_python(model_file(source, "m"))
    assert not backend.spec.uses_parameters
    assert backend.run([np.array([5], np.int32)])[0].tolist() == [5]


def test_exceptions_of_the_model_pass_through(model_file: Write) -> None:
    """The very object, with its `http_status`, reaches the engine; the model can be run again."""
    source = """
    class Refused(Exception):
        http_status = 422
    class Model:
        inputs = outputs = {"x": ("FP32", ())}
        def __call__(self, x):
            if x[0] < 0:
                raise Refused("negative")
            return x
    """
    backend = open_python(model_file(source))
    with pytest.raises(Exception, match="negative") as caught:
        backend.run([np.array([-1], np.float32)])
    assert caught.value.http_status == 422  # type: ignore[attr-defined]
    assert backend.run([np.array([1], np.float32)])[0].tolist() == [1]


def test_wrong_row_counts_are_left_for_the_engine_to_judge(model_file: Write) -> None:
    """Case 5: fewer, more and no rows come back as they are: never cut or padded here."""
    source = """
    class Model:
        inputs = outputs = {"x": ("FP32", (2,))}
        def __call__(self, x):
            return np.repeat(x, self.times, axis=0)[self.skip:]
    """
    backend = open_python(model_file(source))
    model = backend._call.__self__  # type: ignore[attr-defined]
    for model.times, model.skip, rows in ((1, 1, 3), (30, 0, 120), (0, 0, 0)):
        assert backend.run([np.ones((4, 2), np.float32)])[0].shape == (rows, 2)


def test_files_of_the_same_name_do_not_meet(model_file: Write, tmp_path: Path) -> None:
    """Case 7: two `model.py` in two folders, opened together, each keep their own code; an edited file is read afresh."""
    source = """
    class Model:
        inputs = outputs = {"x": ("INT32", ())}
        def __call__(self, x):
            return x * 0 + %d
    """
    first = open_python(model_file(source % 1, file="a/model.py"))
    second = open_python(model_file(source % 2, file="b/model.py"))
    edited = open_python(model_file(source % 3, file="a/model.py"))
    got = [int(backend.run([np.zeros(1, np.int32)])[0][0]) for backend in (first, second, edited)]
    assert got == [1, 2, 3]
    assert "model" not in sys.modules
    assert str(tmp_path / "a") not in sys.path


def test_a_files_module_is_forgotten_with_its_last_instance(model_file: Write) -> None:
    """Loading and unloading again and again leaves nothing in `sys.modules`."""
    before = set(sys.modules)
    backend = open_python(model_file(ADDER))
    clone = backend.clone()
    assert len(set(sys.modules) - before) == 1
    backend.close()
    backend.close()
    assert len(set(sys.modules) - before) == 1
    clone.close()
    assert set(sys.modules) == before
    with pytest.raises(RuntimeError, match="closed"):
        clone.run([np.zeros((1, 2), np.float32)] * 2)


def test_modules_are_found_in_the_current_folder(model_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module:Class` and `package.module:Class` work from the folder that they are in, and `sys.path` is left as it was."""
    model_file(ADDER, file="shoal_test_package/inner.py")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    try:
        assert open_python("shoal_test_package.inner:Model").spec.platform == "adder"
    finally:
        for name in [name for name in sys.modules if name.startswith("shoal_test_package")]:
            del sys.modules[name]
    assert sys.path == path


class TestResults:
    """`arrange`: any result of a model to arrays, or a failure that is named."""

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    two = (TensorSpec("p", "FP32", (-1, 2)), TensorSpec("q", "INT64", (-1,)))

    def one(self, datatype: str, value: Any, shape: tuple[int, ...] = (-1,)) -> Any:
        """The single output of this datatype, as a list."""
        return arrange(value, (TensorSpec("y", datatype, shape),), [])[0]

    @pytest.mark.parametrize("form", ["tuple", "list", "dict", "reversed dict"])
    def test_forms_for_several_outputs(self, form: str) -> None:
        """A tuple or list in order, or a dict in any order."""
        p, q = [[1.0, 2.0]], [7]
        values: dict[str, Any] = {"tuple": (p, q), "list": [p, q], "dict": {"p": p, "q": q}, "reversed dict": {"q": q, "p": p}}
        got = arrange(values[form], self.two, [])
        assert [array.tolist() for array in got] == [[[1.0, 2.0]], [7]]
        assert [array.dtype for array in got] == [np.float32, np.int64]

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (None, "returned None"),
            ((1,), "1 values for 2 outputs"),
            ({"p": [[1, 2]]}, "without q"),
            ({"p": [[1, 2]], "q": [1], "r": 0}, "unknown r"),
            (np.zeros((1, 2)), "one ndarray for 2 outputs"),
            (([[1, 2]], 7), r"'q'.*shape \[\], declared is \[rows\]"),
            (([[1, 2, 3]], [7]), r"'p'.*shape \[1, 3\], declared is \[rows, 2\]"),
            (([[1, 2], [3]], [7]), "'p'.*no array"),
            (([[1, 2]], [0.5]), "'q'.*float64, declared is INT64"),
            (([["a", "b"]], [1]), "'p'.*declared is FP32"),
            (([[1, 2]], [None]), "'q'.*object, declared is INT64"),
        ],
    )
    def test_what_does_not_fit_is_named(self, value: Any, says: str) -> None:
        """The message names the output and what is wrong with it."""
        with pytest.raises(ModelFailed, match=says):
            arrange(value, self.two, [])

    @pytest.mark.parametrize(
        ("datatype", "value", "expected"),
        [
            ("FP32", np.array([1.5, 1e300]), [1.5, np.inf]),
            ("FP64", np.array([0.5], np.float16), [0.5]),
            ("FP32", np.array([1, 2]), [1, 2]),
            ("FP16", np.array([True]), [1]),
            ("INT32", np.array([2**31 - 1, -(2**31)]), [2**31 - 1, -(2**31)]),
            ("UINT8", [0, 255], [0, 255]),
            ("INT64", np.array([True, False]), [1, 0]),
            ("INT64", np.array([7], ">i8"), [7]),
            ("BOOL", [True, False], [True, False]),
            ("BF16", np.array([1.5], np.float32), [0x3FC0]),
            ("BF16", np.array([0x3FC0], np.uint16), [0x3FC0]),
            ("BYTES", ["é", b"\x00"], ["é".encode(), b"\x00"]),
            ("BYTES", np.array(["ab", "c"]), [b"ab", b"c"]),
            ("BYTES", np.array([b"ab"]), [b"ab"]),
            ("FP32", [], []),
            ("INT64", [], []),
            ("BOOL", [], []),
        ],
    )
    def test_values_of_the_same_kind_are_converted(self, datatype: str, value: Any, expected: list[Any]) -> None:
        """Floats to floats, fitting integers to integers, bool and integers to floats, text to UTF-8, empty lists to anything."""
        assert self.one(datatype, value).tolist() == expected

    @pytest.mark.parametrize(
        ("datatype", "value", "says"),
        [
            ("INT32", np.array([2**31]), "does not fit into INT32"),
            ("UINT8", [-1], "does not fit into UINT8"),
            ("INT64", np.array([2**63], np.uint64), "does not fit into INT64"),
            ("INT8", np.array([1.0]), "float64, declared is INT8"),
            ("BOOL", [0, 1], "declared is BOOL"),
            ("FP32", np.array([1j]), "complex128"),
            ("BYTES", [1], "bytes or str, but the model returned int"),
            ("INT64", np.array([], np.float64), "float64, declared is INT64"),
        ],
    )
    def test_other_kinds_are_not(self, datatype: str, value: Any, says: str) -> None:
        """Nothing is rounded, cut or wrapped around behind the model's back."""
        with pytest.raises(ModelFailed, match=says):
            self.one(datatype, value)

    def test_coroutines_and_generators_are_named(self) -> None:
        """A lambda can hide them until they are returned; no warning about an un-awaited coroutine is left behind."""

        async def later() -> int:
            return 1

        with pytest.raises(ModelFailed, match="returned a coroutine"):
            self.one("FP32", later())
        with pytest.raises(ModelFailed, match="returned a generator"):
            self.one("FP32", (value for value in (1, 2)))

    def test_a_fresh_array_is_not_copied(self) -> None:
        """What the model made for this call alone is handed on as it is, in every form of result, also as a view of it."""
        output = (TensorSpec("y", "FP32", (-1, 2)),)
        addresses: list[int] = []

        def fresh(rows: int = 4) -> np.ndarray:
            array = np.ones((rows, 2), np.float32)
            addresses.append(array.ctypes.data)
            return array

        for result in (
            lambda: fresh(),
            lambda: (fresh(),),
            lambda: {"y": fresh()},
            lambda: fresh()[:2],
            lambda: fresh().reshape(4, 2),
        ):
            (got,) = arrange(result(), output, [])
            assert got.ctypes.data == addresses[-1]

    def test_an_array_that_somebody_holds_is_copied(self) -> None:
        """Inputs, views of them, module-level buffers, cached answers and foreign memory."""
        output = (TensorSpec("y", "FP32", (-1, 2)),)
        x = self.x.copy()
        foreign = np.frombuffer(bytearray(x.tobytes()), np.float32).reshape(3, 2)
        for result, expected in ((x, x), (x[:2], x[:2]), (x[::2], x[::2]), ((x,), x), ({"y": x}, x), (foreign, x)):
            (got,) = arrange(result, output, [])
            assert not np.shares_memory(got, x)
            assert not np.shares_memory(got, foreign)
            assert got.flags.owndata
            assert got.tolist() == expected.tolist()

    @settings(max_examples=200, deadline=None)
    @given(st.floats(width=32, allow_nan=True, allow_infinity=True))
    def test_rounding_to_bf16_is_to_nearest_even(self, value: float) -> None:
        """Against the definition: no BF16 value is nearer, and of two equally near the one with an even last bit is taken."""
        bits = int(float_to_bfloat16(np.array([value], np.float32))[0])
        back = _bf16(bits)
        if np.isnan(value):
            assert np.isnan(back)
        elif np.isinf(back):
            assert np.isinf(value) or abs(value) >= float.fromhex("0x1.ffp127")  # half a step beyond the largest
        else:
            for neighbour in (bits - 1, bits + 1):
                other = _bf16(neighbour & 0xFFFF)
                if np.isfinite(other) and np.signbit(other) == np.signbit(back):
                    ours, theirs = abs(float(back) - value), abs(float(other) - value)
                    assert ours < theirs or (ours == theirs and bits % 2 == 0)


def _bf16(bits: int) -> Any:
    return np.array([bits << 16], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize("columns", [3, 30_000])
@pytest.mark.parametrize(
    "body",
    [
        "y = x * 2; self.kept.append(y); return y",
        "y = x * 2; self.kept.append(y[:]); return y",
        "y = np.concatenate([x * 2, x]); self.kept.append(y); return y[: len(x)]",
        "y = x * 2; self.kept.append(y); return memoryview(y)",
        "y = x * 2; self.kept.append(y); return Wrapper(y)",
        "y = x * 2; self.kept.append(y); return {'y': y}",
        "y = np.ascontiguousarray((x * 2).T); self.kept.append(y); return y.T",
        "y = (x * 2).astype('>f4'); self.kept.append(y); return y",
        "y = x * 2; self.kept.append(y); return y.view(np.ma.MaskedArray)",
        "x *= 2; return x",
        "x *= 2; return x[:]",
        "return np.broadcast_to(x * 2, x.shape)",
    ],
)
def test_no_answer_changes_after_it_was_given(model_file: Write, body: str, columns: int) -> None:
    """A model that writes to what it returned, and the assembly buffer that is used again, reach no earlier answer."""
    source = f"""
        class Wrapper:
            def __init__(self, held): self.held = held
            def __array__(self, dtype=None, copy=None): return self.held

        class Model:
            inputs = {{"x": ("FP32", ({columns},))}}
            outputs = {{"y": ("FP32", ({columns},))}}

            def __init__(self): self.kept = []

            def __call__(self, x):
                for earlier in self.kept: earlier[...] = -99
                {body}
        """
    backend = open_python(model_file(source))
    buffer = np.empty((2, columns), np.float32)  # as an assembler has it: filled anew for each batch
    given = []
    for batch in range(4):
        buffer[:] = batch
        given.append(backend.run([buffer])[0])
    for batch, output in enumerate(given):
        assert np.array_equal(output, np.full((2, columns), 2 * batch, np.float32))
    backend.close()
