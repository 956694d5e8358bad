"""Classifies handwritten digits with an unmodified tritonclient. Start the server first: make run"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.http as triton
from sklearn.datasets import load_digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8000", help="host and port of the server")
    parser.add_argument("--count", type=int, default=8, help="how many images to classify, in one request")
    options = parser.parse_args()

    digits = load_digits()
    pixels = digits.images[-options.count :].astype(np.float32)[:, np.newaxis]  # [N, 1, 8, 8], values 0…16
    labels = digits.target[-options.count :]

    with triton.InferenceServerClient(options.url) as client:
        image = triton.InferInput("image", list(pixels.shape), "FP32")
        image.set_data_from_numpy(pixels)
        logits = client.infer("digits", [image]).as_numpy("logits")

    predicted = logits.argmax(axis=1)
    print("predicted", predicted.tolist())
    print("true     ", labels.tolist())
    print(f"{(predicted == labels).sum()} of {len(labels)} right")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConnectionError as problem:
        raise SystemExit(f"{problem}. Is the server running (make run)?") from None
