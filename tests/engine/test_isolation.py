"""A failed batch is taken apart until only the culprits fail; what clients are told of a model's exception."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.ticket import Ticket
from shoal.datatypes import ModelSpec, TensorSpec
from shoal.engine.execution import execute
from shoal.engine.outcome import Outcome, Result, model_error
from shoal.engine.runner import TensorRunner
from shoal.errors import BadRequest, ModelFailed
from shoal.tensors.scatter import BadElement
from shoal.testing.lanes import FakeBackend, tagged_ticket


class Picky:
    """A runner that fails whenever a culprit is among its members; answers are the members' payloads, one for each row."""

    def __init__(self, culprits: set[int]) -> None:
        self.culprits = culprits
        self.runs = 0

    def run(self, members: Sequence[Ticket]) -> Result:
        """Answer, or raise the lowest culprit's number."""
        self.runs += 1
        bad = [member.payload for member in members if member.payload in self.culprits]
        if bad:
            raise ValueError(f"item {min(bad)}")
        return Result([member.payload for member in members for _ in range(member.rows)], 1, 1, 1)

    def close(self) -> None:
        """Nothing."""


def members_of(rows: Sequence[int]) -> list[Ticket]:
    """Tickets of these sizes, with their index as payload."""
    return [Ticket(count, payload=index) for index, count in enumerate(rows)]


def run(runner: Any, members: Sequence[Ticket]) -> Outcome:
    """Execute with a clock that stands still."""
    return execute(runner, members, lambda: 0)


def log2_up(count: int) -> int:
    """⌈log₂ count⌉."""
    return (count - 1).bit_length()


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=64), st.data())
def test_only_culprits_fail_and_everyone_else_gets_their_own_rows(rows: list[int], data: st.DataObject) -> None:
    """Any sizes, up to half of the members culprits: each its own message, every other its own rows; bounded reruns."""
    count = len(rows)
    culprits = data.draw(st.sets(st.integers(0, count - 1), max_size=max(1, count // 2)))
    members = members_of(rows)
    runner = Picky(culprits)
    outcome = run(runner, members)
    ends = outcome.ends or [(outcome.answer, sum(rows[:index])) for index in range(count)]
    assert len(ends) == count
    broken = 2 * log2_up(count) + 5 <= len(culprits)  # that many failures in a row may look like a broken model
    for index, end in enumerate(ends):
        if index in culprits:
            assert isinstance(end, ModelFailed)
            if not broken:
                assert end.message == f"ValueError: item {index}"
        elif isinstance(end, Exception):
            assert broken
        else:
            answer, row = end
            assert answer[row : row + rows[index]] == [index] * rows[index]
    assert outcome.reruns <= 1.5 * count + 2 * log2_up(count) + 5
    answered = sum(rows[index] for index, end in enumerate(ends) if not isinstance(end, Exception))
    assert sum(each.rows for each in outcome.runs) == answered


@pytest.mark.parametrize("count", [2, 3, 8, 33, 64])
def test_one_culprit_costs_at_most_two_reruns_per_halving(count: int) -> None:
    """At every place in batches of several sizes: at most 2⌈log₂ n⌉ reruns, one failure, n - 1 answers."""
    for culprit in range(count):
        runner = Picky({culprit})
        outcome = run(runner, members_of([1] * count))
        assert outcome.reruns <= 2 * log2_up(count)
        assert runner.runs == outcome.reruns + 1
        assert [index for index, end in enumerate(outcome.ends or []) if isinstance(end, Exception)] == [culprit]


def test_a_broken_model_is_not_asked_again_for_every_member() -> None:
    """64 members, every run fails: the search ends after 17 reruns, and all fail with what the model said."""
    runner = Picky(set(range(64)))
    outcome = run(runner, members_of([1] * 64))
    assert outcome.reruns == 2 * 6 + 2 + 3
    assert all(isinstance(end, ModelFailed) for end in outcome.ends or [])
    assert len(outcome.ends or []) == 64
    assert outcome.runs == []


@pytest.mark.parametrize("first", [0, 20, 49])
def test_a_row_of_bad_neighbours_is_not_taken_for_a_broken_model(first: int) -> None:
    """15 of 64 in a row are bad, so that nothing may work for long; the other 49 are answered all the same."""
    bad = set(range(first, first + 15))
    outcome = run(Picky(bad), members_of([1] * 64))
    assert [isinstance(end, Exception) for end in outcome.ends or []] == [index in bad for index in range(64)]


def test_a_batch_of_one_fails_at_once() -> None:
    """Nothing is run again, and the message is the model's."""
    runner = Picky({0})
    outcome = run(runner, members_of([3]))
    assert (runner.runs, outcome.reruns) == (1, 0)
    assert [str(end) for end in outcome.ends or []] == ["ValueError: item 0"]


class WrongRows:
    """A runner whose model returns another number of rows in company, but the right one alone."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, members: Sequence[Ticket]) -> Result:
        """What `TensorRunner` returns when the outputs cannot be taken apart."""
        self.runs += 1
        return Result(None, 0, 0, 0, refused=ModelFailed('output "y": the model returned 3 rows for 4'))

    def close(self) -> None:
        """Nothing."""


def test_case_5_wrong_row_counts_fail_everyone_and_are_not_tried_again() -> None:
    """No answer is made of a batch whose rows cannot be told apart, nor of smaller ones that might have the right count."""
    runner = WrongRows()
    outcome = run(runner, members_of([1, 1, 2]))
    assert runner.runs == 1
    assert [str(end) for end in outcome.ends or []] == ['output "y": the model returned 3 rows for 4'] * 3
    assert list(outcome.runs) == []


@pytest.mark.parametrize(
    "exception", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError("no room"), StopIteration(1)]
)
def test_nothing_that_a_model_raises_gets_out(exception: BaseException) -> None:
    """Neither exits nor interrupts end the executor: they are failures of that request."""

    class Raising:
        def run(self, members: Sequence[Ticket]) -> Result:
            raise exception

        def close(self) -> None: ...

    outcome = run(Raising(), members_of([1]))
    (end,) = outcome.ends or []
    assert isinstance(end, ModelFailed)
    assert end.message.startswith(type(exception).__name__)
    assert end.__cause__ is exception


def test_single_members_may_fail_inside_an_answered_batch() -> None:
    """A runner that names failing members: the others are answered from the same run, nothing is run again."""
    error = ModelFailed("this one")

    class Naming:
        def run(self, members: Sequence[Ticket]) -> Result:
            return Result(["a", None, "c"], 1, 1, 1, failures={1: error})

        def close(self) -> None: ...

    outcome = run(Naming(), members_of([1, 1, 1]))
    assert outcome.ends == [(["a", None, "c"], 0), error, (["a", None, "c"], 2)]
    assert outcome.reruns == 0


class Teapot(Exception):
    """A model's own exception that asks for a status."""

    def __init__(self, status: Any) -> None:
        super().__init__("short and stout")
        self.http_status = status


@pytest.mark.parametrize(
    ("status", "expected"), [(418, 418), (599, 599), (400, 400), (200, 500), (600, 500), ("418", 500), (True, 500)]
)
def test_case_3_a_models_status_is_respected_if_it_is_one(status: Any, expected: int) -> None:
    """`http_status` of 400 to 599 is the answer's status; anything else is a plain 500."""
    failed = model_error(Teapot(status))
    assert failed.http_status == expected
    assert failed.message == "Teapot: short and stout"
    assert failed.reason == "model_failed"


def test_errors_meant_for_the_client_pass_as_they_are() -> None:
    """A model may raise the table's own errors; a message is cut where it would be too long; a broken __str__ harms nobody."""
    error = BadRequest("input x: not a picture")
    assert model_error(error) is error
    assert len(model_error(ValueError("x" * 100_000)).message) < 2100

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert model_error(Mute()).message == "Mute"


def text_spec(batchable: bool) -> ModelSpec:
    """A model from numbers to texts."""
    shape = (-1, 1)
    return ModelSpec("fake", (TensorSpec("x", "FP32", shape),), (TensorSpec("y", "BYTES", shape),), batchable=batchable)


def test_one_bad_text_fails_only_its_owner() -> None:
    """Elements that are no text are their owners' failure: the others are answered from the same run, and nothing is run again."""

    def texts(x: Any) -> Any:
        return np.array([[None if value < 0 else f"{value:g}"] for value in x[:, 0]], object)

    backend = FakeBackend(texts, spec=text_spec(True))
    runner = TensorRunner(backend, 8, time.monotonic_ns)
    members = [tagged_ticket(values) for values in ([1.0], [2.0, -3.0, -4.0], [5.0, 6.0], [-7.0])]
    outcome = execute(runner, members, time.monotonic_ns)
    assert len(backend.calls) == 1 and outcome.reruns == 0
    assert outcome.ends is not None
    for index, row in ((1, 2), (3, 6)):
        error = outcome.ends[index]
        assert isinstance(error, BadElement) and error.row == row
    for index, wanted in ((0, [b"1"]), (2, [b"5", b"6"])):
        answer, row = outcome.ends[index]  # type: ignore[misc]
        assert answer.array(0, row, members[index].rows).reshape(-1).tolist() == wanted


def test_a_bad_text_without_a_batch_fails_the_request() -> None:
    """Where there is no batch dimension the whole output is one request's, whichever element is bad."""
    backend = FakeBackend(lambda x: np.array([["a"], ["b"], [None]], object), spec=text_spec(False))
    ticket = tagged_ticket([1.0])
    ticket.payload.row_shapes = ((1, 1),)
    outcome = execute(TensorRunner(backend, 1, time.monotonic_ns), [ticket], time.monotonic_ns)
    assert outcome.ends is not None and isinstance(outcome.ends[0], BadElement)
