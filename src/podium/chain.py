"""The chain of digests of the weights, one link for every metric record: what a run has done, told in 16 digits.

A link digests the one before it, its update and the weights after that update. Two runs have the same link exactly when
they had the same weights at this record and at all records before; checkpoints keep the last one, so that a chain goes
on after a kill as if there had been none. `training/chain.py` builds it; `podium verify` and `podium compare --bits`
compare chains.

Between two records there are marks of single updates: of their losses, which are on the host anyway, and if asked for
(`log.digests: updates`) of their weights, which takes up to a tenth of a small update. Where losses differ, the weights
or the computation did at the latest then; a weight without influence changes no loss. That runs differ, and how far
they are equal, the links tell.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import xxhash

#: fields of a record: the digest of the weights, and the link
WEIGHTS, LINK = "weights/xxh3", "weights/chain"
#: fields of a record: the marks of the updates since the record before, MARK_DIGITS of each
LOSS_MARKS, WEIGHT_MARKS, MARK_DIGITS = "losses/each", "weights/each", 4
#: a record of more updates has no marks
_MOST_MARKS = 10_000


@dataclass(frozen=True)
class Chain:
    """The last link of a chain."""

    #: the last record's update, and the link of the record before it
    update: int = 0
    before: str = ""
    link: str = ""
    #: marks of the weights after each update since
    each: str = ""

    def marked(self, weights: str) -> "Chain":
        """Return the chain with the mark of one more update, after which the weights have the digest `weights`."""
        return replace(self, each=(self.each + weights[:MARK_DIGITS])[-MARK_DIGITS * _MOST_MARKS :])

    def extended(self, update: int, weights: str) -> "Chain":
        """Return the chain with the record of `update`, after which the weights have the digest `weights`.

        A record that is made once more, as instances were lost in it, follows the same one as before.
        """
        before = self.before if update == self.update else self.link
        return Chain(update, before, linked(before, update, weights))

    def state(self) -> dict[str, Any]:
        """Return the fields for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(**state)


def linked(before: str, update: int, weights: str) -> str:
    """Return the link that follows `before` (empty: the first one)."""
    return xxhash.xxh3_64(f"{before} {update} {weights}".encode()).hexdigest()


def loss_marks(losses: Sequence[tuple[float, int]], per_update: int) -> str:
    """Return the marks of updates, from (sum, count) of the losses of all their micro-batches, `per_update` of each.

    The order of those of one update does not matter, as it may depend on the number of instances.
    """
    num, rest = divmod(len(losses), per_update)
    if rest or num > _MOST_MARKS:
        return ""
    updates = (losses[start : start + per_update] for start in range(0, len(losses), per_update))
    return "".join(_mark(math.fsum(total for total, _ in update)) for update in updates)


def _mark(total: float) -> str:
    return xxhash.xxh3_64(struct.pack("<d", total)).hexdigest()[:MARK_DIGITS]


def are_told(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether two records of the same update have marks of the same updates, in the field `name`."""
    return 0 < len(ours.get(name, "")) == len(theirs.get(name, ""))


def first_other_mark(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int | None:
    """Return the first update whose mark differs between two records of the same update; None where none is known."""
    if not are_told(name, ours, theirs):
        return None
    one, other = ours[name], theirs[name]
    place = next((place for place in range(len(one)) if one[place] != other[place]), None)
    num = len(one) // MARK_DIGITS
    return None if place is None else int(ours["update"]) - num + 1 + place // MARK_DIGITS
