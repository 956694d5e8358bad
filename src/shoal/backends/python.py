"""Python models: a class or a function with `inputs` and `outputs`, from a file or an importable module.

    class Model:
        inputs = {"x": ("FP32", (4,))}      # datatype and shape of one row; -1 or a name for a variable dimension
        outputs = {"y": ("FP32", (2,))}

        def load(self): ...                 # optional; called once per instance
        def __call__(self, x): ...          # x has the batch in front: (rows, 4); returns (rows, 2)

Finding the object is in `python_import.py`, what it returns is put in order by `python_results.py`; here are the description, the
signature and the call. The same code runs for one row and for many. With several instances each has an object of its own; a plain
function, or an object that is no class, is shared and must bear being called from several threads at once.

Optional attributes: `labels` (output → class labels), `echo_parameters` (bool), `platform` (word for metadata). A parameter named
`parameters` that is not an input receives one mapping per row: the parameters of that row's request. Input arrays may be changed
in place, but not kept: their memory is used again for the next batch. An exception fails the requests of the batch (alone, after
bisection); its integer attribute `http_status`, if there is one, is sent. What is to be done, and may fail, request by request
goes into methods `decode` and `encode`: see `python_hooks.py`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from shoal.backends.base import Array
from shoal.backends.python_hooks import Hooks, Raw
from shoal.backends.python_import import Source, import_target
from shoal.backends.python_results import arrange
from shoal.datatypes import DATATYPES, ModelSpec, TensorSpec
from shoal.errors import ConfigError

__all__ = ["PythonBackend", "open_python"]

_NUMPY_NAMES: Final = {str(datatype.numpy): name for name, datatype in DATATYPES.items() if name not in ("BF16", "BYTES")} | {
    "str": "BYTES",
    "bytes": "BYTES",
    "string": "BYTES",
    "float": "FP32",
    "double": "FP64",
    "half": "FP16",
    "int": "INT64",
    "bfloat16": "BF16",
}


class PythonBackend:
    """A loaded Python model. Made by `open_python`."""

    def __init__(self, target: str, source: Source, call: Callable[..., Any], spec: ModelSpec, hooks: Hooks | None = None) -> None:
        self.spec = spec
        self.hooks = hooks
        self._target = target
        self._source = source
        self._call = call
        self._names = tuple(tensor.name for tensor in spec.inputs)
        self._uses_parameters = spec.uses_parameters

    def run(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Sequence[Array]:
        """Call the model. Its exceptions pass through; a result that does not fit `spec.outputs` raises `ModelFailed`.

        Where there are hooks the rows are taken for those of one request.
        """
        hooks = self.hooks
        if hooks is None:
            return self._outputs(inputs, parameters)
        rows, own = len(inputs[0]), parameters[0] if parameters else None
        raw = self.infer(hooks.decode(inputs, own), parameters)
        raw.check(rows)
        return hooks.encode(raw, 0, rows, own)

    def infer(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Raw:
        """Call the model between its hooks: from what is decoded to what is to be encoded, or is the outputs already."""
        if self.hooks is not None and self.hooks.encodes:
            return Raw(self._called(inputs, parameters))
        return Raw(tuple(self._outputs(inputs, parameters)))

    def _outputs(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None) -> list[Array]:
        return arrange(self._called(inputs, parameters), self.spec.outputs, inputs)

    def _called(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None) -> Any:
        # Alone, a request's array may be a view of read-only memory, in company never: the model must not see a difference.
        feed: dict[str, Any] = {
            name: array if array.flags.writeable else array.copy() for name, array in zip(self._names, inputs, strict=True)
        }
        if self._uses_parameters:
            rows = inputs[0].shape[0]
            feed["parameters"] = [{} for _ in range(rows)] if parameters is None else parameters
        return self._call(**feed)

    def clone(self) -> PythonBackend:
        """A new object of the class, loaded; or the same function."""
        call, spec, hooks = _instantiate(self._target, self._source.target)
        self._source.acquire()
        return PythonBackend(self._target, self._source, call, spec, hooks)

    def close(self) -> None:
        """Drop the object, and with the last instance the module if it came from a file."""
        if self._call is not _closed:
            self._call = _closed
            self.hooks = None
            self._source.release()


def open_python(target: str) -> PythonBackend:
    """Load `path/to/file.py:Class`, `module:Class` or the same with a function. Raises `ConfigError` naming what to change."""
    source = import_target(target)
    try:
        call, spec, hooks = _instantiate(target, source.target)
    except BaseException:
        source.release()
        raise
    return PythonBackend(target, source, call, spec, hooks)


def _closed(**feed: Any) -> Any:
    raise RuntimeError("the model is closed")


def _instantiate(target: str, found: Any) -> tuple[Callable[..., Any], ModelSpec, Hooks | None]:
    model = found
    if inspect.isclass(found):
        try:
            model = found()
        except Exception as error:
            text = f"{found.__name__}() failed: {type(error).__name__}: {error}"
            raise ConfigError(f"{target}: {text}; it must need no arguments (load() can do work)") from error
    if not callable(model):
        fix = "give it a method __call__" if inspect.isclass(found) else "name a class or a function"
        raise ConfigError(f"{target}: cannot be called; {fix}")
    call = model if inspect.isroutine(model) else model.__call__
    _refuse_asynchronous(target, call)
    load = getattr(model, "load", None)
    if load is not None:
        _load(target, load)
    inputs = _tensors(target, model, "inputs")
    outputs = _tensors(target, model, "outputs")
    uses_parameters = _check_signature(target, call, inputs)
    spec = ModelSpec(
        platform=_platform(target, model),
        inputs=inputs,
        outputs=outputs,
        uses_parameters=uses_parameters,
        echo_parameters=bool(getattr(model, "echo_parameters", False)),
        labels=_labels(target, model, outputs),
    )
    return call, spec, _hooks(target, model, spec)


def _hooks(target: str, model: Any, spec: ModelSpec) -> Hooks | None:
    decode, encode = getattr(model, "decode", None), getattr(model, "encode", None)
    for name, hook in (("decode", decode), ("encode", encode)):
        if hook is not None:
            if not callable(hook):
                raise ConfigError(f"{target}: `{name}` must be a method, but is {type(hook).__name__}")
            _refuse_asynchronous(f"{target}: {name}()", hook)
    if decode is not None:
        _check_signature(f"{target}: decode()", decode, spec.inputs)
    return Hooks(spec, decode, encode) if decode is not None or encode is not None else None


def _refuse_asynchronous(target: str, call: Callable[..., Any]) -> None:
    function = inspect.unwrap(call)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{target}: is `async def`; models run in threads of their own, so make it a plain `def`")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{target}: is a generator (it has `yield`); return the whole result with `return`")


def _load(target: str, load: Any) -> None:
    if not callable(load):
        raise ConfigError(f"{target}: `load` must be a method, but is {type(load).__name__}")
    if inspect.iscoroutinefunction(load) or inspect.isgeneratorfunction(load) or inspect.isasyncgenfunction(load):
        raise ConfigError(f"{target}: load() must be a plain `def`, not asynchronous or a generator")
    try:
        load()
    except Exception as error:
        raise ConfigError(f"{target}: load() failed: {type(error).__name__}: {error}") from error


def _tensors(target: str, model: Any, attribute: str) -> tuple[TensorSpec, ...]:
    example = f'{attribute} = {{"x": ("FP32", (4,))}}'
    declared = getattr(model, attribute, None)
    if declared is None:
        raise ConfigError(f"{target}: has no attribute `{attribute}`; declare names, datatypes and row shapes: {example}")
    if not isinstance(declared, Mapping) or not declared:
        raise ConfigError(f"{target}: `{attribute}` must be a dict with at least one tensor: {example}")
    return tuple(_tensor(f"{target}: {attribute}[{name!r}]", name, value) for name, value in declared.items())


def _tensor(where: str, name: object, declared: object) -> TensorSpec:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: a tensor's name must be a string that is not empty")
    if not _is_text(name):
        raise ConfigError(f"{where}: the name holds characters that UTF-8 cannot carry")
    if not isinstance(declared, tuple | list) or len(declared) != 2:
        raise ConfigError(f'{where}: must be (datatype, row shape), for example ("FP32", (4,)), but is {declared!r}')
    datatype, shape = declared
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise ConfigError(f"{where}: unknown datatype {datatype!r}{_nearest_datatype(datatype)}; known are {', '.join(DATATYPES)}")
    if not isinstance(shape, tuple | list):
        hint = f"; write ({shape},)" if isinstance(shape, int) else ""
        raise ConfigError(f"{where}: the row shape must be a tuple of integers, but is {shape!r}{hint}")
    for dim in shape:
        if isinstance(dim, str) and dim.isidentifier():
            continue  # variable, and as long as the others of that name
        if isinstance(dim, bool) or not isinstance(dim, int) or (dim < 1 and dim != -1):
            raise ConfigError(
                f"{where}: dimension {dim!r} of the row shape must be a positive integer, a name, or -1 where it varies"
            )
    sizes = tuple(-1 if isinstance(dim, str) else dim for dim in shape)
    return TensorSpec(name, datatype, (-1, *sizes), ("", *(dim if isinstance(dim, str) else "" for dim in shape)))


def _is_text(text: str) -> bool:
    """Whether it can be sent: lone surrogates, which Python allows in a string, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nearest_datatype(datatype: object) -> str:
    text = getattr(datatype, "__name__", str(datatype))
    if text.lower() in _NUMPY_NAMES:
        return f"; did you mean {_NUMPY_NAMES[text.lower()]!r}?"
    close = difflib.get_close_matches(text.upper(), DATATYPES, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _check_signature(target: str, call: Callable[..., Any], inputs: Sequence[TensorSpec]) -> bool:
    """Whether `call` takes `parameters`; raises `ConfigError` unless it takes every input by name and needs nothing else."""
    names = [tensor.name for tensor in inputs]
    listed = ", ".join(names)
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):
        raise ConfigError(f"{target}: its parameters cannot be read; wrap it in a function def f({listed})") from None
    by_name = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    missing = [name for name in names if name not in by_name]
    if missing and not takes_any:
        raise ConfigError(
            f"{target}: takes no parameter named {', '.join(missing)}; inputs are passed by name, so declare it with ({listed}), "
            "or with **arrays where a name is no identifier"
        )
    uses_parameters = "parameters" in by_name and "parameters" not in names
    for name, parameter in signature.parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not optional and (name not in by_name or name not in (*names, "parameters")):
            raise ConfigError(f"{target}: needs the parameter `{name}`, which is no input; add it to `inputs` or give it a default")
    return uses_parameters


def _platform(target: str, model: Any) -> str:
    platform = getattr(model, "platform", "python")
    if not isinstance(platform, str) or not _is_text(platform):
        raise ConfigError(f"{target}: `platform` must be a string that UTF-8 can carry, but is {platform!r}")
    return platform


def _labels(target: str, model: Any, outputs: Sequence[TensorSpec]) -> dict[str, tuple[str, ...]]:
    declared = getattr(model, "labels", None)
    if declared is None:
        return {}
    example = 'labels = {"y": ("cat", "dog")}'
    if not isinstance(declared, Mapping):
        raise ConfigError(f"{target}: `labels` must be a dict from an output's name to its labels: {example}")
    labels: dict[str, tuple[str, ...]] = {}
    for name, values in declared.items():
        if name not in {tensor.name for tensor in outputs}:
            raise ConfigError(f"{target}: `labels` names {name!r}, which is no output of the model")
        if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(label, str) for label in values):
            raise ConfigError(f"{target}: labels of {name!r} must be a sequence of strings: {example}")
        if not all(map(_is_text, values)):
            raise ConfigError(f"{target}: a label of {name!r} holds characters that UTF-8 cannot carry")
        labels[name] = tuple(values)
    return labels
