"""The examples do what they say, against a real server where they need one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
from sklearn.datasets import load_digits

from shoal.backends.registry import open_backend
from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.testing.server import ThreadedServer, local_settings, running_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """The example as a module, read afresh."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    """The embedded model. Ten rows are a full batch and go at once; less than ten wait so long that nobody misses their batch."""
    digits = ModelSettings(path="digits", batching=BatchingSettings(max_batch_size=10, max_delay_ms=1000))
    with running_server(local_settings({"digits": digits})) as running:
        yield running


def test_ten_clients_are_answered_from_one_tensor_operation(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten separate connections, each sending one row at a time: every answer right, far fewer runs than requests."""
    monkeypatch.setattr(sys, "argv", ["ten_clients.py", "--url", server.url, "--rounds", "5"])
    assert example("ten_clients").main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "10 clients, 50 requests, 50 digits right",
        "50 rows in 5 tensor operations: mean batch 10.00",
    ]


def test_tritonclient_classifies_real_images(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unmodified client's answers are the data set's labels."""
    monkeypatch.setattr(sys, "argv", ["classify_tritonclient.py", "--url", server.url, "--count", "10"])
    assert example("classify_tritonclient").main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "10 of 10 right"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_classifies_a_real_image(server: ThreadedServer) -> None:
    """The picture in the script is image 1750 of the data set and in the README, and the answer names its digit."""
    script = (EXAMPLES / "classify_curl.sh").read_text()
    done = subprocess.run(
        ["sh", EXAMPLES / "classify_curl.sh", f"http://{server.url}"], capture_output=True, text=True, check=True, timeout=60
    )
    (output,) = json.loads(done.stdout)["outputs"]
    digits = load_digits()
    assert [text.split(":")[1] for text in output["data"]] == [str(digits.target[1750])] == ["3"]
    picture = script[script.index('"data": [') + len('"data": [') : script.index("]}]")]
    assert [int(pixel) for pixel in picture.split(",")] == digits.data[1750].astype(int).tolist()
    assert picture in (EXAMPLES.parent / "README.md").read_text()


def test_the_python_models_compute_what_they_say() -> None:
    """Both models of the example load by the convention and give the right values."""
    standardize = open_backend(f"{EXAMPLES}/python_model.py:Standardize")
    z, largest = standardize.run([np.array([[5.8, 3.1, 3.8, 1.2], [6.6, 3.1, 0.2, 1.2]], np.float32)])
    np.testing.assert_allclose(z, [[0, 0, 0, 0], [1, 0, -2, 0]], atol=1e-5)
    np.testing.assert_allclose(largest, [[0], [2]], atol=1e-5)
    length = open_backend(f"{EXAMPLES}/python_model.py:vector_length")
    (lengths,) = length.run([np.array([[3, 4, 0], [1, 2, 2]], np.float32)])
    np.testing.assert_allclose(lengths, [[5], [3]], rtol=1e-6)


def test_the_fastapi_application_batches_its_callers() -> None:
    """Requests that come at the same time are classified rightly, in fewer runs of the model than there are images."""
    app = example("fastapi_app").app
    digits = load_digits()

    async def scenario() -> tuple[list[int], dict[str, int], int]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
        ):
            answers = await asyncio.gather(
                *(client.post("/classify", json={"pixels": pixels.tolist()}) for pixels in digits.data[-30:])
            )
            wrong = await client.post("/classify", json={"pixels": [0]})
            counts = (await client.get("/batches")).json()
            return [answer.json()["digit"] for answer in answers], counts, wrong.status_code

    found, counts, wrong = asyncio.run(scenario())
    assert found == digits.target[-30:].tolist()
    assert counts["images"] == 30
    assert counts["runs"] < 30
    assert wrong == 422
