"""Every way in which a Python model can be declared wrongly: ConfigError, naming the model and the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.backends.python import open_python
from shoal.errors import ConfigError

Write = Callable[..., str]

DECLARED = 'inputs = {"x": ("FP32", (4,))}\n    outputs = {"y": ("FP32", (4,))}'


def refusal(target: str) -> str:
    """The message with which the model is refused; nothing of it stays in `sys.modules`."""
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        open_python(target)
    assert not {name for name in set(sys.modules) - before if name.startswith("shoal_model_")}
    assert caught.value.message.startswith(target)
    return caught.value.message


def test_places_that_are_not_there(model_file: Write, tmp_path: Path) -> None:
    """A missing file, a folder, a missing module, a missing package, a missing name (with those that exist)."""
    assert "no such file" in refusal(f"{tmp_path}/none.py:Model")
    (tmp_path / "folder.py").mkdir()
    assert "is a folder" in refusal(f"{tmp_path}/folder.py:Model")
    assert "no module 'shoal_none'" in refusal("shoal_none:Model")
    assert "no module 'shoal_none'" in refusal("shoal_none.inner:Model")
    assert "it defines Modell" in refusal(model_file(f"class Modell:\n    {DECLARED}\n    def __call__(self, x): return x\n"))
    assert "it defines no class or function" in refusal(model_file("x = 1"))
    assert "write path/to/file.py:Class" in refusal("neither this nor that")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import shoal_not_installed", "imports 'shoal_not_installed', which is not installed"),
        ("def f(:", "line 2: syntax error"),
        ("1 / 0", "line 2: ZeroDivisionError"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise RuntimeError('no weights')", "RuntimeError: no weights"),
    ],
)
def test_imports_that_fail(model_file: Write, source: str, says: str) -> None:
    """What a module raises while it is imported, also `sys.exit`, with the line at fault."""
    assert says in refusal(model_file(source))


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("inputs = None", "has no attribute `inputs`"),
        ("outputs = None", "has no attribute `outputs`"),
        ("inputs = {}", "`inputs` must be a dict"),
        ('inputs = [("x", "FP32", (4,))]', "`inputs` must be a dict"),
        ('inputs = {"x": "FP32"}', "must be (datatype, row shape)"),
        ('inputs = {"x": ("FP32",)}', "must be (datatype, row shape)"),
        ('inputs = {"x": ("float32", (4,))}', "did you mean 'FP32'?"),
        ('inputs = {"x": (np.int64, (4,))}', "did you mean 'INT64'?"),
        ('inputs = {"x": ("fp32", (4,))}', "did you mean 'FP32'?"),
        ('inputs = {"x": (str, ())}', "did you mean 'BYTES'?"),
        ('inputs = {"x": ("quaternion", (4,))}', "known are BOOL"),
        ('inputs = {"x": ("FP32", 4)}', "write (4,)"),
        ('inputs = {"x": ("FP32", (0,))}', "dimension 0 "),
        ('inputs = {"x": ("FP32", (-2,))}', "dimension -2 "),
        ('inputs = {"x": ("FP32", (True,))}', "dimension True "),
        ('inputs = {"x": ("FP32", (None, 4))}', "-1 where it varies"),
        ('inputs = {"": ("FP32", (4,))}', "must be a string that is not empty"),
        ('inputs = {3: ("FP32", (4,))}', "must be a string that is not empty"),
        ('inputs = {"image": ("FP32", (4,))}', "takes no parameter named image"),
        ('inputs = {"\\ud800": ("FP32", (4,))}', "UTF-8 cannot carry"),
        ("platform = 3", "`platform` must be a string"),
        ('platform = "\\ud800"', "`platform` must be a string"),
        ('labels = ["a"]', "`labels` must be a dict"),
        ('labels = {"z": ["a"]}', "no output"),
        ('labels = {"y": "abc"}', "sequence of strings"),
        ('labels = {"y": [1, 2]}', "sequence of strings"),
        ('labels = {"y": ["\\udfff"]}', "UTF-8 cannot carry"),
        ("load = 3", "`load` must be a method"),
    ],
)
def test_attributes_that_are_wrong(model_file: Write, attribute: str, says: str) -> None:
    """Each declaration that is missing or malformed is named, with what to write instead."""
    assert says in refusal(
        model_file(f"class Model:\n    {DECLARED}\n    {attribute}\n    def __call__(self, x):\n        return x\n")
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "give it a method __call__"),
        ("def __init__(self, path): pass\n    def __call__(self, x): return x", "must need no arguments"),
        ("def __init__(self): raise OSError('gone')\n    def __call__(self, x): return x", "OSError: gone"),
        ("def load(self): raise OSError('no weights')\n    def __call__(self, x): return x", "load() failed: OSError: no weights"),
        ("async def load(self): pass\n    def __call__(self, x): return x", "load() must be a plain `def`"),
        ("async def __call__(self, x): return x", "is `async def`"),
        ("def __call__(self, x): yield x", "is a generator"),
        ("async def __call__(self, x): yield x", "is a generator"),
        ("def __call__(self): return 1", "takes no parameter named x"),
        ("def __call__(self, x, /): return x", "takes no parameter named x"),
        ("def __call__(self, batch): return batch", "takes no parameter named x"),
        ("def __call__(self, x, scale): return x", "needs the parameter `scale`"),
    ],
)
def test_classes_that_do_not_fit(model_file: Write, body: str, says: str) -> None:
    """Construction, loading, and the signature of `__call__`."""
    assert says in refusal(model_file(f"class Model:\n    {DECLARED}\n    {body}\n"))


def test_objects_that_cannot_be_called(model_file: Write) -> None:
    """A constant is no model; a function without declarations says what to declare."""
    assert "name a class or a function" in refusal(model_file("model = 3", "model"))
    assert 'inputs = {"x": ("FP32", (4,))}' in refusal(model_file("def model(x): return x", "model"))


def test_a_wrapped_async_function_is_seen_through(model_file: Write) -> None:
    """functools.wraps does not hide that the function underneath is asynchronous."""
    source = """
    import functools
    async def inner(x):
        return x
    @functools.wraps(inner)
    def model(x):
        return inner(x)
    model.inputs = model.outputs = {"x": ("FP32", (4,))}
    """
    assert "async def" in refusal(model_file(source, "model"))


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("decode = 3", "`decode` must be a method, but is int"),
        ("async def encode(self, y): return y", "encode(): is `async def`"),
        ("def encode(self, y): yield y", "encode(): is a generator"),
        ("def decode(self, image): return image", "decode(): takes no parameter named x"),
        ("def decode(self, x, scale): return x", "decode(): needs the parameter `scale`, which is no input"),
    ],
)
def test_hooks_that_cannot_be_called(model_file: Write, hook: str, says: str) -> None:
    """Found when the model is loaded, not by its first request."""
    assert says in refusal(model_file(f"class Model:\n    {DECLARED}\n    {hook}\n    def __call__(self, x): return x\n"))
