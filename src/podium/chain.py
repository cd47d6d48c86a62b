"""The chain of digests of the weights, one link for every metric record: what a run has done, told in 16 digits.

A link digests the one before it, its update and the weights after that update. Two runs have the same link exactly when
they had the same weights at this record and at all records before; checkpoints keep the last one, so that a chain goes
on after a kill as if there had been none. `training/chain.py` builds it; `podium verify` and `podium compare --bits`
compare chains.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import xxhash

#: fields of a record: the digest of the weights, and the link
WEIGHTS, LINK = "weights/xxh3", "weights/chain"


@dataclass(frozen=True)
class Chain:
    """The last link of a chain."""

    #: the last record's update, and the link of the record before it
    update: int = 0
    before: str = ""
    link: str = ""

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
