"""Loading, finding, draining and closing models, with real Python models from files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.probe import ProbeReport
from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.core.ticket import Ticket
from shoal.datatypes import TensorSpec
from shoal.engine.registry import Engine, ModelState, _Loaded, _runs_inline
from shoal.errors import NotReady, UnknownModel, UnknownVersion
from shoal.tensors.payload import Payload
from shoal.testing.gates import gate
from shoal.testing.lanes import TAGGED, Endings, FakeBackend
from shoal.testing.models import doubling, gated, python_model

Run = Callable[[Any], Any]


def ticket_of(values: list[float], on_end: Callable[[Ticket], None], columns: int = 4) -> Ticket:
    """A request of one row of `columns` equal values for each value."""
    data = np.repeat(np.array(values, np.float32)[:, None], columns, axis=1).tobytes()
    return Ticket(len(values), len(data), "s", Payload((memoryview(data),), ((columns,),)), on_end)


def first_column(ticket: Ticket) -> list[float]:
    """The answer's first column."""
    assert ticket.error is None
    column: list[float] = ticket.answer.array(0, ticket.answer_row, ticket.rows)[:, 0].tolist()
    return column


def test_a_model_is_loaded_probed_served_drained_and_closed(run: Run, tmp_path: Path) -> None:
    """The whole life of a model: READY after loading, answers, refuses when draining, UNAVAILABLE at the end."""

    async def main() -> None:
        engine, endings = Engine(cpus=2), Endings()
        status = await engine.load("double", ModelSettings(path=doubling(tmp_path)))
        assert (status.state, status.reason, status.threads) == (ModelState.READY, "", 2)
        assert status.probe is not None
        assert status.probe.batchable
        engine.check_ready()
        lane = engine.lane("double")
        assert engine.lane("double", "1") is lane
        assert engine.lanes() == [lane]
        assert engine.versions("double") == ["1"]
        lane.submit(ticket_of([3.0, 4.0], endings))
        assert await engine.drain(30_000.0) is True
        assert first_column(endings.tickets[0]) == [6.0, 8.0]
        refuse = lane.submit(ticket_of([1.0], endings))
        assert refuse is not None
        assert refuse.reason == "draining"
        with pytest.raises(NotReady, match="shutting down"):
            engine.check_ready()
        assert await engine.close() is True
        with pytest.raises(NotReady):
            engine.lane("double")

    run(main())


def test_case_29_a_model_that_fails_to_load_says_why_and_harms_no_other(run: Run, tmp_path: Path) -> None:
    """A missing file, a model that raises, one that exits: each UNAVAILABLE with its reason; the good one serves; not ready."""
    raising = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (4,))}
            outputs = {"y": ("FP32", (4,))}
            def load(self):
                raise OSError("weights are missing")
            def __call__(self, x):
                return x
        """,
    )
    leaving = python_model(tmp_path, "raise SystemExit(3)\n")

    async def main() -> None:
        engine = Engine(cpus=1)
        await engine.load("good", ModelSettings(path=doubling(tmp_path)))
        for name, path, reason in (
            ("missing", str(tmp_path / "nothing.onnx"), "nothing.onnx"),
            ("raising", raising, "weights are missing"),
            ("leaving", leaving, "SystemExit"),
        ):
            status = await engine.load(name, ModelSettings(path=path))
            assert status.state is ModelState.UNAVAILABLE
            assert reason in status.reason
            with pytest.raises(NotReady, match=f'"{name}" version 1 is not available: '):
                engine.lane(name)
        with pytest.raises(NotReady):
            engine.check_ready()
        assert engine.lane("good").name == "good"
        await engine.close()

        lenient = Engine(strict_readiness=False, cpus=1)
        await lenient.load("missing", ModelSettings(path=str(tmp_path / "nothing.onnx")))
        with pytest.raises(NotReady, match=r"nothing\.onnx"):
            lenient.check_ready()
        await lenient.load("good", ModelSettings(path=doubling(tmp_path)))
        lenient.check_ready()
        await lenient.close()

    run(main())


def test_case_5_the_probe_refuses_a_model_whose_rows_do_not_add_up(run: Run, tmp_path: Path) -> None:
    """A model that loses a row in company is not served; the reason names the output and both counts."""
    losing = python_model(
        tmp_path,
        """
        class Model:
            inputs = {"x": ("FP32", (4,))}
            outputs = {"y": ("FP32", (4,))}
            def __call__(self, x):
                return x if len(x) == 1 else x[:-1]
        """,
    )

    async def main() -> None:
        engine = Engine(cpus=1)
        status = await engine.load("losing", ModelSettings(path=losing))
        assert status.state is ModelState.UNAVAILABLE
        assert "output 'y' has 1 rows for a batch of 2" in status.reason
        alone = await engine.load("losing", ModelSettings(path=losing, batching=BatchingSettings(max_batch_size=1)))
        assert alone.state is ModelState.READY
        await engine.close()

    run(main())


def test_unknown_names_and_versions(run: Run, tmp_path: Path) -> None:
    """What was never asked for is unknown; what is announced but not loaded is not ready; without a version the highest answers."""

    async def main() -> None:
        engine = Engine(cpus=4)
        path = doubling(tmp_path)
        engine.announce({"a": ModelSettings(path=path), "b": ModelSettings(path=path, instances=2, threads=1)})
        assert engine.thread_budget == {"a": 2, "b": 1}
        with pytest.raises(NotReady, match="still being loaded"):
            engine.lane("a")
        with pytest.raises(NotReady):
            engine.check_ready()
        with pytest.raises(UnknownModel, match='no model "c"'):
            engine.lane("c")
        for version in ("2", "10", "9"):
            await engine.load("a", ModelSettings(path=path, version=version))
        assert engine.lane("a").version == "10"
        assert engine.lane("a", "9").version == "9"
        assert engine.status("a").version == "10"
        assert engine.versions("a") == ["2", "9", "10"]
        with pytest.raises(UnknownVersion, match="it has 1, 2, 9, 10"):
            engine.lane("a", "7")
        await engine.unload("a", "10")
        assert engine.lane("a").version == "9"
        with pytest.raises(NotReady, match="unloaded"):
            engine.lane("a", "10")
        await engine.close()

    run(main())


def test_instances_have_backends_of_their_own(run: Run, tmp_path: Path) -> None:
    """Two instances of a class are two objects in two threads; both stand inside the model at the same time."""
    path, door = gated(tmp_path)

    async def main() -> None:
        engine, endings = Engine(cpus=2), Endings()
        settings = ModelSettings(path=path, instances=2, probe=False, batching=BatchingSettings(max_batch_size=1))
        await engine.load("pair", settings)
        lane = engine.lane("pair")
        for value in (1.0, 2.0):
            lane.submit(ticket_of([value], endings))
        await asyncio.get_running_loop().run_in_executor(None, door.wait_entered, 2)
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-pair"))
        assert names == ["shoal-pair-0", "shoal-pair-1"]
        door.open()
        await endings.wait(2)
        assert sorted(first_column(ticket)[0] for ticket in endings.tickets) == [2.0, 4.0]
        await engine.close()

    run(main())


def test_loading_a_version_again_replaces_it_without_losing_a_request(run: Run, tmp_path: Path) -> None:
    """While the old one still runs a request the new one takes over; a reload that fails leaves the old one in service."""
    old_path, door = gated(tmp_path)

    async def main() -> None:
        engine, endings = Engine(cpus=1), Endings()
        await engine.load("m", ModelSettings(path=old_path, probe=False))
        old = engine.lane("m")
        old.submit(ticket_of([1.0], endings))
        await asyncio.get_running_loop().run_in_executor(None, door.wait_entered, 1)
        failed = await engine.load("m", ModelSettings(path=str(tmp_path / "nothing.onnx")))
        assert failed.state is ModelState.READY
        assert "nothing.onnx" in failed.reason
        assert engine.lane("m") is old
        loading = asyncio.ensure_future(engine.load("m", ModelSettings(path=doubling(tmp_path))))
        while engine.lane("m") is old:  # noqa: ASYNC110 - the load is not over before the old one is drained
            await asyncio.sleep(0)
        engine.lane("m").submit(ticket_of([5.0], endings))
        await endings.wait(1)
        assert first_column(endings.tickets[0]) == [10.0]
        door.open()
        status = await loading
        assert (status.state, status.reason) == (ModelState.READY, "")
        await endings.wait(2)
        assert first_column(endings.tickets[1]) == [2.0]
        await engine.close()

    run(main())


def test_a_load_that_is_cancelled_closes_what_it_had_opened(run: Run, tmp_path: Path) -> None:
    """The task is cancelled while the model's `load` runs in its thread: UNAVAILABLE, and the late backend is not leaked."""
    name = str(tmp_path)
    path = python_model(
        tmp_path,
        f"""
        from shoal.testing.gates import gate

        class Model:
            inputs = {{"x": ("FP32", (4,))}}
            outputs = {{"y": ("FP32", (4,))}}
            def load(self):
                gate({name!r}).enter()
            def __call__(self, x):
                return x
        """,
    )
    door = gate(name)

    async def main() -> None:
        door.close()
        entered = len(door.notes)
        engine = Engine(cpus=1)
        loading = asyncio.ensure_future(engine.load("slow", ModelSettings(path=path, probe=False)))
        await asyncio.get_running_loop().run_in_executor(None, door.wait_entered, entered + 1)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "shoal-load-slow"]
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert engine.status("slow").state is ModelState.UNAVAILABLE
        door.open()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        await asyncio.sleep(0)
        assert await engine.close() is True

    run(main())


def test_a_model_without_a_batch_dimension_runs_each_request_alone(run: Run, tmp_path: Path) -> None:
    """Three requests at once to a model that cannot batch: three calls, of the whole tensor each, whatever the settings say."""
    spec = replace(TAGGED, inputs=(TensorSpec("x", "FP32", (2,)),), outputs=(TensorSpec("y", "FP32", (2,)),), batchable=False)
    backend = FakeBackend(spec=spec)

    async def main() -> None:
        endings = Endings()
        lane = Engine(cpus=1)._make_lane("whole", ModelSettings(path="-"), _Loaded([backend], None), False)
        for value in (1.0, 2.0, 3.0):
            data = np.array([value, -value], np.float32).tobytes()
            lane.submit(Ticket(1, 8, "s", Payload((memoryview(data),), ((2,),)), endings))
        await endings.wait(3)
        assert backend.calls == [[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]
        answers = [ticket.answer.array(0, ticket.answer_row, ticket.rows).tolist() for ticket in endings.tickets]
        assert answers == [[3.0, -1.0], [5.0, -3.0], [7.0, -5.0]]
        await lane.close()

    run(main())


@pytest.mark.parametrize("execution", ["inline", "thread"])
def test_where_a_model_runs_is_a_setting_and_every_backend_is_closed_once(run: Run, execution: str) -> None:
    """Inline: in the loop's thread, with one of the two backends; in threads: with both. All are closed at the end, once."""
    idents: list[int] = []

    def note(x: Any) -> Any:
        idents.append(threading.get_ident())
        return 2 * x + 1

    backends = [FakeBackend(note), FakeBackend(note)]

    async def main() -> None:
        endings = Endings()
        settings = ModelSettings(path="-", instances=2, execution=execution)
        lane = Engine(cpus=1)._make_lane("m", settings, _Loaded(list(backends), None), execution == "inline")
        lane.submit(ticket_of([3.0], endings, columns=1))
        await endings.wait(1)
        assert first_column(endings.tickets[0]) == [7.0]
        assert await lane.close() is True
        assert (idents[0] == threading.get_ident()) == (execution == "inline")
        assert [backend.closed for backend in backends] == [1, 1]

    run(main())


@pytest.mark.parametrize(
    ("steady", "largest_us", "settings", "inline"),
    [
        (True, 50, {}, True),
        (True, 500, {}, False),  # dearer than a hand-over
        (False, 50, {}, False),  # clients could make it dear
        (True, None, {}, False),  # never measured
        (True, 50, {"instances": 2}, False),
        (True, 50, {"threads": 2}, False),
        (True, 50, {"execution": "thread"}, False),
        (False, 500, {"execution": "inline"}, True),
    ],
)
def test_only_cheap_and_steady_models_run_on_the_loop_unasked(
    steady: bool, largest_us: int | None, settings: dict[str, Any], inline: bool
) -> None:
    """`auto` takes the loop for a model whose time depends on rows alone and whose largest batch was measured to be cheap."""
    backend = FakeBackend()
    backend.spec = replace(backend.spec, steady=steady)
    report = None if largest_us is None else ProbeReport(True, timings_ns={1: 1_000, 64: largest_us * 1_000})
    assert _runs_inline(ModelSettings(path="-", **settings), _Loaded([backend], report)) is inline
