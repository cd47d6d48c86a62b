"""Image classifiers: ResNet, ResNeXt, EfficientNet on CIFAR, ImageNet, rendered shapes or random images."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from podium.data.arrays import Arrays, ArraySource, Source, Starting
from podium.data.arrays import Field as ArrayField
from podium.data.generated import GeneratedSource
from podium.errors import UserError
from podium.schema import Section
from podium.workloads.base import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.workloads.cnn import cifar, shapes
from podium.workloads.cnn.augment import (
    AugmentSection,
    Images,
    InputSection,
    Spread,
    mixed_cross_entropy,
    normalised_rows,
)
from podium.workloads.cnn.model import CnnModel, Network, build_network
from podium.workloads.splits import Part, part_of, samples_of

if TYPE_CHECKING:  # loads what decodes images
    from podium.data.images import ImageSource

_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_IMAGENET_SIZE, _IMAGENET_CLASSES, _IMAGENET_SAMPLES = 224, 1000, {"train": 1_281_167, "test": 50_000}
_SPREADS = {
    "simulated": Spread((0.5, 0.5, 0.5), (0.29, 0.29, 0.29)),
    "cifar": Spread((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": Spread((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_SMALL = 64
_SMALL_PADDING = 4
_TOP = 5
_MAX_SHOWN = 10_000

Format = Literal["cifar10", "cifar100", "tfrecord", "folder"]


class CnnData(Section):
    """`workload.data` of cnn."""

    #: simulated: rendered shapes; files: see `format`; generated: random images, for speed
    source: Literal["simulated", "files", "generated"] = "simulated"
    #: folder with the files; cifar10 and cifar100 by default where `podium data fetch` puts them
    path: Path | None = None
    #: of the files; auto: as found in `path`
    format: Format | Literal["auto"] = "auto"
    #: side of the images; null: 32 with simulated and CIFAR images, else 224. JPEG files are cut out and scaled to it
    image_size: PositiveInt | None = None
    #: JPEG files for validation: the shorter side is scaled to this before the centre is cut out; null: 8/7 of the size
    resize: PositiveInt | None = None
    #: 0: the test set is the valid split; otherwise the last so many training samples
    valid_samples: NonNegativeInt = 0
    #: at most so many samples of each split
    max_samples: PositiveInt | None = None
    #: simulated, generated: how many there are of each, and what they are drawn from
    samples: PositiveInt = 10_000
    test_samples: PositiveInt = 2_000
    sample_seed: Annotated[int, Field(ge=0)] = 0
    #: JPEG files: keep what was read once in memory, or in a file of the cache folder
    cache: Literal["none", "memory", "disk"] = "none"
    #: JPEG files: threads that decode; null: as many as there are cores
    decode_threads: PositiveInt | None = None
    augment: AugmentSection = AugmentSection()
    input: InputSection = InputSection()


class Workload:
    """The contract of `podium.workloads.base` for cnn."""

    ModelSection: ClassVar[type[Section]] = CnnModel
    DataSection: ClassVar[type[Section]] = CnnData
    target = Target("valid/accuracy", 0.93, best="max")

    def __init__(self, model: CnnModel, data: CnnData) -> None:
        self._model, self._data = model, data
        self._format = self._found_format()
        small_model = isinstance(model.size, int) and model.size in (8, 14, 20, 32, 44, 56)
        small_data = data.source == "simulated" or self._format in ("cifar10", "cifar100")
        small = small_data or (data.source == "generated" and small_model)
        self._size = data.image_size or (shapes.SIZE if small else _IMAGENET_SIZE)
        if small_data and self._size != shapes.SIZE:
            raise UserError(
                f"`workload.data.image_size` is {self._size}, but these images have a side of {shapes.SIZE}."
            )
        self._num_classes = model.num_classes or self._classes_in_data(small)
        kind = "simulated" if data.source == "simulated" else "cifar" if small else "imagenet"
        self._spread = _SPREADS[kind]
        pad = data.augment.pad_crop
        if pad is None:
            pad = _SMALL_PADDING if self._size < _SMALL else 0
        normalised = data.input.normalise == "host"
        self._images = Images(data.augment, self._spread, pad, normalised=normalised)
        self._parts: dict[Part, Source] = {}
        self._sources: dict[Split, Source] = {}

    def build_model(self) -> nn.Module:
        return build_network(self._model, self._num_classes)

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (self._images.plain(batch["image"]),)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        label, count = batch["label"], len(batch["label"])
        smoothing = self._data.augment.label_smoothing
        if model.training:
            mixed = self._images.varied(batch["image"], label)
            return Loss(mixed_cross_entropy(model(mixed.image), mixed, smoothing), count)
        output = model(*self.inputs(batch)).float()
        # Without smoothing: what is validated is how sure the model is of the true class.
        loss = nn.functional.cross_entropy(output, label, reduction="sum")
        metrics = {"accuracy": ((output.argmax(dim=1) == label).sum(dtype=torch.float32), count)}
        if self._num_classes > 2 * _TOP:
            among = (output.topk(_TOP, dim=1).indices == label[:, None]).any(dim=1)
            metrics["top5_accuracy"] = (among.sum(dtype=torch.float32), count)
        return Loss(loss, count, metrics)

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return cast(Network, model).stages()

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        dtype = torch.uint8 if self._data.input.eight_bit else torch.float32
        return {
            "image": torch.zeros(num_samples, self._size, self._size, 3, dtype=dtype),
            "label": torch.arange(num_samples) % self._num_classes,
        }

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads import classified  # draws with matplotlib, which takes long to import

        given, got = outputs("test", _MAX_SHOWN)
        images = given["image"]
        if images.dtype != np.uint8:
            scale, shift = self._spread.factors()
            raw = (images - shift) / scale + 0.5 if self._data.input.normalise == "host" else images
            images = np.clip(raw, 0, 255).astype(np.uint8)
        return classified.predict(images, given["label"], got["output"], self._class_names(), folder, "logits")

    # --- samples ------------------------------------------------------------------------------------------------------

    def _found_format(self) -> Format | None:
        data = self._data
        if data.source != "files":
            return None
        if data.format != "auto":
            return data.format
        if data.path is None:
            raise UserError(
                "`workload.data.source` is files: say where they are by `workload.data.path`, or what they are by "
                "`workload.data.format` (cifar10 and cifar100 are found where `podium data fetch` puts them)."
            )
        folder = data.path.expanduser()
        if not folder.is_dir():
            raise UserError(f"`workload.data.path` is {folder}, but there is no such folder.")
        if kind := cifar.kind_in(folder):
            return kind
        if any(folder.glob("train-*-of-*")):
            return "tfrecord"
        if (folder / "train").is_dir():
            return "folder"
        raise UserError(
            f"{folder} holds neither CIFAR files, nor TFRecord shards (train-00000-of-01024), nor a folder `train` "
            "with one folder of images for each class."
        )

    def _classes_in_data(self, small: bool) -> int:
        if self._data.source == "simulated":
            return len(shapes.CLASSES)
        if self._format in ("cifar10", "cifar100"):
            return cifar.num_classes(self._format)
        if self._format == "folder":
            return len(self._jpeg("train").class_names or ())
        return len(_CIFAR_NAMES) if small else _IMAGENET_CLASSES

    def _folder(self) -> Path:
        assert self._data.path is not None
        return self._data.path.expanduser()

    def _open(self, split: Split) -> Source:
        data = self._data
        part = part_of(split, data.valid_samples)
        if part not in self._parts:
            self._parts[part] = self._whole(part)
        whole = self._parts[part]
        part_class = _StartingPart if isinstance(whole, Starting) else _Part
        return part_class(whole, samples_of(split, len(whole), data.valid_samples, data.max_samples))

    def _whole(self, part: Part) -> Source:
        """All samples of the training or test set."""
        data = self._data
        if data.source == "generated":
            return self._generated(part)
        if self._format in ("tfrecord", "folder"):
            return self._delivered(self._jpeg(part, self._num_classes))
        if data.source == "simulated":
            # Test samples are numbered after the training samples: the same kind, not the same ones.
            samples = range(data.samples) if part == "train" else range(data.samples, data.samples + data.test_samples)
            source = shapes.rendered(samples, data.sample_seed)
            image, label = source.arrays["image"], source.arrays["label"]
        else:
            folder = data.path.expanduser() if data.path else None
            image, label = cifar.load(folder, cast(cifar.Kind, self._format), part)
        if label.max() >= self._num_classes:
            raise UserError(
                f"`workload.model.num_classes` is {self._num_classes}, but the data has the label {label.max()}."
            )
        return self._delivered(ArraySource({"image": image, "label": label}))

    def _generated(self, part: Part) -> Source:
        data = self._data
        side = (self._size, self._size, 3)
        fields = {"image": ArrayField(side, np.uint8), "label": ArrayField((), np.int64)}
        first, num = (0, data.samples) if part == "train" else (data.samples, data.test_samples)
        ranges = {"label": (0, self._num_classes), "image": (0, 256)}
        source = GeneratedSource(fields, num, ranges=ranges, seed=data.sample_seed, first_sample=first)
        return self._delivered(source)

    def _jpeg(self, part: Part, num_classes: int | None = None) -> "ImageSource":
        from podium.data import images

        data = self._data
        build = images.tfrecord_source if self._format == "tfrecord" else images.folder_source
        return build(
            self._folder(),
            "train" if part == "train" else "valid",  # ImageNet's test set has no labels
            self._size,
            resize=data.resize or self._size * 8 // 7,
            num_classes=num_classes,
            crops=images.RandomCrops(seed=data.sample_seed),
            cache=data.cache,
            threads=data.decode_threads,
        )

    def _delivered(self, source: Source) -> Source:
        if self._data.input.eight_bit:
            return source
        return _Floats(source, self._spread if self._data.input.normalise == "host" else None)

    def _class_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        if self._data.source == "simulated":
            names = shapes.CLASSES
        elif self._format == "cifar10":
            names = _CIFAR_NAMES
        elif self._format == "folder":
            names = self._jpeg("train").class_names or ()
        return names if len(names) == self._num_classes else tuple(map(str, range(self._num_classes)))


class _Part:
    """Some consecutive samples of a source."""

    def __init__(self, whole: Source, samples: range) -> None:
        self.fields = whole.fields
        self._whole, self._samples = whole, samples

    def __len__(self) -> int:
        return len(self._samples)

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self._whole.gather(samples + self._samples.start, out, places)


class _StartingPart(_Part):
    """The same of a source that gathers in the background."""

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        return cast(Starting, self._whole).begin(samples + self._samples.start, out, places)


class _Floats:
    """Images as floats instead of bytes, normalised where `spread` is given."""

    def __init__(self, source: Source, spread: Spread | None) -> None:
        self._source, self._spread = source, spread
        image = ArrayField(source.fields["image"].shape, np.float32)
        self.fields: Mapping[str, ArrayField] = {**source.fields, "image": image}

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        rows = np.empty(out["image"].shape, np.uint8)
        self._source.gather(samples, {**out, "image": rows}, places)
        if self._spread is None:
            out["image"][...] = rows
        else:
            normalised_rows(self._spread, rows, out["image"])
