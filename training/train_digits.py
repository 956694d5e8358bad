"""Trains the embedded `digits` model and writes it into the package: `python training/train_digits.py`.

A small convolutional network for 8x8 handwritten digits, trained on scikit-learn's copy of the UCI optical digits with numpy
alone: forward and backward passes, Adam and augmentation are below. It needs numpy, scikit-learn (for the data) and onnx (to
write the file). Seeded: the same versions on the same machine write the same file. The held-out images take no part in training,
nor in choosing anything; they are measured once, at the end, and by the tests on the written file. One run takes about 20 s.

    image [N,1,8,8] ÷ 16 → conv 3x3, 16 → relu → conv 3x3, 32 → relu → max pool 2x2 → dense 64 → relu → dense 10 → logits
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SPLIT_SEED: Final = 20240607
HELD_OUT_SHARE: Final = 0.2
TRAINING_SEED: Final = 1
CHANNELS: Final = (16, 32)
HIDDEN: Final = 64
SAMPLES_PER_DIGIT: Final = 2
PACKAGE_DATA: Final = Path(__file__).resolve().parent.parent / "src" / "shoal" / "models"

Array = np.ndarray
Parameters = dict[str, np.ndarray]


def split() -> tuple[Array, Array, Array, Array]:
    """Training images, held-out images (both `(n, 1, 8, 8)` float32, values 0…16), and their labels; stratified and seeded."""
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None]
    parts = train_test_split(
        images, digits.target.astype(np.int64), test_size=HELD_OUT_SHARE, random_state=SPLIT_SEED, stratify=digits.target
    )
    return parts[0], parts[1], parts[2], parts[3]


def initial(random: np.random.Generator) -> Parameters:
    """He initialisation: normal with variance 2 ÷ fan-in, biases zero."""
    first, second = CHANNELS
    shapes = {"w1": (first, 1, 3, 3), "w2": (second, first, 3, 3), "w3": (second * 16, HIDDEN), "w4": (HIDDEN, 10)}
    parameters: Parameters = {}
    for name, shape in shapes.items():
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        parameters[name] = (random.standard_normal(shape) * np.sqrt(2.0 / fan_in)).astype(np.float32)
        parameters["b" + name[1]] = np.zeros(shape[0] if len(shape) == 4 else shape[1], np.float32)
    return parameters


def columns(images: Array) -> Array:
    """3x3 neighbourhoods, zeros around the edge: `(n, c, 8, 8)` to `(n · 64, c · 9)`."""
    count, channels = images.shape[:2]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1, 4, 5)).reshape(count * 64, channels * 9)


def images_of(gradient: Array, count: int, channels: int) -> Array:
    """The transpose of `columns`: each neighbourhood's gradient added to the pixels that it was taken from."""
    windows = gradient.reshape(count, 8, 8, channels, 3, 3).transpose(0, 3, 4, 5, 1, 2)
    padded = np.zeros((count, channels, 10, 10), gradient.dtype)
    for row in range(3):
        for column in range(3):
            padded[:, :, row : row + 8, column : column + 8] += windows[:, :, row, column]
    return padded[:, :, 1:9, 1:9]


def forward_backward(parameters: Parameters, images: Array, targets: Array, keep: Array) -> tuple[float, Parameters]:
    """Mean cross-entropy against target probabilities `(n, 10)`, and its gradients; `keep` is the hidden layer's dropout mask."""
    p, count = parameters, len(images)
    first, second = CHANNELS
    columns_1 = columns(images / 16.0)
    a1 = np.maximum(columns_1 @ p["w1"].reshape(first, -1).T + p["b1"], 0)
    columns_2 = columns(a1.reshape(count, 8, 8, first).transpose(0, 3, 1, 2))
    a2 = np.maximum(columns_2 @ p["w2"].reshape(second, -1).T + p["b2"], 0)
    blocks = a2.reshape(count, 4, 2, 4, 2, second).transpose(0, 5, 1, 3, 2, 4).reshape(count, second, 4, 4, 4)
    winner = blocks.argmax(axis=-1)[..., None]
    flat = np.take_along_axis(blocks, winner, axis=-1).reshape(count, -1)
    a3 = np.maximum(flat @ p["w3"] + p["b3"], 0)
    dropped = a3 * keep
    logits = dropped @ p["w4"] + p["b4"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -float((targets * log_probabilities).sum() / count)

    g: Parameters = {}
    d_logits = (np.exp(log_probabilities) - targets) / count
    g["w4"], g["b4"] = dropped.T @ d_logits, d_logits.sum(axis=0)
    d3 = d_logits @ p["w4"].T * keep * (a3 > 0)
    g["w3"], g["b3"] = flat.T @ d3, d3.sum(axis=0)
    d_blocks = np.zeros_like(blocks)
    np.put_along_axis(d_blocks, winner, (d3 @ p["w3"].T).reshape(count, second, 4, 4, 1), axis=-1)
    d2 = d_blocks.reshape(count, second, 4, 4, 2, 2).transpose(0, 2, 4, 3, 5, 1).reshape(count * 64, second) * (a2 > 0)
    g["w2"], g["b2"] = (d2.T @ columns_2).reshape(p["w2"].shape), d2.sum(axis=0)
    d_a1 = images_of(d2 @ p["w2"].reshape(second, -1), count, first)
    d1 = d_a1.transpose(0, 2, 3, 1).reshape(count * 64, first) * (a1 > 0)
    g["w1"], g["b1"] = (d1.T @ columns_1).reshape(p["w1"].shape), d1.sum(axis=0)
    return loss, g


def augmented(images: Array, random: np.random.Generator) -> Array:
    """Each image moved, turned, sheared and scaled a little, each in its own way (bilinear), and its ink made darker or lighter."""
    count = len(images)
    angle = random.uniform(-0.2, 0.2, count)
    shear = random.uniform(-0.2, 0.2, count)
    scale_x, scale_y = random.uniform(0.88, 1.12, (2, count))
    shift_x, shift_y = random.uniform(-0.7, 0.7, (2, count))
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = np.meshgrid(np.arange(8) - 3.5, np.arange(8) - 3.5)
    along, across = (x[None] + shear[:, None, None] * y[None]) * scale_x[:, None, None], y[None] * scale_y[:, None, None]
    from_x = cos[:, None, None] * along - sin[:, None, None] * across + 3.5 + shift_x[:, None, None]
    from_y = sin[:, None, None] * along + cos[:, None, None] * across + 3.5 + shift_y[:, None, None]
    padded = np.pad(images[:, 0], ((0, 0), (2, 2), (2, 2)))
    left, top = np.floor(from_x).astype(int), np.floor(from_y).astype(int)
    right_share, bottom_share = from_x - left, from_y - top
    which = np.arange(count)[:, None, None]

    def pixel(row: Array, column: Array) -> Array:
        return padded[which, np.clip(row + 2, 0, 11), np.clip(column + 2, 0, 11)]

    upper = pixel(top, left) * (1 - right_share) + pixel(top, left + 1) * right_share
    lower = pixel(top + 1, left) * (1 - right_share) + pixel(top + 1, left + 1) * right_share
    ink = random.uniform(0.9, 1.1, (count, 1, 1))
    moved = np.clip((upper * (1 - bottom_share) + lower * bottom_share) * ink, 0, 16)
    return moved.astype(np.float32)[:, None]


def train(images: Array, labels: Array, epochs: int, batch: int = 64) -> Parameters:
    """Adam with a cosine schedule, label smoothing and dropout. Returns the weights averaged over the last quarter."""
    random = np.random.default_rng(TRAINING_SEED)
    parameters = initial(random)
    momentum = {name: np.zeros_like(value) for name, value in parameters.items()}
    variance = {name: np.zeros_like(value) for name, value in parameters.items()}
    averaged = {name: np.zeros_like(value, dtype=np.float64) for name, value in parameters.items()}
    smooth = np.full((10, 10), 0.05 / 9, np.float32) + np.eye(10, dtype=np.float32) * (0.95 - 0.05 / 9)
    steps_per_epoch = len(images) // batch
    total, step, counted = epochs * steps_per_epoch, 0, 0
    for epoch in range(epochs):
        order = random.permutation(len(images))
        moved = augmented(images[order], random)
        loss_sum = 0.0
        for start in range(0, steps_per_epoch * batch, batch):
            step += 1
            keep = (random.random((batch, HIDDEN)) < 0.75).astype(np.float32) / np.float32(0.75)
            targets = smooth[labels[order[start : start + batch]]]
            loss, gradients = forward_backward(parameters, moved[start : start + batch], targets, keep)
            loss_sum += loss
            rate = 3e-3 * 0.5 * (1 + np.cos(np.pi * step / total)) + 1e-5
            for name, gradient in gradients.items():
                momentum[name] += 0.1 * (gradient - momentum[name])
                variance[name] += 0.001 * (gradient**2 - variance[name])
                direction = momentum[name] / (1 - 0.9**step) / (np.sqrt(variance[name] / (1 - 0.999**step)) + 1e-8)
                parameters[name] -= (rate * (direction + 1e-2 * parameters[name])).astype(np.float32)
            if step > total * 3 // 4:
                counted += 1
                for name, value in parameters.items():
                    averaged[name] += value
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss_sum / steps_per_epoch:.4f}")
    return {name: (value / counted).astype(np.float32) for name, value in averaged.items()}


def onnx_model(parameters: Parameters) -> onnx.ModelProto:
    """The network as ONNX, opset 17, IR version 8, so that every ONNX Runtime from 1.11 on opens it. Scaling is inside."""
    p = dict(parameters)
    p["w1"] = p["w1"] / np.float32(16)  # exact: a power of two; the model takes pixel values 0…16
    p["flat"] = np.array([0, CHANNELS[1] * 16], np.int64)
    pads = [1, 1, 1, 1]
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["conv1"], kernel_shape=[3, 3], pads=pads),
        helper.make_node("Relu", ["conv1"], ["relu1"]),
        helper.make_node("Conv", ["relu1", "w2", "b2"], ["conv2"], kernel_shape=[3, 3], pads=pads),
        helper.make_node("Relu", ["conv2"], ["relu2"]),
        helper.make_node("MaxPool", ["relu2"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["pool", "flat"], ["features"]),
        helper.make_node("Gemm", ["features", "w3", "b3"], ["dense"]),
        helper.make_node("Relu", ["dense"], ["relu3"]),
        helper.make_node("Gemm", ["relu3", "w4", "b4"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value, name) for name, value in p.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="shoal")
    model.ir_version = 8
    helper.set_model_props(model, {"shoal.labels": json.dumps({"logits": [str(digit) for digit in range(10)]})})
    onnx.checker.check_model(model, full_check=True)
    return model


def samples(images: Array, labels: Array) -> list[dict[str, object]]:
    """The first held-out images of each digit, for examples and documentation."""
    chosen = [index for digit in range(10) for index in np.flatnonzero(labels == digit)[:SAMPLES_PER_DIGIT]]
    return [{"label": int(labels[index]), "pixels": images[index].astype(int).reshape(-1).tolist()} for index in chosen]


def accuracy(parameters: Parameters, images: Array, labels: Array) -> float:
    """Share of the images whose largest logit, computed with numpy, is that of the label."""
    first, second = CHANNELS
    p, count = parameters, len(images)
    a1 = np.maximum(columns(images / 16.0) @ p["w1"].reshape(first, -1).T + p["b1"], 0)
    a2 = np.maximum(columns(a1.reshape(count, 8, 8, first).transpose(0, 3, 1, 2)) @ p["w2"].reshape(second, -1).T + p["b2"], 0)
    pooled = a2.reshape(count, 4, 2, 4, 2, second).max(axis=(2, 4)).transpose(0, 3, 1, 2).reshape(count, -1)
    logits = np.maximum(pooled @ p["w3"] + p["b3"], 0) @ p["w4"] + p["b4"]
    return float((logits.argmax(axis=1) == labels).mean())


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description="Train the embedded digits model and write it into the package.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=PACKAGE_DATA, help="folder to write digits.onnx and digits_samples.json into")
    options = parser.parse_args()
    train_images, test_images, train_labels, test_labels = split()
    started = time.process_time()
    parameters = train(train_images, train_labels, options.epochs)
    print(f"trained on {len(train_images)} images in {time.process_time() - started:.0f} s of CPU")
    held_out = accuracy(parameters, test_images, test_labels)
    print(f"accuracy: training {accuracy(parameters, train_images, train_labels):.4f}, {len(test_images)} held out {held_out:.4f}")
    data = onnx_model(parameters).SerializeToString(deterministic=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "digits.onnx").write_bytes(data)
    (options.out / "digits_samples.json").write_text(json.dumps(samples(test_images, test_labels)) + "\n")
    print(f"wrote {options.out / 'digits.onnx'} ({len(data)} bytes)")


if __name__ == "__main__":
    main()
