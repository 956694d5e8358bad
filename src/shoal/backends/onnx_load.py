"""Opening an ONNX file: session options, the model's description, and every way in which a file can be wrong as one sentence.

No running here (`onnx.py`). Nothing is guessed about a model that its file does not say; whether its batch axis really is one is
for the load-time probe (`probe.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import onnxruntime as ort

from shoal.backends.onnx import OnnxBackend
from shoal.datatypes import ModelSpec, TensorSpec
from shoal.errors import ConfigError

__all__ = ["LABELS_KEY", "open_onnx", "session_options"]

LABELS_KEY: Final = "shoal.labels"
"""Key of the model file's metadata under which class labels may stand, as JSON: `{"output": ["first label", …]}`."""

_DATATYPES: Final = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def session_options(threads: int, *, spinning: bool = False) -> ort.SessionOptions:
    """Options of a session that runs on `threads` CPUs: the caller's thread and `threads - 1` of a pool (none for 1).

    - Spinning is off: a pool that spins takes the CPU from the event loop and from other models' pools. Switch it on only where
      the CPUs belong to this session alone.
    - Operators run one after another (one inter-op thread): parallelism is within an operator and across rows.
    - The memory arena is on: activations are reused from run to run instead of being mapped and paged in afresh. It
      grows to what the largest batch needs, and stays there.
    - Memory patterns are off: they are planned and kept for every combination of input shapes, and batch sizes (and lengths)
      vary without end here.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # faults come as exceptions; the runtime's own log lines would only repeat them
    allow = "1" if spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", allow)
    options.add_session_config_entry("session.inter_op.allow_spinning", allow)
    return options


def open_onnx(
    path: str | Path, *, threads: int = 1, providers: Sequence[str] = ("CPUExecutionProvider",), spinning: bool = False
) -> OnnxBackend:
    """Load a model file for `threads` CPUs. Raises `ConfigError` with what to do when it cannot be served."""
    path = Path(path)
    if threads < 1:
        raise ConfigError(f"{path}: threads must be at least 1, not {threads}")
    _check_file(path)
    unknown = [name for name in providers if name not in ort.get_available_providers()]
    if unknown:
        available = ", ".join(ort.get_available_providers())
        raise ConfigError(f"{path}: this ONNX Runtime has no {', '.join(unknown)}; it has {available}")

    def reopen() -> ort.InferenceSession:
        try:
            return ort.InferenceSession(str(path), session_options(threads, spinning=spinning), providers=list(providers))
        except Exception as error:
            raise ConfigError(f"{path}: {_explain(error)}") from None

    session = reopen()
    return OnnxBackend(session, _describe(path, session), threads, reopen)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; give the path of the .onnx file in it")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; check the path (relative paths start at {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not start:
        raise ConfigError(f"{path}: the file is empty; export or copy the model again")
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path}: is only a Git LFS pointer; fetch the model itself with `git lfs pull`")


def _explain(error: Exception) -> str:
    """ONNX Runtime's exception as one sentence that says what to do."""
    kind = type(error).__name__
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
    text = re.sub(r"^Load model from .*? failed: ?", "", text)
    text = re.sub(r"\S+\.(?:h|cc):\d+ .*?(?:\) (?=[A-Z])|(?<=\w) (?=[A-Z]\w* ))", "", text)[:400]  # places in its source code
    lower = text.lower()
    if "external data" in lower or "external_data" in lower or "external initializer" in lower:
        return f"the weights are in a separate file that is missing or too short; copy it beside the model ({text})"
    if kind == "InvalidProtobuf" or "no graph was found" in lower:
        return "is not an ONNX model, or was cut off while it was copied; export or copy it again"
    if "no op registered" in lower or "is not a registered function/op" in lower:
        return f"uses an operator that ONNX Runtime {ort.__version__} does not have; export with standard operators ({text})"
    if kind == "NotImplemented":
        return f"ONNX Runtime {ort.__version__} has no implementation of an operator for its types on this device ({text})"
    if "unsupported model ir version" in lower or "opset" in lower:
        return f"is newer than ONNX Runtime {ort.__version__} can open; upgrade onnxruntime or export for an older opset ({text})"
    return f"ONNX Runtime cannot open it; check the export with onnx.checker ({text})"


def _describe(path: Path, session: ort.InferenceSession) -> ModelSpec:
    inputs = tuple(_tensor(path, "input", value) for value in session.get_inputs())
    outputs = tuple(_tensor(path, "output", value) for value in session.get_outputs())
    if not outputs:
        raise ConfigError(f"{path}: the model has no outputs, so there is nothing to answer with; export it with its outputs")
    reason = _why_not_batchable(inputs, outputs)
    return ModelSpec(
        platform="onnxruntime_onnx",
        inputs=inputs,
        outputs=outputs,
        batchable=reason is None,
        unbatchable_reason=reason,
        labels=_labels(path, session, outputs),
        reads_only=True,
        # Dimensions that clients choose, and strings of any length, make the time a client's choice as well.
        steady=reason is None and all(-1 not in tensor.row_shape and tensor.datatype != "BYTES" for tensor in inputs),
    )


def _tensor(path: Path, side: str, value: Any) -> TensorSpec:
    datatype = _DATATYPES.get(value.type)
    if datatype is None:
        hint = "; export without ZipMap (skl2onnx: options={'zipmap': False})" if "map(" in value.type else ""
        raise ConfigError(f"{path}: {side} '{value.name}' is a {value.type}, which the protocol cannot carry{hint}")
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in value.shape)
    return TensorSpec(value.name, datatype, shape, tuple(dim if isinstance(dim, str) else "" for dim in value.shape))


def _why_not_batchable(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    if not inputs:
        return "the model has no inputs"
    for side, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if not tensor.shape:
                return f"{side} '{tensor.name}' is a scalar or its shape is not declared, so it has no batch dimension"
            if tensor.shape[0] != -1:
                return (
                    f"{side} '{tensor.name}' has the fixed first dimension {tensor.shape[0]}; "
                    "export the model with a variable (named) batch dimension to batch it"
                )
    return None


def _labels(path: Path, session: ort.InferenceSession, outputs: Sequence[TensorSpec]) -> dict[str, tuple[str, ...]]:
    text = session.get_modelmeta().custom_metadata_map.get(LABELS_KEY)
    if text is None:
        return {}
    try:
        labels = {name: tuple(values) for name, values in msgspec.json.decode(text, type=dict[str, list[str]]).items()}
    except (ValueError, RecursionError):  # text that UTF-8 cannot carry is among them
        raise ConfigError(f'{path}: metadata {LABELS_KEY} must be JSON like {{"output": ["label", …]}}') from None
    unknown = labels.keys() - {tensor.name for tensor in outputs}
    if unknown:
        raise ConfigError(f"{path}: metadata {LABELS_KEY} names outputs that the model does not have: {', '.join(sorted(unknown))}")
    return labels
