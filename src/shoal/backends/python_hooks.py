"""Python models with work per request: `decode` before the call and `encode` after it, both optional, beside `__call__`.

    def decode(self, image): ...        # one request's rows of every input, by name; returns what `__call__` is given for them
    def __call__(self, image): ...      # the rows of all requests of a batch, as decoded
    def encode(self, scores): ...       # one request's rows of what `__call__` returned; returns the outputs

An exception in a hook fails the one request. `decode` returns one array for each input (an array if there is one input, else a
tuple or a dict), of any datatype, with as many rows as it was given, and of one shape whatever the request. What `__call__` returns
is handed to `encode` as it is, cut to the request's rows: an array or list as the argument, a tuple as several, a dict by name.
A parameter `parameters` of either receives the request's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.backends.base import Array
from shoal.backends.python_results import arrange
from shoal.datatypes import ModelSpec
from shoal.errors import ModelFailed

__all__ = ["Hooks", "Raw"]

_NO_PARAMETERS: Mapping[str, Any] = {}


class Raw:
    """What a model returned, before `encode`: its values, rows in front, and their names if it was a dict; unchecked."""

    __slots__ = ("names", "values")

    def __init__(self, returned: Any) -> None:
        self.names: tuple[str, ...] | None = None
        self.values: list[Any] = [returned]
        if isinstance(returned, Mapping):
            self.names, self.values = tuple(returned), list(returned.values())
        elif isinstance(returned, tuple):
            self.values = list(returned)

    def check(self, rows: int) -> None:
        """Raise `ModelFailed` unless every value has so many rows."""
        for value in self.values:
            if isinstance(value, str | bytes) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
                raise ModelFailed(f"the model returned a {type(value).__name__}, expected an array or list of {rows} rows")
            if getattr(value, "shape", None) == ():
                raise ModelFailed(f"the model returned a scalar, expected {rows} rows")
            if len(value) != rows:
                raise ModelFailed(f"the model returned {len(value)} rows for {rows}")


class Hooks:
    """The hooks of one model object. `decode` and `encode` raise what the model's raise, or `ModelFailed` for what they return."""

    def __init__(self, spec: ModelSpec, decode: Callable[..., Any] | None, encode: Callable[..., Any] | None) -> None:
        self.decodes = decode is not None
        self.encodes = encode is not None
        self._spec = spec
        self._decode = decode
        self._encode = encode
        self._names = tuple(tensor.name for tensor in spec.inputs)
        self._decode_sees_parameters = decode is not None and "parameters" not in self._names and _takes_parameters(decode)
        self._encode_sees_parameters = encode is not None and _takes_parameters(encode)

    def decode(self, inputs: Sequence[Array], parameters: Mapping[str, Any] | None = None) -> list[Array]:
        """What the model is given for one request, one array for each input."""
        if self._decode is None:
            return list(inputs)
        feed: dict[str, Any] = {
            name: array if array.flags.writeable else array.copy() for name, array in zip(self._names, inputs, strict=True)
        }
        if self._decode_sees_parameters:
            feed["parameters"] = dict(parameters or _NO_PARAMETERS)
        returned = self._decode(**feed)
        return [self._decoded(value, len(inputs[0])) for value in self._by_input(returned)]

    def _by_input(self, returned: Any) -> list[Any]:
        names = self._names
        if isinstance(returned, Mapping):
            if returned.keys() != set(names):
                given = ", ".join(map(str, returned)) or "nothing"
                raise ModelFailed(f"decode returned a dict with {given}; the inputs are {', '.join(names)}")
            return [returned[name] for name in names]
        values = list(returned) if isinstance(returned, tuple) or (isinstance(returned, list) and len(names) > 1) else [returned]
        if len(values) != len(names):
            raise ModelFailed(f"decode returned {len(values)} arrays for {len(names)} inputs")
        return values

    @staticmethod
    def _decoded(value: Any, rows: int) -> Array:
        array = np.asarray(value)
        if value is None or not array.ndim:
            raise ModelFailed(f"decode returned a {type(value).__name__}, expected an array of {rows} rows")
        if len(array) != rows:
            raise ModelFailed(f"decode returned {len(array)} rows for {rows}")
        return array

    def encode(self, raw: Raw, first: int, rows: int, parameters: Mapping[str, Any] | None = None) -> list[Array]:
        """The outputs of the request that rows `first` to `first + rows` belong to."""
        if self._encode is None:
            return [value[first : first + rows] for value in raw.values]
        cut = [value[first : first + rows] for value in raw.values]
        extra = {"parameters": dict(parameters or _NO_PARAMETERS)} if self._encode_sees_parameters else {}
        given: Sequence[Any] = cut if raw.names is None else ()
        named = {} if raw.names is None else dict(zip(raw.names, cut, strict=True))
        held = [value for value in cut if isinstance(value, np.ndarray)]
        return arrange(self._encode(*given, **named, **extra), self._spec.outputs, held)


def _takes_parameters(hook: Callable[..., Any]) -> bool:
    return "parameters" in inspect.signature(hook).parameters
