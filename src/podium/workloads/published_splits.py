"""The samples of each split, for data published as a training and a test set without a validation set."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from podium.contract import Split
from podium.errors import UserError

Part = Literal["train", "test"]

#: if the recipe gives no number, one in this many training samples is held out for validation
_HELD_OUT_PART = 10


def num_held_out(valid_samples: int | None, num_train: int) -> int:
    """Return how many training samples are held out for validation: the given number, by default a tenth."""
    held_out = max(1, num_train // _HELD_OUT_PART) if valid_samples is None else valid_samples
    if held_out >= num_train:
        raise UserError(
            f"workload.data.valid_samples = {held_out}: expected fewer than the {num_train:,} training samples"
        )
    return held_out


def part_of(split: Split, held_out: int) -> Part:
    """Return which set a split comes from: if no training samples are held out, the test set validates."""
    return "train" if split == "train" or (split == "valid" and held_out) else "test"


def last_held_out(split: Split, num_samples: int, held_out: int) -> range:
    """Return the indices of a split's samples in its set of `num_samples`; the last training ones are held out."""
    if split == "train":
        return range(num_samples - held_out)
    return range(num_samples - held_out, num_samples) if split == "valid" and held_out else range(num_samples)


def spread_held_out(split: Split, num_samples: int, held_out: int) -> NDArray[np.int64]:
    """Return the same for a set sorted by class: the samples held out are spread evenly over it."""
    numbers = np.arange(num_samples)
    if part_of(split, held_out) == "test" or not held_out:
        return numbers
    valid = (np.arange(held_out) * num_samples + num_samples // 2) // held_out
    return valid if split == "valid" else np.delete(numbers, valid)
