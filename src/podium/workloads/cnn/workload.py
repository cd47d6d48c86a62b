"""Image classifiers: ResNet, ResNeXt, EfficientNet on CIFAR, ImageNet, rendered shapes or random images."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.formats import cifar
from podium.data.images.stores import split_folder
from podium.data.sample_plan import spread_evenly
from podium.data.source import Arrays, Source
from podium.data.source import Field as ArrayField
from podium.data.sources.arrays import ArraySource
from podium.data.sources.generated import GeneratedSource
from podium.data.sources.subset import subset
from podium.errors import UserError
from podium.recipe.section import Section
from podium.workloads.cnn import shapes
from podium.workloads.cnn.augment import Images, Spread, mixed_cross_entropy, normalised_rows
from podium.workloads.cnn.model import Network, build_network
from podium.workloads.cnn.section import CnnData, CnnModel, Format
from podium.workloads.published_splits import Part, last_held_out, num_held_out, part_of, spread_held_out

if TYPE_CHECKING:  # imports the image decoders
    from podium.data.images.source import ImageSource

_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_IMAGENET_SIZE, _IMAGENET_CLASSES, _IMAGENET_SAMPLES = 224, 1000, {"train": 1_281_167, "test": 50_000}
_SPREADS = {
    "simulated": Spread((0.5, 0.5, 0.5), (0.29, 0.29, 0.29)),
    "cifar": Spread((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": Spread((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_SMALL = 64
_WINDOW_AREA = (0.08, 1.0)
_SMALL_PADDING = 4
_TOP = 5
_MAX_SHOWN = 10_000


class Workload:
    """The cnn workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = CnnModel
    DataSection: ClassVar[type[Section]] = CnnData
    target = Target("valid/accuracy", 0.93, best="max")

    def __init__(self, model: CnnModel, data: CnnData) -> None:
        self._model, self._data = model, data
        self._format = self._found_format()
        small_model = isinstance(model.size, int) and model.size in (8, 14, 20, 32, 44, 56)
        small_data = data.source == "simulated" or self._format in ("cifar10", "cifar100")
        small = small_data or (data.source != "simulated" and small_model)
        self._size = data.image_size or (shapes.SIZE if small else _IMAGENET_SIZE)
        if small_data and self._size != shapes.SIZE:
            raise UserError(
                f"workload.data.image_size = {self._size}: expected {shapes.SIZE}, the side of these images"
            )
        if data.valid_path is not None and self._format not in ("tfrecord", "folder"):
            raise UserError("workload.data.valid_path applies to JPEG and PNG files only: set it to null")
        self._num_classes = model.num_classes or self._classes_in_data(small)
        kind = "simulated" if data.source == "simulated" else "cifar" if small else "imagenet"
        self._spread = _SPREADS[kind]
        pad = data.augment.pad_crop
        if pad is None:
            pad = _SMALL_PADDING if self._size < _SMALL and self._window_area() is None else 0
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
        # Without smoothing: validation measures how confident the model is in the true class.
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
        from podium.workloads import classifier_report  # draws with matplotlib, which is slow to import

        given, got = outputs("test", _MAX_SHOWN)
        images = given["image"]
        if images.dtype != np.uint8:
            scale, shift = self._spread.factors()
            raw = (images - shift) / scale + 0.5 if self._data.input.normalise == "host" else images
            images = np.clip(raw, 0, 255).astype(np.uint8)
        return classifier_report.predict(images, given["label"], got["output"], self._class_names(), folder, "logits")

    # --- samples ------------------------------------------------------------------------------------------------------

    def _found_format(self) -> Format | None:
        data = self._data
        if data.source != "files":
            return None
        if data.format in ("cifar10", "cifar100") or (data.format != "auto" and data.path is not None):
            return data.format
        if data.path is None:
            raise UserError(
                "workload.data.path is missing: workload.data.source = files needs it, or workload.data.format = "
                "cifar10 or cifar100 for files downloaded by `podium data fetch`"
            )
        folder = data.path.expanduser()
        if not folder.is_dir():
            raise UserError(f"workload.data.path = {folder}: expected a folder that exists")
        if kind := cifar.kind_in(folder):
            return kind
        if any(folder.glob("train-*-of-*")):
            return "tfrecord"
        if (folder / "train").is_dir():
            return "folder"
        raise UserError(
            f"{folder} holds neither CIFAR files, nor TFRecord shards (train-00000-of-01024), nor a folder `train` "
            "with one folder of images for each class"
        )

    def _classes_in_data(self, small: bool) -> int:
        if self._data.source == "simulated":
            return len(shapes.CLASSES)
        if self._format in ("cifar10", "cifar100"):
            return cifar.num_classes(self._format)
        if self._format == "folder":
            return len(self._jpeg("train").class_names or ())
        return len(_CIFAR_NAMES) if small and self._format is None else _IMAGENET_CLASSES

    def _window_area(self) -> tuple[float, float] | None:
        """Return the range of the random windows cut out of pictures, as shares of their area; None: none are."""
        window = self._data.augment.window
        if self._format not in ("tfrecord", "folder"):
            if isinstance(window, tuple):
                raise UserError("workload.data.augment.window applies to JPEG and PNG files only: set it to null")
            return None
        if window is None:
            return None if self._size < _SMALL else _WINDOW_AREA
        return None if window == "off" else window

    def _folder(self) -> Path:
        assert self._data.path is not None
        return self._data.path.expanduser()

    def _open(self, split: Split) -> Source:
        data = self._data
        numbers: NDArray[np.int64]
        if split == "test" and self._lacks_test_folder():
            split = "valid"
        if data.valid_samples is None and self._format is None:  # any number can be drawn
            whole = self._whole(split)
            numbers = np.arange(len(whole))
        else:
            held_out = 0 if split == "test" else self._num_held_out()
            part = part_of(split, held_out)
            if part not in self._parts:
                self._parts[part] = self._whole(part)
            whole = self._parts[part]
            choose = spread_held_out if self._format == "folder" else last_held_out
            numbers = np.asarray(choose(split, len(whole), held_out))
        if data.max_samples is not None and data.max_samples < len(numbers):
            first = np.arange(data.max_samples)
            # A folder is sorted by class: its first images would be of one class.
            numbers = numbers[spread_evenly(first, len(first), len(numbers)) if self._format == "folder" else first]
        return subset(whole, numbers)

    def _lacks_test_folder(self) -> bool:
        """Return whether there are training images only, of which some are held out."""
        if self._format != "folder" or self._data.valid_path or not self._data.valid_samples:
            return False
        return split_folder(self._folder(), "valid") is None

    def _num_held_out(self) -> int:
        """Return how many training samples are held out for validation."""
        wanted = self._data.valid_samples
        if wanted is None and self._format in ("tfrecord", "folder"):  # these have a validation set
            wanted = 0
        if wanted == 0:
            return 0
        if "train" not in self._parts:
            self._parts["train"] = self._whole("train")
        return num_held_out(wanted, len(self._parts["train"]))

    def _drawn_numbers(self, split: Split) -> range:
        """Return the numbers of simulated or generated samples; each split has its own."""
        data = self._data
        if split == "train":
            return range(data.samples)
        first = data.samples + (data.test_samples if split == "test" and data.valid_samples is None else 0)
        return range(first, first + data.test_samples)

    def _whole(self, part: Split) -> Source:
        """Return all samples of a set."""
        data = self._data
        if data.source == "generated":
            return self._generated(part)
        if self._format in ("tfrecord", "folder"):
            return self._delivered(self._jpeg("train" if part == "train" else "test", self._num_classes))
        if data.source == "simulated":
            source = shapes.rendered(self._drawn_numbers(part), data.sample_seed)
            image, label = source.arrays["image"], source.arrays["label"]
        else:
            folder = data.path.expanduser() if data.path else None
            image, label = cifar.load(folder, cast(cifar.Kind, self._format), "train" if part == "train" else "test")
        if label.max() >= self._num_classes:
            raise UserError(
                f"workload.model.num_classes = {self._num_classes}: expected more than {label.max()}, the largest label"
            )
        return self._delivered(ArraySource({"image": image, "label": label}))

    def _generated(self, part: Split) -> Source:
        data = self._data
        side = (self._size, self._size, 3)
        fields = {"image": ArrayField(side, np.uint8), "label": ArrayField((), np.int64)}
        numbers = self._drawn_numbers(part)
        ranges = {"label": (0, self._num_classes), "image": (0, 256)}
        source = GeneratedSource(fields, len(numbers), ranges=ranges, seed=data.sample_seed, first_sample=numbers.start)
        return self._delivered(source)

    def _jpeg(self, part: Part, num_classes: int | None = None) -> "ImageSource":
        from podium.data.images import source as images

        data = self._data
        build = images.tfrecord_source if self._format == "tfrecord" else images.folder_source
        return build(
            self._folder(),
            "train" if part == "train" else "valid",  # ImageNet's test set has no labels
            self._size,
            valid_folder=data.valid_path.expanduser() if data.valid_path else None,
            resize=data.resize or (self._size if self._size < _SMALL else self._size * 8 // 7),
            num_classes=num_classes,
            crops=images.RandomCrops(seed=data.sample_seed, area=self._window_area()),
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


class _Floats:
    """A source of images as floats instead of bytes, normalised if `spread` is given."""

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
