"""CIFAR-10 and CIFAR-100 in their binary form: rows of label bytes and a 32 × 32 image, plane by plane."""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_limited
from podium.machine.cache_folder import cache_folder

Kind = Literal["cifar10", "cifar100"]

SIZE = 32
_PIXELS = 3 * SIZE * SIZE
#: several times what any of the published files has
_MAX_BYTES = 1 << 30
#: rows that are looked at to tell a file from others of its name
_LOOKED_AT = 1000
#: what the published archives call their folder
_ARCHIVE: dict[Kind, str] = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
#: files of the training and the test set, label bytes before each image (the last one is used), classes
_LAYOUT: dict[Kind, tuple[tuple[str, ...], tuple[str, ...], int, int]] = {
    "cifar10": (tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",), 1, 10),
    "cifar100": (("train.bin",), ("test.bin",), 2, 100),
}


def num_classes(kind: Kind) -> int:
    return _LAYOUT[kind][3]


def file_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all files of a set."""
    train, test, _, _ = _LAYOUT[kind]
    return (*train, *test)


def kind_in(folder: Path) -> Kind | None:
    """Return which of the sets a folder contains, itself or in the folder of a published archive."""
    return next((kind for kind in _LAYOUT if (place_of(folder, kind) / file_names(kind)[0]).is_file()), None)


def place_of(folder: Path, kind: Kind) -> Path:
    """Return where the files of a set are: in the folder of the published archive if there is one, else in `folder`."""
    return folder / _ARCHIVE[kind] if (folder / _ARCHIVE[kind]).is_dir() else folder


def kind_of_file(path: Path) -> Kind | None:
    """Return which set a file belongs to, by its name and its rows: other files may be called `train.bin` as well."""
    size = path.stat().st_size
    for kind, (_, _, num_labels, classes) in _LAYOUT.items():
        row = num_labels + _PIXELS
        if path.name in file_names(kind) and size and size % row == 0:
            rows = np.memmap(path, np.uint8, "r").reshape(-1, row)
            if rows[:_LOOKED_AT, num_labels - 1].max() < classes:
                return kind
    return None


def load(
    folder: Path | None, kind: Kind, part: Literal["train", "test"]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Load (images (n, 32, 32, 3), labels) of one part, from a folder or from where `podium data fetch` puts them."""
    where = place_of(folder, kind) if folder else cache_folder("data", kind)
    train, test, _, _ = _LAYOUT[kind]
    hint = "" if folder else f": run `podium data fetch {kind}`"
    parts = [load_file(where / name, kind, hint) for name in (train if part == "train" else test)]
    images, labels = zip(*parts, strict=True)
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)


def load_file(path: Path, kind: Kind, hint: str = "") -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Load (images (n, 32, 32, 3), labels) of one file; `hint` follows the message that it is missing."""
    _, _, num_labels, classes = _LAYOUT[kind]
    try:
        data = np.frombuffer(read_limited(path, _MAX_BYTES), np.uint8)
    except FileNotFoundError:
        raise UserError(f"{path} is missing{hint}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from error
    row = num_labels + _PIXELS
    if not len(data) or len(data) % row:
        raise UserError(f"{path} is not a {kind} file: {len(data):,} bytes do not divide into rows of {row} bytes")
    rows = data.reshape(-1, row)
    found = rows[:, num_labels - 1]
    if found.max() >= classes:
        raise UserError(f"{path} is not a {kind} file: label {found.max()} is not below {classes}")
    return rows[:, num_labels:].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1), found.astype(np.int64)
