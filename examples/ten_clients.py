"""Ten clients, each with a connection of its own, knowing nothing of each other; the server runs their requests together.

Start the server first: make run. Then this prints how many tensor operations the server needed for all requests. Encoding and
decoding are tritonclient's own (its `generate_request_body` and `parse_response_body`), done before and after the exchange, so that
Python's one-thread-at-a-time does not spread out what should arrive together.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
from typing import Any

import numpy as np
import tritonclient.http as triton
from sklearn.datasets import load_digits

CLIENTS = 10


def statistics(address: str) -> dict[str, Any]:
    """The server's own counts for the model."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v2/models/digits/stats")
    counts: dict[str, Any] = json.loads(connection.getresponse().read())["model_stats"][0]
    connection.close()
    return counts


class Client(threading.Thread):
    """Sends its images one by one, each as a request of one row, and remembers the answers."""

    def __init__(self, address: str, images: np.ndarray[Any, Any], together: threading.Barrier) -> None:
        super().__init__()
        self.connection = http.client.HTTPConnection(address, timeout=30)
        self.together = together
        self.bodies = []
        self.answers: list[int] = []
        self.problem: Exception | None = None
        for image in images:
            tensor = triton.InferInput("image", [1, 1, 8, 8], "FP32")
            tensor.set_data_from_numpy(image[np.newaxis, np.newaxis])
            self.bodies.append(triton.InferenceServerClient.generate_request_body([tensor]))

    def run(self) -> None:
        try:
            self.connection.connect()
            for body, json_bytes in self.bodies:
                self.together.wait()
                self.connection.request(
                    "POST", "/v2/models/digits/infer", body, {"Inference-Header-Content-Length": str(json_bytes)}
                )
                response = self.connection.getresponse()
                content = response.read()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {content.decode()}")
                length = response.getheader("Inference-Header-Content-Length")
                result = triton.InferenceServerClient.parse_response_body(content, header_length=int(length) if length else None)
                self.answers.append(int(result.as_numpy("logits").argmax()))
        except Exception as problem:
            self.problem = problem
            self.together.abort()
        finally:
            self.connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="127.0.0.1:8000", help="host and port of the server")
    parser.add_argument("--rounds", type=int, default=50, help="requests of each client")
    options = parser.parse_args()

    digits = load_digits()
    total = CLIENTS * options.rounds
    chosen = np.arange(total) % len(digits.images)
    images = digits.images[chosen].astype(np.float32)
    labels = digits.target[chosen]

    together = threading.Barrier(CLIENTS)
    clients = [Client(options.url, images[number::CLIENTS], together) for number in range(CLIENTS)]
    before = statistics(options.url)
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    # Those who waited for a client that failed saw only a broken barrier.
    problems = [client.problem for client in clients if client.problem is not None]
    if problems:
        print("failed:", next((p for p in problems if not isinstance(p, threading.BrokenBarrierError)), problems[0]))
        return 1
    after = statistics(options.url)

    right = sum(int((np.array(client.answers) == labels[number::CLIENTS]).sum()) for number, client in enumerate(clients))
    rows = after["inference_count"] - before["inference_count"]
    runs = after["execution_count"] - before["execution_count"]
    print(f"{CLIENTS} clients, {total} requests, {right} digits right")
    print(f"{rows} rows in {runs} tensor operations: mean batch {rows / runs:.2f}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConnectionError as problem:
        raise SystemExit(f"{problem}. Is the server running (make run)?") from None
