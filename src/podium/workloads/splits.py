"""Which samples of a published training and test set belong to a split. For workloads whose data has no valid split."""

from typing import Literal

from podium.errors import UserError
from podium.workloads.base import Split

Part = Literal["train", "test"]


def part_of(split: Split, valid_samples: int) -> Part:
    """Where a split comes from: the test set validates, unless training samples are held out for it."""
    return "train" if split == "train" or (split == "valid" and valid_samples) else "test"


def samples_of(split: Split, num_samples: int, valid_samples: int, max_samples: int | None) -> range:
    """The numbers of a split's samples within its part, which has `num_samples`; the last ones are held out."""
    held_out = valid_samples if part_of(split, valid_samples) == "train" else 0
    if held_out >= num_samples:
        raise UserError(
            f"`workload.data.valid_samples` is {held_out:,}, but there are only {num_samples:,} training samples "
            f"to hold them out from."
        )
    first = num_samples - held_out if split == "valid" and held_out else 0
    end = num_samples - held_out if split == "train" else num_samples
    return range(first, end)[:max_samples]
