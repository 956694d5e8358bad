"""The yardstick: the least code that batches dynamically over HTTP.

No validation, no limits, no errors: one fixed tensor per request, one queue, one worker thread, answers as soon as a batch
ends. Benchmarks run it beside Shoal in the same session and print the ratio, because absolute times drift between machines.
Nothing here may be imported by the package.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import signal
import threading
from typing import Any

import httptools
import numpy as np
import onnxruntime
import uvloop


class Batcher:
    """Collects bodies, runs them together in one worker thread, calls back on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: Any, row_items: int, max_batch: int) -> None:
        self.loop, self.session, self.row_items, self.max_batch = loop, session, row_items, max_batch
        self.input_name = session.get_inputs()[0].name
        self.waiting: list[tuple[Any, Any]] = []
        self.busy = False
        self.scheduled = False
        self.buffer = np.empty((max_batch, row_items), dtype=np.float32)
        self.view = memoryview(self.buffer).cast("B")
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, connection: Any, body: Any) -> None:
        self.waiting.append((connection, body))
        if not self.busy and not self.scheduled:
            self.scheduled = True
            self.loop.call_soon(self.dispatch)

    def dispatch(self) -> None:
        self.scheduled = False
        if self.busy or not self.waiting:
            return
        batch, self.waiting = self.waiting[: self.max_batch], self.waiting[self.max_batch :]
        self.busy = True
        self.jobs.put(batch)

    def work(self) -> None:
        row_bytes = self.row_items * 4
        while True:
            batch = self.jobs.get()
            for index, (_, body) in enumerate(batch):
                self.view[index * row_bytes : (index + 1) * row_bytes] = body
            (output,) = self.session.run(None, {self.input_name: self.buffer[: len(batch)]})
            self.loop.call_soon_threadsafe(self.finish, batch, output)

    def finish(self, batch: list[tuple[Any, Any]], output: Any) -> None:
        self.busy = False
        if self.waiting:
            self.dispatch()
        size = output.nbytes // len(batch)
        data = memoryview(np.ascontiguousarray(output)).cast("B")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
        for index, (connection, _) in enumerate(batch):
            connection.transport.write(b"".join((head, data[index * size : (index + 1) * size])))


class Connection(asyncio.BufferedProtocol):
    """One keep-alive connection; large bodies are read straight into their buffer."""

    buffer = bytearray(65536)
    window = memoryview(buffer)

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.parser = httptools.HttpRequestParser(self)
        self.body: Any = b""
        self.length = 0
        self.target: memoryview | None = None
        self.filled = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, hint: int) -> memoryview:
        return self.window if self.target is None else self.target[self.filled :]

    def buffer_updated(self, count: int) -> None:
        if self.target is None:
            self.parser.feed_data(self.window[:count])
            return
        self.filled += count
        if self.filled == self.length:
            body, self.target = self.body, None
            self.parser = httptools.HttpRequestParser(self)
            self.batcher.submit(self, body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"Content-Length":
            self.length = int(value)

    def on_body(self, chunk: bytes) -> None:
        if len(chunk) == self.length:
            self.body = chunk
            return
        self.body = bytearray(self.length)
        self.target = memoryview(self.body)
        self.target[: len(chunk)] = chunk
        self.filled = len(chunk)

    def on_message_complete(self) -> None:
        if self.target is None:
            self.batcher.submit(self, self.body)


async def serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(arguments.model, options, providers=["CPUExecutionProvider"])
    batcher = Batcher(loop, session, arguments.row_items, arguments.max_batch_size)
    server = await loop.create_server(lambda: Connection(batcher), "127.0.0.1", arguments.port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print("ready", flush=True)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--row-items", type=int, required=True)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--port", type=int, default=8100)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
