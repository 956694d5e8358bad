"""Python models with hooks behind the executor: whose rows they see, what they return, and what an exception in one reaches."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.python import open_python
from shoal.backends.python_hooks import Hooks
from shoal.config.settings import BatchingSettings, LengthSettings, ModelSettings
from shoal.core.ticket import Ticket
from shoal.engine.execution import execute
from shoal.engine.hooked_runner import HookedTensorRunner
from shoal.engine.outcome import Outcome
from shoal.engine.quarantine import Quarantine
from shoal.engine.registry import Engine, ModelState
from shoal.errors import ModelFailed
from shoal.testing.lanes import tagged_ticket
from shoal.testing.models import python_model

SUMS = """
class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    seen = []
    def decode(self, x):
        if (x < 0).any():
            raise ValueError("negative")
        return np.concatenate([x, x * x], axis=1)
    def __call__(self, x):
        self.seen.append(x.tolist())
        return x[:, :1], x[:, 1:]
    def encode(self, plain, squares):
        if (plain > 100).any():
            raise KeyError("large")
        return plain + squares
"""


def opened(tmp_path: Path, source: str, *, allowed_sizes: tuple[int, ...] = ()) -> tuple[HookedTensorRunner, Any]:
    """A runner, and the model's object."""
    backend = open_python(python_model(tmp_path, source))
    assert isinstance(backend.hooks, Hooks)
    runner = HookedTensorRunner(backend, backend.hooks, 8, lambda: 0, allowed_sizes=allowed_sizes)
    return runner, backend._call.__self__  # type: ignore[attr-defined]


def run(runner: HookedTensorRunner, members: list[Ticket], quarantine: Quarantine | None = None) -> Outcome:
    """Execute with a clock that stands still."""
    return execute(runner, members, lambda: 0, quarantine)


def values_of(outcome: Outcome, members: list[Ticket]) -> list[Any]:
    """Every member's values, or its exception's text."""
    assert outcome.ends is not None
    values: list[Any] = []
    for member, end in zip(members, outcome.ends, strict=True):
        if isinstance(end, Exception):
            values.append(str(end))
        else:
            answer, row = end
            values.append(answer.array(0, row, member.rows).reshape(-1).tolist())
    return values


def test_hooks_see_one_request_each_and_the_model_all(tmp_path: Path) -> None:
    """Requests of one to three rows, one that cannot be decoded, one that cannot be encoded: one run, everyone their own rows."""
    runner, model = opened(tmp_path, SUMS)
    members = [tagged_ticket(values) for values in ([1.0], [2.0, -1.0], [3.0, 4.0, 5.0], [200.0], [6.0])]
    outcome = run(runner, members)
    assert values_of(outcome, members) == [[2.0], "ValueError: negative", [12.0, 20.0, 30.0], "KeyError: 'large'", [42.0]]
    assert model.seen == [[[1, 1], [3, 9], [4, 16], [5, 25], [200, 40000], [6, 36]]]
    assert [each.rows for each in outcome.runs] == [6] and outcome.reruns == 0
    runner.close()


def test_batches_are_filled_up_to_allowed_sizes(tmp_path: Path) -> None:
    """Three decoded rows where four or eight are allowed: the last is repeated, and answered once."""
    runner, model = opened(tmp_path, SUMS, allowed_sizes=(4, 8))
    members = [tagged_ticket(values) for values in ([1.0, 2.0], [-1.0], [3.0])]
    outcome = run(runner, members)
    assert values_of(outcome, members) == [[2.0, 6.0], "ValueError: negative", [12.0]]
    assert model.seen == [[[1, 1], [2, 4], [3, 9], [3, 9]]]
    assert [(each.rows, each.tokens, each.padded_tokens) for each in outcome.runs] == [(3, 3, 4)]
    runner.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def decode(self, x): return x[:1]", "decode returned 1 rows for 2"),
        ("def decode(self, x): return None", "decode returned a NoneType, expected an array of 2 rows"),
        ("def decode(self, x): return {'z': x}", "decode returned a dict with z; the inputs are x"),
        ("def decode(self, x): return (x, x)", "decode returned 2 arrays for 1 inputs"),
        ("def encode(self, y): return y[:1]", 'output "y": the model returned 1 rows for 2'),
        ("def encode(self, y): return y.astype(str)", "the model returned <U32, declared is FP32"),
        ("def encode(self, y): pass", "the model returned None; is a `return` missing?"),
    ],
)
def test_what_hooks_return_wrongly_fails_their_request_only(tmp_path: Path, body: str, message: str) -> None:
    """A sentence for the request with two rows; the one with one row is answered from the same run."""
    source = f"""
class Model:
    inputs = {{"x": ("FP32", (1,))}}
    outputs = {{"y": ("FP32", (1,))}}
    calls = 0
    def __call__(self, x):
        self.calls += 1
        return x
    {body.replace("return", "return x if len(x) == 1 else" if "decode" in body else "return y if len(y) == 1 else", 1)}
"""
    if body.endswith("pass"):
        source = source.replace("pass", "return y if len(y) == 1 else None")
    runner, model = opened(tmp_path, source)
    members = [tagged_ticket([1.0]), tagged_ticket([2.0, 3.0])]
    outcome = run(runner, members)
    good, bad = values_of(outcome, members)
    assert good == [1.0] and message in bad
    assert model.calls == 1 and outcome.reruns == 0
    runner.close()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("x[1:]", "the model returned 2 rows for 3"),
        ("(x, x[0])", "the model returned 1 rows for 3"),
        ("np.float32(3)", "the model returned a float32, expected an array or list of 3 rows"),
        ("np.array(3)", "the model returned a scalar, expected 3 rows"),
        ("'abc'", "the model returned a str, expected an array or list of 3 rows"),
    ],
)
def test_case_5_wrong_rows_before_encode_fail_everyone(tmp_path: Path, returned: str, message: str) -> None:
    """What cannot be taken apart goes to nobody's `encode`, and is not tried again."""
    source = f"""
class Model:
    inputs = {{"x": ("FP32", (1,))}}
    outputs = {{"y": ("FP32", (1,))}}
    calls = 0
    def __call__(self, x):
        self.calls += 1
        return {returned}
    def encode(self, *values):
        return values[0]
"""
    runner, model = opened(tmp_path, source)
    members = [tagged_ticket([1.0]), tagged_ticket([2.0, 3.0])]
    assert values_of(run(runner, members), members) == [message, message]
    assert model.calls == 1
    runner.close()


def test_lack_of_memory_in_a_hook_is_nobodys_fault(tmp_path: Path) -> None:
    """`encode` has room for the batch of two only: the four are run again in halves, and answered."""
    source = """
class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def __call__(self, x):
        self.rows = len(x)
        return x
    def encode(self, y):
        if self.rows > 2:
            raise MemoryError("no room")
        return y
"""
    runner, _ = opened(tmp_path, source)
    members = [tagged_ticket([float(value)]) for value in range(4)]
    outcome = run(runner, members)
    assert values_of(outcome, members) == [[0.0], [1.0], [2.0], [3.0]]
    assert (outcome.oom_runs, outcome.oom_rows) == (1, 4)
    runner.close()


def test_shapes_that_do_not_go_together_are_answered_apart(tmp_path: Path) -> None:
    """Where `decode` breaks its promise of one shape the batch cannot be put together; everyone is answered nevertheless."""
    source = """
class Model:
    inputs = {"x": ("FP32", (1,))}
    outputs = {"y": ("FP32", (1,))}
    def decode(self, x):
        return np.repeat(x, int(x[0, 0]), axis=1)
    def __call__(self, x):
        return x.sum(axis=1, keepdims=True)
"""
    runner, _ = opened(tmp_path, source)
    members = [tagged_ticket([float(value)]) for value in (1, 2, 2, 3)]
    assert values_of(run(runner, members), members) == [[1.0], [4.0], [4.0], [9.0]]
    runner.close()


def test_answers_are_nobodys_buffer(tmp_path: Path) -> None:
    """A model that writes every batch's results into one array, with and without `encode`: earlier answers stay as they were."""
    for encode in ("", "def encode(self, y): return y"):
        source = f"""
class Model:
    inputs = {{"x": ("FP32", (1,))}}
    outputs = {{"y": ("FP32", (1,))}}
    def load(self):
        self.kept = np.zeros((8, 1), np.float32)
    def decode(self, x):
        return x
    def __call__(self, x):
        self.kept[: len(x)] = x
        return self.kept[: len(x)]
    {encode}
"""
        runner, _ = opened(tmp_path, source)
        members = [tagged_ticket([1.0]), tagged_ticket([2.0, 3.0])]
        outcome = run(runner, members)
        run(runner, [tagged_ticket([7.0, 8.0, 9.0])])
        assert values_of(outcome, members) == [[1.0], [2.0, 3.0]]
        runner.close()


@pytest.mark.parametrize("values", [[-1.0], [200.0]])
def test_failures_leave_nothing_for_the_garbage_collector(tmp_path: Path, values: list[float]) -> None:
    """A request that a hook failed goes as soon as it is let go of: its error keeps nothing of it alive in a circle."""
    runner, _ = opened(tmp_path, SUMS)
    gc.collect()
    gc.disable()
    try:
        ticket = tagged_ticket(values)
        outcome = execute(runner, [ticket, tagged_ticket([1.0])], lambda: 0)
        assert outcome.ends is not None
        ticket.error = outcome.ends[0] if isinstance(outcome.ends[0], ModelFailed) else None
        assert ticket.error is not None
        watched = weakref.ref(ticket.error)
        del ticket, outcome
        assert watched() is None
    finally:
        gc.enable()
    runner.close()


def test_inputs_are_known_again_by_rows_shapes_and_parameters(tmp_path: Path) -> None:
    """The same bytes in two rows or with other parameters are another input; a piece of a cut request is known by its rows."""
    runner, _ = opened(tmp_path, SUMS)
    quarantine = Quarantine()
    one = tagged_ticket([1.0, 2.0])
    other = tagged_ticket([1.0, 2.0])
    other.payload.parameters = {"a": 1}
    quarantine.learn([one], (), runner.contents, 0)
    whole = tagged_ticket([0.0, 1.0, 2.0, 3.0])
    piece = Ticket(2, payload=whole.payload)
    piece.parent, piece.start_row = whole, 1
    members = [tagged_ticket([1.0, 2.0]), other, tagged_ticket([1.0]), piece]
    assert quarantine.suspects(members, runner.contents, 1) == [0, 3]
    runner.close()


def test_hooks_and_padding_exclude_each_other(tmp_path: Path) -> None:
    """A model with a hook whose rows were to be padded is not loaded, and is told what to change; exact lengths are fine."""

    async def load(lengths: LengthSettings) -> tuple[ModelState, str]:
        path = python_model(
            tmp_path,
            """
            class Model:
                inputs = {"x": ("FP32", ("length",)), "mask": ("FP32", ("length",))}
                outputs = {"y": ("FP32", ("length",))}
                def decode(self, x, mask): return x, mask
                def __call__(self, x, mask): return x
            """,
        )
        engine = Engine()
        status = await engine.load("m", ModelSettings(path=path, batching=BatchingSettings(lengths={"x": lengths})))
        state, reason = status.state, status.reason
        await engine.close()
        return state, reason

    assert asyncio.run(load(LengthSettings())) == (ModelState.READY, "")
    state, reason = asyncio.run(load(LengthSettings(policy="pad", pad_value=0.0, mask="mask")))
    assert state is ModelState.UNAVAILABLE
    assert 'model "m" has decode() or encode()' in reason and "bring rows to one length in decode()" in reason
