"""Servers under test: a registry of kinds (how to start one, when it is ready, what it is sent) and a running process of a kind.

A peer is added by one more entry of `KINDS`. Whatever happens, a process that was started here is ended here.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from benchmarks.machine import BenchmarkError, context_switches, free_port, pinned, process_cpu_ns, rss_bytes
from benchmarks.models import Array, BenchModel
from benchmarks.payloads import Answer, Request, oip_binary_request, oip_row, raw_request, raw_row, send

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "bench"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
READY_PAUSE_S = 0.05


@dataclass(frozen=True)
class Launch:
    """What a server is started with. `options` are further words of its own command line."""

    target: str
    row_items: int
    port: int
    max_batch_size: int = 64
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerKind:
    """How one kind of server is started and spoken to.

    `command` gives the words that start it in the foreground, `ready` says whether it may be loaded, `request` builds the request
    for one row in the protocol that it is measured with, `row_of` reads the answer's row.
    """

    name: str
    command: Callable[[Launch], list[str]]
    ready: Callable[[int], bool]
    request: Callable[[Array], Request]
    row_of: Callable[[Answer], Array]


def _prototype_command(launch: Launch) -> list[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "prototype.py"), launch.target, "--row-items", str(launch.row_items)]
    return [*words, "--max-batch-size", str(launch.max_batch_size), "--port", str(launch.port), *launch.options]


def _shoal_command(launch: Launch) -> list[str]:
    words = [sys.executable, "-m", "shoal.cli", "serve", launch.target, "--name", MODEL_NAME, "--threads", "1"]
    return [*words, "--max-batch-size", str(launch.max_batch_size), "--http-port", str(launch.port), *launch.options]


def _accepts(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _oip_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", f"/v2/models/{MODEL_NAME}/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


KINDS: dict[str, ServerKind] = {
    kind.name: kind
    for kind in (
        ServerKind("prototype", _prototype_command, _accepts, raw_request, raw_row),
        ServerKind("shoal", _shoal_command, _oip_ready, lambda row: oip_binary_request(MODEL_NAME, row), oip_row),
    )
}


class RunningServer:
    """A server process of some kind, bound to one core. Use as a context manager: ready on entry, gone on exit."""

    def __init__(self, kind: ServerKind, core: int, launch: Launch) -> None:
        self.kind, self.core, self.launch = kind, core, launch
        self.port = launch.port
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @classmethod
    def of_model(cls, kind: ServerKind, core: int, model: BenchModel, *, max_batch_size: int = 64) -> RunningServer:
        """A server of an ONNX model."""
        return cls(kind, core, Launch(str(model.path), model.row_items, free_port(), max_batch_size))

    def __enter__(self) -> RunningServer:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """Process id. Raises BenchmarkError, with what the server printed, when it does not run (any more)."""
        if self._process is None or self._process.poll() is not None:
            raise BenchmarkError(f"{self.kind.name} is not running{self._said()}")
        return self._process.pid

    def cpu_ns(self) -> int:
        """CPU time used so far, all threads."""
        return process_cpu_ns(self.pid)

    def context_switches(self) -> int:
        """Context switches so far, all living threads."""
        return context_switches(self.pid)

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return rss_bytes(self.pid)

    def connect(self, timeout_s: float = 10.0) -> http.client.HTTPConnection:
        """A fresh keep-alive connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        connection.connect()
        return connection

    def ask(self, request: Request) -> Answer:
        """One request on a connection of its own."""
        with contextlib.closing(self.connect()) as connection:
            return send(connection, request)

    def check(self, request: Request, expected: Array) -> None:
        """A server that answers wrongly is not worth measuring. Raises BenchmarkError."""
        answer = self.ask(request)
        if answer.status != 200:
            raise BenchmarkError(f"{self.kind.name} answers {answer.status}: {answer.body[:300]!r}")
        row = self.kind.row_of(answer)
        if row.shape != expected.shape or not np.allclose(row, expected, rtol=1e-3, atol=1e-4):
            raise BenchmarkError(f"{self.kind.name} answers {row[:4]}…, expected {expected[:4]}…")

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        command = pinned(self.core, self.kind.command(self.launch))
        # A session of its own keeps a terminal's Ctrl-C away from the server: it is ended by _stop.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        give_up = time.monotonic() + START_TIMEOUT_S
        while not self.kind.ready(self.port):
            if self._process.poll() is not None:
                raise BenchmarkError(f"{self.kind.name} ended with status {self._process.returncode} at start{self._said()}")
            if time.monotonic() > give_up:
                raise BenchmarkError(f"{self.kind.name} was not ready within {START_TIMEOUT_S:g} s{self._said()}")
            time.sleep(READY_PAUSE_S)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except BaseException as error:
                _kill_group(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
        if self._output is not None:
            self._output.close()
            self._output = None

    def _said(self) -> str:
        if self._output is None:
            return ""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        return f"; it printed:\n{text[-4000:]}" if text else "; it printed nothing"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
