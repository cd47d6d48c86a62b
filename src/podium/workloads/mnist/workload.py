"""MNIST and its relatives: small grey images, one label each. What the data is, the loss, and what to look at after."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from podium.data.arrays import Source
from podium.errors import UserError
from podium.schema import Section
from podium.workloads.base import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.workloads.mnist import data as mnist_data
from podium.workloads.mnist.model import MnistModel, Network
from podium.workloads.splits import Part, part_of, samples_of

_FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


class MnistData(Section):
    """`workload.data` of mnist."""

    source: Literal["files", "generated"] = "files"
    #: folder with the four IDX files; by default where `podium data fetch mnist` puts them
    path: Path | None = None
    #: 0: the test set is the valid split, as in the published training; otherwise the last so many training samples
    valid_samples: NonNegativeInt = 0
    #: at most so many samples of each split
    max_samples: PositiveInt | None = None
    #: names for pictures and tables; by default the labels, or the published names in a folder named after fashion
    class_names: tuple[str, ...] | None = None
    #: `source: generated` only: how many there are of each, and what they are drawn from
    generated_train: PositiveInt = 60_000
    generated_test: PositiveInt = 10_000
    generated_seed: Annotated[int, Field(ge=0)] = 0


class Workload:
    """The contract of `podium.workloads.base` for mnist."""

    ModelSection: ClassVar[type[Section]] = MnistModel
    DataSection: ClassVar[type[Section]] = MnistData
    target = Target("valid/accuracy", 0.985, best="max")

    def __init__(self, model: MnistModel, data: MnistData) -> None:
        self._model = model
        self._data = data
        self._arrays: dict[str, tuple[NDArray, NDArray]] = {}
        self._sources: dict[Split, Source] = {}
        if data.class_names is not None and len(data.class_names) != model.num_classes:
            raise UserError(
                f"`workload.data.class_names` has {len(data.class_names)} names, but `workload.model.num_classes` is "
                f"{model.num_classes}."
            )

    def build_model(self) -> nn.Module:
        return Network(self._model)

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["image"],)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        output, label = model(batch["image"]), batch["label"]
        # In single precision whatever the model computes in: a sum over a micro-batch leaves bfloat16's reach.
        loss = F.cross_entropy(output.float(), label, reduction="sum")
        count = len(label)
        if model.training:
            return Loss(loss, count)
        correct = (output.argmax(dim=1) == label).sum(dtype=torch.float32)
        return Loss(loss, count, {"accuracy": (correct, count)})

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return cast(Network, model).stages()

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        return {
            "image": torch.zeros(num_samples, *mnist_data.FIELDS["image"].shape),
            "label": torch.arange(num_samples) % self._model.num_classes,
        }

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads import classified  # draws with matplotlib, which takes long to import

        given, got = outputs("test")
        return classified.predict(
            given["image"], given["label"], got["output"], self._class_names(), folder, self._model.output
        )

    def _open(self, split: Split) -> Source:
        data = self._data
        part = part_of(split, data.valid_samples)
        samples = samples_of(split, self._num_samples(part), data.valid_samples, data.max_samples)
        if data.source == "generated":
            # Test samples are numbered after the training samples: the same kind, not the same ones.
            shift = data.generated_train if part == "test" else 0
            numbers = range(samples.start + shift, samples.stop + shift)
            return mnist_data.generated_source(numbers, self._model.num_classes, data.generated_seed)
        images, labels = self._load(part)
        return mnist_data.array_source(images[samples.start : samples.stop], labels[samples.start : samples.stop])

    def _num_samples(self, part: Part) -> int:
        if self._data.source == "files":
            return len(self._load(part)[1])
        return self._data.generated_train if part == "train" else self._data.generated_test

    def _load(self, part: Part) -> tuple[NDArray, NDArray]:
        """The files of one part, read once: splits are views of the same memory."""
        if part not in self._arrays:
            folder = self._data.path.expanduser() if self._data.path else None
            self._arrays[part] = mnist_data.load_images_and_labels(folder, part, self._model.num_classes)
        return self._arrays[part]

    def _class_names(self) -> tuple[str, ...]:
        if self._data.class_names is not None:
            return self._data.class_names
        folder = self._data.path
        fashion = self._data.source == "files" and folder is not None and "fashion" in folder.resolve().name.lower()
        if fashion and self._model.num_classes == len(_FASHION):
            return _FASHION
        return tuple(str(label) for label in range(self._model.num_classes))
