"""`shoal simulate` says so when it is asked for more than can be served."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import main


@pytest.mark.parametrize(("rate", "noted"), [(7000, True), (5000, False)])
def test_overload_is_noted(capsys: pytest.CaptureFixture[str], rate: int, noted: bool) -> None:
    """64 rows in 1.9 + 64 · 0.14 ms are 5,893 a second; beyond, a note on stderr names that, and stdout stays JSON."""
    words = f"simulate --tau0-ms 1.9 --alpha-ms 0.14 --max-batch-size 64 --rate-per-s {rate} --requests 2000 --json"
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    assert ("about 5,893 requests per second" in printed.err) is noted
    assert json.loads(printed.out)["served"] == 2000
