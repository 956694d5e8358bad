"""What comes of running a batch: a runner's `Result`, the `Outcome` for its members, and what clients may know of exceptions.

Data and its making only; who runs what, and how often, is in `execution.py` and `isolation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from shoal.core.ticket import Ticket
from shoal.errors import ClientError, ModelFailed, ShoalError

__all__ = ["End", "Outcome", "Result", "Run", "ends_of", "is_out_of_memory", "model_error", "rows_of", "runs_of"]

End: TypeAlias = "tuple[Any, int] | Exception"
"""How one member ended: (answer, first row of the member in it), or the error."""

_MAX_MESSAGE: Final = 2000
_MEMORY_WORDS: Final = ("failed to allocate memory", "bad_alloc", "out of memory", "alloc_failed")
"""What ONNX Runtime, C++, CUDA, and cuDNN or cuBLAS say when there is no room; they raise no class of their own for it."""


class Result:
    """What a runner made of its members: one `answer` that holds all their rows in order, and how long its three steps took.

    `failures` are the errors of single members, by index, where the model named them. `refused` is set instead of an answer when
    what the model returned cannot be taken apart (wrong number of rows): then nobody is answered, and nothing is run again.
    `answers` takes the place of `answer` where every member has one of its own. `model_rows` is how many rows the model was given,
    where that is not the members' (None): those of members that failed before are left out, and with 0 it was not run at all.
    `tokens` are the rows (times their length, where that differs) that members brought, `padded_tokens` what was run for them;
    both are 0 where nothing is ever padded.
    """

    __slots__ = (
        "answer",
        "answers",
        "failures",
        "infer_ns",
        "input_ns",
        "model_rows",
        "output_ns",
        "padded_tokens",
        "refused",
        "tokens",
    )

    def __init__(
        self,
        answer: Any,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        failures: Mapping[int, Exception] | None = None,
        refused: Exception | None = None,
    ) -> None:
        self.answer = answer
        self.answers: Sequence[Any] | None = None
        self.input_ns = input_ns
        self.infer_ns = infer_ns
        self.output_ns = output_ns
        self.failures = failures
        self.refused = refused
        self.model_rows: int | None = None
        self.tokens = 0
        self.padded_tokens = 0


class Run:
    """One execution that gave an answer: rows, nanoseconds, and what padding cost (see `Result`)."""

    __slots__ = ("infer_ns", "input_ns", "output_ns", "padded_tokens", "rows", "tokens")

    def __init__(self, rows: int, result: Result) -> None:
        self.rows = rows
        self.input_ns = result.input_ns
        self.infer_ns = result.infer_ns
        self.output_ns = result.output_ns
        self.tokens = result.tokens
        self.padded_tokens = result.padded_tokens


class Outcome:
    """What became of a batch.

    Usually `answer` holds every member's rows in order and `ends` is None. After any failure `ends` has one entry per member.
    `runs` are the executions that gave an answer, `reruns` how often parts of the batch were run again, `cause` the exception that
    the model raised first.

    `culprits` are the members, by index, whose input is to blame: they made the model raise alone, while others were answered.
    `apart` is how many were run alone from the start, because they had done so before. `oom_runs` is how often memory did not
    suffice, and `oom_rows` the smallest run that was too large for it; 0 where it sufficed, or one member's input was to blame.
    """

    __slots__ = ("answer", "apart", "cause", "culprits", "done_ns", "ends", "oom_rows", "oom_runs", "reruns", "runs")

    def __init__(self, answer: Any, ends: list[End] | None, runs: Sequence[Run], done_ns: int) -> None:
        self.answer = answer
        self.ends = ends
        self.runs = runs
        self.done_ns = done_ns
        self.reruns = 0
        self.apart = 0
        self.oom_runs = 0
        self.oom_rows = 0
        self.culprits: Sequence[int] = ()
        self.cause: BaseException | None = None


def rows_of(members: Sequence[Ticket]) -> int:
    """Their rows altogether."""
    return sum([member.rows for member in members])


def runs_of(members: Sequence[Ticket], result: Result) -> tuple[Run, ...]:
    """The execution behind a result, if there was one that gave an answer."""
    rows = rows_of(members) if result.model_rows is None else result.model_rows
    return (Run(rows, result),) if rows and result.refused is None else ()


def ends_of(members: Sequence[Ticket], result: Result) -> list[End]:
    """Every member's end, from a result that does not answer all of them alike."""
    if result.refused is not None:
        return [result.refused] * len(members)
    failures = result.failures or {}
    ends: list[End] = []
    row = 0
    for index, member in enumerate(members):
        error = failures.get(index)
        if error is not None:
            ends.append(error)
        else:
            ends.append((result.answer, row) if result.answers is None else (result.answers[index], 0))
        row += member.rows
    return ends


def model_error(error: BaseException) -> ShoalError:
    """What the client may know of an exception of the model: its type and text, and the HTTP status that it asks for.

    A `ClientError` or `ModelFailed` raised by the model on purpose stays itself. The original is the `__cause__` otherwise.
    """
    if isinstance(error, ClientError | ModelFailed):
        return error
    status = getattr(error, "http_status", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        status = None
    text = _text(error)
    name = type(error).__name__
    failed = ModelFailed(f"{name}: {text[:_MAX_MESSAGE]}" if text else name, http_status=status)
    failed.__cause__ = error
    return failed


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, the host's or a device's, did not suffice: then fewer rows may well run. (numpy's is a `MemoryError`.)"""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, ClientError | ModelFailed):
        return False
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's
        return True
    text = _text(error).lower()
    return any(words in text for words in _MEMORY_WORDS)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""  # even an exception's own text may fail
