"""Case 13: without a window, what queued behind a running batch goes together."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.testing.company import together
from shoal.testing.models import gated
from shoal.testing.raw_http import infer
from shoal.testing.server import local_settings, running_server


def test_one_then_four(tmp_path: Path) -> None:
    """Five requests at once: the first runs alone because the executor is free, the other four run as one batch."""
    path, gate = gated(tmp_path)
    with running_server(local_settings({"m": path})) as server:
        requests = [infer("m", {"x": np.full((1, 4), number, np.float32)}) for number in range(5)]
        answers = together(server, gate, "m", requests[0], requests[1:])
        assert [answer.tensors()["y"][0, 0] for answer in answers] == [2, 4, 6, 8]
        assert gate.notes == [[0.0], [1.0, 2.0, 3.0, 4.0]]
