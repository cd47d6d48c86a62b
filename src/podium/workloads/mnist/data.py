"""Finds and loads MNIST-like files: 28 × 28 grey images and their labels, in IDX form, in one folder."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from podium.data.formats.idx import read_idx
from podium.data.source import Field, Source
from podium.data.sources.arrays import ArraySource
from podium.data.sources.generated import GeneratedSource
from podium.errors import UserError
from podium.machine.cache_folder import cache_folder

#: the fields delivered: normalised images with a channel dimension, class numbers
FIELDS = {"image": Field((1, 28, 28), np.float32), "label": Field((), np.int64)}
#: of MNIST's training images, as fractions of full brightness; also used for similar data sets
MEAN, STD = 0.1307, 0.3081

_FILE_PREFIX = {"train": "train", "test": "t10k"}
_SCALE = np.float32(1.0 / (255.0 * STD))
_SHIFT = np.float32(MEAN / STD)


def default_folder() -> Path:
    """Return the folder in which `podium data fetch mnist` puts the files."""
    return cache_folder("data", "mnist")


def load_images_and_labels(folder: Path | None, part: str, num_classes: int) -> tuple[NDArray, NDArray]:
    """Load images (samples, 1, 28, 28) of uint8 and labels (samples,) of int64; `part` is `train` or `test`."""
    images_path = _find(folder, f"{_FILE_PREFIX[part]}-images", "idx3-ubyte")
    labels_path = _find(folder, f"{_FILE_PREFIX[part]}-labels", "idx1-ubyte")
    images = read_idx(images_path, shape=(None, 28, 28), dtype=np.uint8)
    labels = read_idx(labels_path, shape=(None,), dtype=np.uint8)
    if len(images) != len(labels):
        raise UserError(
            f"{images_path} holds {len(images):,} images but {labels_path.name} beside it {len(labels):,} labels: "
            f"they do not belong together"
        )
    if len(labels) and labels.max() >= num_classes:
        raise UserError(
            f"workload.model.num_classes = {num_classes}: expected more than {labels.max()}, the largest label in "
            f"{labels_path}"
        )
    return images[:, None], labels.astype(np.int64)


def array_source(images: NDArray, labels: NDArray) -> Source:
    """Return a source of images kept as bytes in memory and normalised on delivery."""
    return ArraySource({"image": images, "label": labels}, FIELDS, {"image": _normalise})


def generated_source(samples: range, num_classes: int, seed: int) -> Source:
    """Return random images and labels of the right shapes and types: those with the numbers `samples`."""
    ranges = {"label": (0, num_classes)}
    return GeneratedSource(FIELDS, len(samples), ranges=ranges, seed=seed, first_sample=samples.start)


def _normalise(images: NDArray, out: NDArray) -> None:
    # Two passes over a block that fits into the cache are twice as fast as a 256-entry table, whose indices numpy
    # first widens to eight bytes each.
    np.multiply(images, _SCALE, out=out)
    np.subtract(out, _SHIFT, out=out)


def _find(folder: Path | None, stem: str, kind: str) -> Path:
    """Return the file under any of its published names; plain before compressed, as it opens faster."""
    place = folder or default_folder()
    for suffix in ("", ".gz"):
        for separator in "-.":
            path = place / f"{stem}{separator}{kind}{suffix}"
            if path.is_file():
                return path
    if folder is None:
        raise UserError(
            f"there is no {stem}-{kind} in {place}: run `podium data fetch mnist`, or point workload.data.path at a "
            f"folder that holds the files"
        )
    if not folder.is_dir():
        raise UserError(f"workload.data.path = {folder}: expected a folder that exists")
    raise UserError(f"there is no {stem}-{kind} (plain or .gz) in {folder}, where workload.data.path points")
