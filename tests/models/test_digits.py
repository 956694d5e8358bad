"""The embedded model and the script that made it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shoal.backends.probe import probe
from shoal.backends.registry import open_backend
from shoal.datatypes import TensorSpec
from shoal.models import digits_path, digits_samples_path


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The training script as a module."""
    path = Path(__file__).parents[2] / "training" / "train_digits.py"
    spec = importlib.util.spec_from_file_location("train_digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_description_is_the_documented_one() -> None:
    """`image` FP32 [N,1,8,8] to `logits` FP32 [N,10], with the digits as labels."""
    spec = open_backend("digits").spec
    assert spec.inputs == (TensorSpec("image", "FP32", (-1, 1, 8, 8)),)
    assert spec.outputs == (TensorSpec("logits", "FP32", (-1, 10)),)
    assert spec.batchable
    assert spec.labels == {"logits": tuple("0123456789")}


def test_it_is_right_on_at_least_97_percent_of_the_held_out_images(training: ModuleType) -> None:
    """360 images that took no part in training, in one batch; and the shipped file is the one that this split was held out from."""
    _, images, _, labels = training.split()
    assert images.shape == (360, 1, 8, 8)
    assert images.min() >= 0
    assert images.max() == 16
    (logits,) = open_backend("digits").run([images])
    assert (logits.argmax(axis=1) == labels).mean() >= 0.97


def test_every_held_out_image_alone_gets_the_answer_that_it_gets_in_company(training: ModuleType) -> None:
    """Batch invariance: within 1e-4 of the largest logit, and the same digit."""
    _, images, _, _ = training.split()
    backend = open_backend("digits")
    (together,) = backend.run([images])
    alone = np.concatenate([backend.run([images[row : row + 1]])[0] for row in range(len(images))])
    assert np.abs(alone - together).max() <= 1e-4 * np.abs(together).max()
    assert (alone.argmax(axis=1) == together.argmax(axis=1)).all()


def test_it_passes_the_probe() -> None:
    """With the default maximum of 64 rows, without a warning."""
    report = probe(open_backend("digits"), 64)
    assert (report.batchable, report.reason, report.deterministic, report.warnings) == (True, None, True, ())


def test_the_samples_are_held_out_images_and_are_classified_rightly(training: ModuleType) -> None:
    """Two of each digit, as integers 0…16, for examples: none is in the training part, and the model knows them all."""
    samples = json.loads(digits_samples_path().read_text())
    assert sorted(sample["label"] for sample in samples) == sorted(list(range(10)) * 2)
    pixels = np.array([sample["pixels"] for sample in samples], np.float32)
    assert pixels.shape == (20, 64)
    train_images, held_out, _, _ = training.split()
    known = {row.tobytes() for row in train_images.reshape(-1, 64)}
    assert not any(row.tobytes() in known for row in pixels)
    assert all(row.tobytes() in {image.tobytes() for image in held_out.reshape(-1, 64)} for row in pixels)
    (logits,) = open_backend("digits").run([pixels.reshape(-1, 1, 8, 8)])
    assert logits.argmax(axis=1).tolist() == [sample["label"] for sample in samples]


def test_the_file_is_small() -> None:
    """It is part of every installation: under 200 KB."""
    assert digits_path().stat().st_size < 200_000


def test_the_scripts_gradients_are_those_of_its_loss(training: ModuleType) -> None:
    """Backward against central differences in double precision, for weights and biases of every layer."""
    random = np.random.default_rng(5)
    parameters = {name: value.astype(np.float64) for name, value in training.initial(random).items()}
    for name in ("b1", "b2", "b3", "b4"):
        parameters[name] = random.normal(0, 0.1, parameters[name].shape)
    images = random.uniform(0, 16, (3, 1, 8, 8))
    targets = np.eye(10)[[1, 5, 9]]
    keep = np.ones((3, training.HIDDEN))
    _, gradients = training.forward_backward(parameters, images, targets, keep)
    step = 1e-6
    for name, value in parameters.items():
        for index in random.integers(0, value.size, 4):
            place = np.unravel_index(index, value.shape)
            kept, losses = value[place], []
            for sign in (1, -1):
                value[place] = kept + sign * step
                losses.append(training.forward_backward(parameters, images, targets, keep)[0])
            value[place] = kept
            assert gradients[name][place] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-7), name


def test_the_script_writes_what_it_computes(training: ModuleType, tmp_path: Path) -> None:
    """The ONNX graph of untrained weights classifies exactly as the script's own forward pass does."""
    parameters = training.initial(np.random.default_rng(9))
    _, images, _, _ = training.split()
    path = tmp_path / "untrained.onnx"
    path.write_bytes(training.onnx_model(parameters).SerializeToString())
    (logits,) = open_backend(str(path)).run([images])
    assert training.accuracy(parameters, images, logits.argmax(axis=1)) == 1.0
