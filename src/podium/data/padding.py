"""Samples of unequal length: padded to one length where they are delivered, cut to the longest where they are used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

#: of a field that is padded: where its mask is found
MASK = "_mask"


@dataclass(frozen=True)
class Pad:
    """How samples of unequal length become rows of one length: their first axis is filled up to `length` with `value`.

    A field `NAME_mask` is true where there are numbers of the sample's own.
    """

    length: int
    value: float = 0
    #: what becomes of longer samples
    too_long: Literal["refuse", "cut"] = "refuse"


def trimmed(batch: Mapping[str, Tensor], multiple: int = 8) -> dict[str, Tensor]:
    """Return a micro-batch whose padded fields are as long as its longest sample, rounded up to a `multiple`.

    For a workload's `loss`: with `batch.shuffle: length` little padding remains to be computed. Depends on the samples
    of the micro-batch alone, so results are the same on any number of instances. Fields whose masks agree in length
    are cut alike; on an accelerator, the host waits for the length.
    """
    cut = dict(batch)
    for name, mask in batch.items():
        field = name.removesuffix(MASK)
        if field == name or field not in batch:
            continue
        longest = int(mask.sum(dim=1).max())
        length = min(mask.shape[1], max(1, -(-longest // multiple)) * multiple)
        cut[name], cut[field] = mask[:, :length], batch[field][:, :length]
    return cut
