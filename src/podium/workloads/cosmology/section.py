"""The recipe sections of cosmology: `workload.model`, `workload.data`. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from podium.recipe.section import Section

#: channels of each block down, in units of the width
_MULTIPLES = (1, 2, 4, 8, 8, 8)


class CosmologyModel(Section):
    """`workload.model` of cosmology. The defaults give the published model."""

    #: channels of the first block; the others have 2, 4, 8, 8 and 8 times as many
    width: PositiveInt = 64
    #: six scales; false: five, without the innermost one
    full_scale: bool = True
    #: what the LeakyReLU of the blocks down multiplies negative values by
    slope: NonNegativeFloat = 0.01
    #: weight of the L1 of the density in real units in the loss, which is otherwise the L1 of the scaled fields
    lambda_rho: NonNegativeFloat = 0.0

    @property
    def num_scales(self) -> int:
        return len(_MULTIPLES) if self.full_scale else len(_MULTIPLES) - 1

    @property
    def channels(self) -> tuple[int, ...]:
        """Return the output channels of every block down, from the outermost."""
        return tuple(self.width * multiple for multiple in _MULTIPLES[: self.num_scales])

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of a narrow model with as many scales."""
        return {"width": 1}


class AugmentSection(Section):
    """How training crops are varied beyond their position."""

    #: the group that the rotation or reflection of every crop is drawn from; published24: the 24 of the published
    #: training, 8 of which are reflections
    group: Literal["cube48", "published24", "none"] = "cube48"
    #: rotate crops for validation and test too, always in the same way; the published training does
    valid: bool = False
    #: rotate velocities with the box; false: components stay as they are, as in the published training
    vectors: bool = True


class CosmologyData(Section):
    """`workload.data` of cosmology."""

    #: files: boxes in the published layout; simulated: made once, kept in the cache; generated: random numbers
    source: Literal["files", "simulated", "generated"] = "simulated"
    #: files, simulated: boxes are read into memory, or crops from the file as needed; synthetic: random numbers instead
    #: of boxes, as with source generated
    mode: Literal["memory", "disk", "synthetic"] = "memory"
    #: files: folder of the boxes
    path: Path | None = None
    #: files: names in that folder; null for test: test.h5 if it exists, else the box for validation
    train_file: Path = Path("train.h5")
    valid_file: Path = Path("valid.h5")
    test_file: Path | None = None
    #: cells along a side of a sample
    crop: PositiveInt = 64
    #: simulated: cells along a side of the box for training; those for validation and test have half as many
    size: PositiveInt = 128
    #: crops may cross the edges of the box, which is periodic; false: they stay inside, as in the published training
    periodic: bool = True
    #: seed of simulated boxes, of positions and rotations of crops, and of generated fields
    seed: NonNegativeInt = 1
    #: crops in a training epoch; crops for validation, and as many for test
    samples: PositiveInt = 65_536
    valid_samples: PositiveInt = 8_192
    augment: AugmentSection = AugmentSection()

    @property
    def is_random(self) -> bool:
        """Return whether samples are random numbers and no file is read."""
        return self.source == "generated" or self.mode == "synthetic"

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited folder, which does not apply to simulated boxes."""
        return ("path",) if written.get("source") == "simulated" else ()

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        # Otherwise training on a box other than the named one would go unnoticed.
        if self.source == "simulated" and self.path is not None:
            raise ValueError(
                "workload.data.path does not apply to workload.data.source = simulated: set the source to files, or "
                "the path to null"
            )
        return self

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random fields."""
        return {"source": "generated", "path": None}


class CosmologyMake(Section):
    """The keys of `podium data make cosmology`: the size of the training box, the folder for the files, and so on."""

    #: cells a side of the training box
    size: PositiveInt
    out: Path
    seed: NonNegativeInt = 1
    #: cells a side of the boxes for validation and test; by default half of `size`, at least 32; where crops of 64³ fit
    #: the training box, also at least 66, as the published reader needs more than its crop
    valid_size: PositiveInt | None = None
    #: side of the training box in comoving Mpc/h; by default, cells have the published size
    box_mpc: PositiveFloat | None = None


ModelSection, DataSection = CosmologyModel, CosmologyData
