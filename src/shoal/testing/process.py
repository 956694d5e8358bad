"""`shoal serve` as a process of its own, for tests of signals, start-up lines and exit statuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

__all__ = ["ServingProcess", "serving"]

_SAFETY_SECONDS = 60.0


class ServingProcess:
    """A running server. `lines` are those of its standard output that were read so far; `port` its HTTP port."""

    def __init__(self, arguments: list[str], cpus: Collection[int] | None) -> None:
        command = [sys.executable, "-m", "shoal.cli", "serve", *arguments]
        own = os.sched_getaffinity(0)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)  # inherited
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        finally:
            if cpus is not None:
                os.sched_setaffinity(0, own)
        self.lines: list[str] = []
        self.port = 0

    def wait_line(self, beginning: str) -> str:
        """Read standard output until a line begins like this. Raises AssertionError when the process ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return self.lines[-1]
        error = self._process.stderr.read() if self._process.stderr is not None else ""
        raise AssertionError(f"no line begins with {beginning!r}: {self.lines}\n{error}")

    def signal(self, name: str) -> None:
        """Send a signal, `SIGTERM` for example."""
        self._process.send_signal(signal.Signals[name])

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.signal("SIGTERM")

    def wait(self) -> int:
        """The exit status, when the process has ended; the rest of its output is in `lines`."""
        out, _ = self._process.communicate(timeout=_SAFETY_SECONDS)
        self.lines += out.splitlines()
        return self._process.returncode

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()


@contextmanager
def serving(*arguments: str, cpus: Collection[int] | None = None) -> Iterator[ServingProcess]:
    """Run `shoal serve` with these arguments until the block ends, on these CPUs; the server is ready when it begins."""
    process = ServingProcess(list(arguments), cpus)
    try:
        line = process.wait_line("http listening on ")
        match = re.search(r":(\d+)$", line)
        assert match is not None, line
        process.port = int(match.group(1))
        process.wait_line("threads:")
        yield process
    finally:
        process.end()
