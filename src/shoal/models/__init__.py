"""Models that are shipped inside the package, as data, and where to find them. How they were trained is in `training/`.

No model code and no loading here: that is the business of `backends/`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["digits_path", "digits_samples_path"]


def digits_path() -> Path:
    """The embedded `digits` model: `image` FP32 [N,1,8,8], pixel values 0…16, to `logits` FP32 [N,10]."""
    return _data("digits.onnx")


def digits_samples_path() -> Path:
    """A JSON list of held-out images: `[{"label": 7, "pixels": [64 integers 0…16, row by row]}, …]`."""
    return _data("digits_samples.json")


def _data(name: str) -> Path:
    # ONNX Runtime opens files by path, so the package must be unpacked on disk, which is how wheels are installed.
    return Path(str(files(__name__).joinpath(name)))
