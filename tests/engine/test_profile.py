"""Profiles: what a server has learned of batch times is what the next one begins with, if model and machine are the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.core.latency import LatencyModel
from shoal.core.ticket import Ticket
from shoal.engine.profile import fingerprint, keep_profile, profile_path, read_profile
from shoal.engine.registry import Engine, ModelState
from shoal.tensors.payload import Payload
from shoal.testing.lanes import Endings
from shoal.testing.models import doubling

Run = Callable[[Any], Any]
MS = 1_000_000


def learned() -> LatencyModel:
    """Of batches that take 2 ms + 0.5 ms per row."""
    latency = LatencyModel()
    for rows in (1, 2, 4, 8, 16) * 5:
        latency.observe(rows, 0, 2 * MS + rows * MS // 2)
    return latency


def settings_of(tmp_path: Path, **values: Any) -> ModelSettings:
    """A doubling model in a file, in adaptive mode so that every batch is learned from."""
    return ModelSettings(path=doubling(tmp_path), batching=BatchingSettings(mode="adaptive"), **values)


def test_where_a_profile_lies() -> None:
    """Beside the file that the model is in; a class of a file has its own; what is no file has none."""
    assert profile_path("/m/net.onnx") == Path("/m/net.onnx.profile.json")
    assert profile_path("/m/net.py:Model") == Path("/m/net.py.Model.profile.json")
    assert profile_path("package.module:Model") is None
    assert profile_path("digits") is None


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    """A kept model of time answers as the one that was kept, and nothing else is left in the folder."""
    settings = settings_of(tmp_path)
    path = profile_path(settings.path)
    assert path is not None
    wanted = fingerprint(settings, 1)
    assert keep_profile(path, wanted, learned())
    again = read_profile(path, wanted, margin_sigmas=1.64)
    assert again is not None
    assert [again.expected_ns(rows) for rows in (1, 5, 30)] == [
        pytest.approx(2 * MS + rows * MS // 2, rel=1e-6) for rows in (1, 5, 30)
    ]
    assert again.batches == 25
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, path.name.split(".")[0] + ".py"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"instances": 2}, "instances"),
        ({"execution": "inline"}, "execution"),
        ({"batching": BatchingSettings(mode="adaptive", allowed_batch_sizes=(4, 8))}, "allowed_batch_sizes"),
        ({"batching": BatchingSettings(mode="adaptive", cost="tokens")}, "unit"),
    ],
)
def test_what_batch_times_depend_on_makes_another_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    """Other instances, execution, padding or units: the profile is not used, and the log names the difference."""
    settings = settings_of(tmp_path)
    path = tmp_path / "p.json"
    keep_profile(path, fingerprint(settings, 1), learned())
    other = ModelSettings(**{"path": settings.path, "batching": settings.batching, **change})
    caplog.set_level(logging.INFO, "shoal.engine")
    assert read_profile(path, fingerprint(other, 1), margin_sigmas=1.64) is None
    assert f"is of another {named}, so" in caplog.text
    assert read_profile(path, fingerprint(settings, 2), margin_sigmas=1.64) is None  # threads
    source = Path(settings.path.partition(":")[0])
    source.write_text(source.read_text() + "\n# another version\n")
    assert read_profile(path, fingerprint(settings, 1), margin_sigmas=1.64) is None
    assert "is of another model, so" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": 2}',
        b'{"format": 1, "fingerprint": 3}',
        json.dumps({"format": 1, "fingerprint": "same", "batch_times": None}).encode(),
        json.dumps({"format": 1, "fingerprint": "same", "batch_times": {"format": 1, "lines": {"0": {}}}}).encode(),
        json.dumps({"format": 1, "fingerprint": "same", "batch_times": {"format": 1, "lines": [], "scatter": -1}}).encode(),
        b"x" * (4 << 20) + b"x",
    ],
)
def test_a_profile_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    """Whatever lies there, loading goes on without it, and the log says which file is of no use."""
    wanted = {"model": "same"}
    path = tmp_path / "p.json"
    path.write_bytes(content.replace(b'"same"', json.dumps(wanted).encode()))
    assert read_profile(path, wanted, margin_sigmas=1.64) is None
    assert f"profile {path} is of no use" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keeping fails with a line in the log; reading a folder too."""
    assert not keep_profile(tmp_path / "none" / "p.json", {}, learned())
    assert "could not be kept" in caplog.text
    assert read_profile(tmp_path, {}, margin_sigmas=1.64) is None
    assert "cannot be read" in caplog.text


def ask(lane: Any, endings: Endings) -> None:
    """Submit a request of one row."""
    data = np.ones((1, 4), np.float32).tobytes()
    assert lane.submit(Ticket(1, len(data), "s", Payload((memoryview(data),), ((4,),)), endings)) is None


def test_a_server_begins_with_what_the_last_one_learned(run: Run, tmp_path: Path) -> None:
    """`keep`: closing writes the profile, loading begins with its figures; `read` begins with them too and writes nothing."""
    settings = settings_of(tmp_path, profile="keep")
    path = profile_path(settings.path)
    assert path is not None

    async def serve(settings: ModelSettings, requests: int) -> tuple[int, int]:
        """Batches known before and after."""
        engine, endings = Engine(cpus=2), Endings()
        status = await engine.load("double", settings)
        assert status.state is ModelState.READY
        lane = engine.lane("double")
        before = lane.latency.batches
        for number in range(requests):
            ask(lane, endings)
            await endings.wait(number + 1)
        after = lane.latency.batches
        await engine.close()
        return before, after

    first = run(serve(settings, 30))
    assert path.exists()
    again = run(serve(settings, 1))
    assert again[0] == first[1]
    written = path.read_bytes()
    reading = ModelSettings(path=settings.path, batching=settings.batching)
    assert run(serve(reading, 3))[0] == again[1]
    assert path.read_bytes() == written
    ignoring = ModelSettings(path=settings.path, batching=settings.batching, profile="off")
    assert run(serve(ignoring, 0))[0] == first[0]


def test_fixed_mode_learns_from_every_eighth_batch(run: Run, tmp_path: Path) -> None:
    """Nothing goes by batch times there, but whoever tunes or predicts wants them: 40 batches are 5 observations."""

    async def main() -> None:
        engine, endings = Engine(cpus=2), Endings()
        await engine.load("double", ModelSettings(path=doubling(tmp_path)))
        lane = engine.lane("double")
        before = lane.latency.batches
        for number in range(40):
            ask(lane, endings)
            await endings.wait(number + 1)
        assert lane.latency.batches == before + 5
        await engine.close()

    run(main())
