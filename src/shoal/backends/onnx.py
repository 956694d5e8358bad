"""The ONNX Runtime backend: a session with a stated thread budget, the model's description, one call per batch.

Opening files and turning their faults into sentences is in `onnx_load.py`; values that numpy cannot carry (BF16, strings) are in
`onnx_values.py`. Nothing here knows of batches or requests.

Facts that this file rests on (ONNX Runtime 1.32, one CPU of a small machine; measured with a model of one operator):
- The public `InferenceSession.run` checks its arguments in Python before it calls the compiled session: 12 µs against 6.6 µs. Our
  arguments are always complete, so the compiled method is called directly where it exists.
- An IOBinding made for each batch costs 14.8 µs, OrtValues 106 µs. Only a binding that is kept, with buffers of one fixed size,
  is quicker (4.8 µs with the copy out), and batches do not have one size. So IOBinding is used only where it must be (BF16).
- Two callers with one thread each did as much work through one shared session as through two (within the noise of two cores).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime as ort

from shoal.backends.base import Array
from shoal.backends.onnx_values import bytes_to_text, run_bound, text_to_bytes
from shoal.datatypes import ModelSpec

__all__ = ["OnnxBackend"]

Reopen = Callable[[], ort.InferenceSession]


class OnnxBackend:
    """A session and its description. Made by `open_onnx`.

    Sessions may run several batches at once. With one thread each, all instances share one session: there is no pool to compete
    for, weights are in memory once, and a second instance costs nothing. With more threads each instance has its own
    session, because two batches in one session would wait for the same pool, and the budget is counted per instance.
    """

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, threads: int, reopen: Reopen) -> None:
        self.spec = spec
        self.threads = threads
        self._session: ort.InferenceSession | None = session
        self._reopen = reopen
        self._input_names = [tensor.name for tensor in spec.inputs]
        self._output_names = [tensor.name for tensor in spec.outputs]
        self._text_inputs = tuple(index for index, tensor in enumerate(spec.inputs) if tensor.datatype == "BYTES")
        self._text_outputs = tuple(index for index, tensor in enumerate(spec.outputs) if tensor.datatype == "BYTES")
        self._bound = any(tensor.datatype == "BF16" for tensor in (*spec.inputs, *spec.outputs))
        self._only_input = self._input_names[0] if len(self._input_names) == 1 else None
        compiled = getattr(session, "_sess", None)
        self._run: Callable[[list[str], dict[str, Array], None], list[Array]] = getattr(compiled, "run", session.run)

    def run(self, inputs: Sequence[Array], parameters: Sequence[Mapping[str, Any]] | None = None) -> Sequence[Array]:
        """One call of the session. BYTES must be UTF-8, or `BadRequest` is raised; other exceptions are ONNX Runtime's own."""
        if self._text_inputs:
            inputs = list(inputs)
            for index in self._text_inputs:
                inputs[index] = bytes_to_text(self._input_names[index], inputs[index])
        if self._bound:
            assert self._session is not None
            outputs = run_bound(self._session, self.spec, inputs)
        elif self._only_input is not None:
            outputs = self._run(self._output_names, {self._only_input: inputs[0]}, None)
        else:
            outputs = self._run(self._output_names, dict(zip(self._input_names, inputs, strict=True)), None)
        for index in self._text_outputs:
            outputs[index] = text_to_bytes(outputs[index])
        return outputs

    def clone(self) -> OnnxBackend:
        """An instance for another executor: the same session with one thread, a session of its own with more."""
        assert self._session is not None
        session = self._session if self.threads == 1 else self._reopen()
        return OnnxBackend(session, self.spec, self.threads, self._reopen)

    def close(self) -> None:
        """Let go of the session; its memory is freed with the last instance."""
        self._session = None
        self._run = _closed


def _closed(names: list[str], feed: dict[str, Array], options: None) -> list[Array]:
    raise RuntimeError("the model is closed")
