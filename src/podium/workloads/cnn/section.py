"""The recipe sections of cnn: `workload.model`, `workload.data`. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from podium.layers.section import NormSection
from podium.recipe.section import Section

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
AreaShare = Annotated[float, Field(gt=0.0, le=1.0)]
#: model -> its sizes: for images of CIFAR size, and of ImageNet size
SIZES: dict[str, tuple[int | str, ...]] = {
    "resnet": (8, 14, 20, 32, 44, 56, 18, 34, 50, 101, 152),
    "resnext": (50, 101),
    "efficientnet": ("B0", "B1", "B2", "B3", "B4"),
}
_OF_EFFICIENTNET = ("drop_connect", "group_dim", "expand_ratio")


class CnnModel(Section):
    """`workload.model` of cnn."""

    name: Literal["resnet", "resnext", "efficientnet"] = "resnet"
    #: resnet: 8, 14, 20, 32, 44, 56 (CIFAR) or 18, 34, 50, 101, 152; resnext: 50, 101; efficientnet: B0 … B4
    size: int | str = 20
    #: resnet: channels of the first stage; null: as published, 64 for images of ImageNet size, 16 for those of CIFAR's
    width: PositiveInt | None = None
    #: null: that of the data
    num_classes: PositiveInt | None = None
    norm: NormSection = NormSection()
    #: the last norm of every residual block starts at zero, so that the block starts as its shortcut
    zero_init: bool = False
    #: share of the features zeroed before the classifier; null: 0, with efficientnet 0.2 … 0.4 by size
    dropout: Share | None = None
    #: efficientnet: share of blocks skipped, sample by sample, growing with depth; null: 0.2
    drop_connect: Share | None = None
    #: efficientnet: channels in each group of the middle convolutions; 1: depthwise, as published
    group_dim: PositiveInt = 1
    #: efficientnet: how much wider a block is in the middle than at its ends
    expand_ratio: PositiveInt = 6

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited keys that apply only to an efficientnet."""
        return _OF_EFFICIENTNET if written.get("name") in ("resnet", "resnext") else ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        sizes = SIZES[self.name]
        if isinstance(self.size, str):
            object.__setattr__(self, "size", self.size.upper())
        if self.size not in sizes:
            raise ValueError(
                f"workload.model.size = {self.size}: expected one of {', '.join(map(str, sizes))} with {self.name}"
            )
        if self.name != "efficientnet":
            fields = type(self).model_fields
            for key in _OF_EFFICIENTNET:
                if getattr(self, key) != fields[key].default:
                    raise ValueError(f"workload.model.{key} does not apply to {self.name}: leave it out")
        if self.name != "resnet" and self.width is not None:
            raise ValueError(f"workload.model.width does not apply to {self.name}: leave it out")
        return self

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of a narrow model with as many blocks; of the others, only the images are small."""
        return {"width": 4, "norm": {"groups": min(self.norm.groups, 4)}} if self.name == "resnet" else {}


class AugmentSection(Section):
    """How training images are varied; validation sees them as they are."""

    #: JPEG and PNG files: share of the picture's area in the random window that training cuts out, from least to most;
    #: off: the middle, as in validation; null: [0.08, 1], off for images of CIFAR size
    window: tuple[AreaShare, AreaShare] | Literal["off"] | None = None
    #: width of the black border added before cropping at a random place; null: 4 for images of CIFAR size, 0 where a
    #: window is cut out
    pad_crop: NonNegativeInt | None = None
    #: mirror images, half of them on average
    flip: bool = True
    #: mix pairs of images and labels by a share drawn from Beta(mixup, mixup); 0: off
    mixup: Annotated[float, Field(ge=0)] = 0.0
    #: replace a rectangle with that of another image, its area drawn from Beta(cutmix, cutmix); 0: off.
    #: With mixup as well, one of the two is chosen at random for every micro-batch
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    #: share of the label spread evenly over all classes
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _cropped_once(self) -> Self:
        if isinstance(self.window, tuple):
            least, most = self.window
            if least > most:
                raise ValueError(
                    f"workload.data.augment.window = [{least:g}, {most:g}]: expected the smaller share first"
                )
            if self.pad_crop:
                raise ValueError(
                    f"workload.data.augment.pad_crop = {self.pad_crop}: expected 0 or null with "
                    "workload.data.augment.window, which crops already"
                )
        return self


class InputSection(Section):
    """The form in which images are sent to the device."""

    #: as bytes, a quarter of the traffic; otherwise as floats
    eight_bit: bool = True
    #: where images are normalised; bytes leave that to the device
    normalise: Literal["host", "device"] = "device"

    @model_validator(mode="after")
    def _bytes_are_raw(self) -> Self:
        if self.eight_bit and self.normalise == "host":
            raise ValueError(
                "workload.data.input.eight_bit = true: expected false with workload.data.input.normalise = host"
            )
        return self


Format = Literal["cifar10", "cifar100", "tfrecord", "folder"]


class CnnData(Section):
    """`workload.data` of cnn."""

    #: simulated: rendered shapes; files: see `format`; generated: random images, for speed
    source: Literal["simulated", "files", "generated"] = "simulated"
    #: folder with the files; cifar10 and cifar100 by default where `podium data fetch` puts them
    path: Path | None = None
    #: JPEG files: folder with those for validation and test, of the form of `path`'s; null: `val` or the like in `path`
    valid_path: Path | None = None
    #: format of the files; auto: as found in `path`
    format: Format | Literal["auto"] = "auto"
    #: side of the images; null: 32 with simulated and CIFAR images and models for their size, else 224. JPEG files are
    #: cropped and scaled to it
    image_size: PositiveInt | None = None
    #: JPEG files in validation: the shorter side is scaled to this before the centre is cropped; null: 8/7 of the size,
    #: for images of CIFAR size the size: nothing is cut off the shorter side
    resize: PositiveInt | None = None
    #: training samples held out for validation: the last ones, of folders evenly spread ones; null: a tenth of CIFAR's,
    #: none of TFRecord shards and folders, which have a validation set; simulated and generated ones are drawn in
    #: addition, as many as for test; 0: the test set validates
    valid_samples: NonNegativeInt | None = None
    #: maximum number of samples of each split
    max_samples: PositiveInt | None = None
    #: simulated, generated: number of samples for training and for test, and their seed
    samples: PositiveInt = 10_000
    test_samples: PositiveInt = 2_000
    sample_seed: Annotated[int, Field(ge=0)] = 0
    #: JPEG files: keep what was read once in memory, or on disk in the cache folder
    cache: Literal["none", "memory", "disk"] = "none"
    #: JPEG files: number of decoding threads; null: number of cores
    decode_threads: PositiveInt | None = None
    augment: AugmentSection = AugmentSection()
    input: InputSection = InputSection()

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited format where another path is written: it is looked for there."""
        return ("format",) if written.get("path") is not None else ()

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of small images."""
        return {"image_size": 64, "resize": None}

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random images, as many as those of ImageNet where the files have its form."""
        published = {"samples": 1_281_167, "test_samples": 50_000} if self.format in ("tfrecord", "folder") else {}
        return {"source": "generated", "path": None, "valid_path": None, "format": "auto", **published}


ModelSection, DataSection = CnnModel, CnnData
