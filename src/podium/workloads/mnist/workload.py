"""MNIST and similar data sets: small grey images with one label each. Implements the contract."""

from pathlib import Path
from typing import ClassVar, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.source import Source
from podium.errors import UserError
from podium.recipe.section import Section
from podium.workloads.mnist import data as mnist_data
from podium.workloads.mnist.model import Network
from podium.workloads.mnist.section import MnistData, MnistModel
from podium.workloads.published_splits import Part, last_held_out, num_held_out, part_of

_FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


class Workload:
    """The mnist workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = MnistModel
    DataSection: ClassVar[type[Section]] = MnistData
    fixed: ClassVar[bool] = True
    target = Target("valid/accuracy", 0.985, best="max")

    def __init__(self, model: MnistModel, data: MnistData) -> None:
        self._model = model
        self._data = data
        self._arrays: dict[str, tuple[NDArray, NDArray]] = {}
        self._sources: dict[Split, Source] = {}
        if data.class_names is not None and len(data.class_names) != model.num_classes:
            raise UserError(
                f"workload.data.class_names has {len(data.class_names)} names: expected workload.model.num_classes = "
                f"{model.num_classes}"
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
        # Always in single precision: bfloat16 is not precise enough for a sum over a micro-batch.
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
        from podium.workloads import classifier_report  # draws with matplotlib, which is slow to import

        given, got = outputs("test")
        return classifier_report.predict(
            given["image"], given["label"], got["output"], self._class_names(), folder, self._model.output
        )

    def _open(self, split: Split) -> Source:
        data = self._data
        if data.source == "generated":
            numbers = self._generated_numbers(split)[: data.max_samples]
            return mnist_data.generated_source(numbers, self._model.num_classes, data.generated_seed)
        # The test set does not need the training files.
        needed = split != "test" and data.valid_samples != 0
        held_out = num_held_out(data.valid_samples, len(self._load("train")[1])) if needed else 0
        images, labels = self._load(part_of(split, held_out))
        samples = last_held_out(split, len(labels), held_out)[: data.max_samples]
        return mnist_data.array_source(images[samples.start : samples.stop], labels[samples.start : samples.stop])

    def _generated_numbers(self, split: Split) -> range:
        """Return the numbers of generated samples; each split has its own."""
        data = self._data
        train, test = data.generated_train, data.generated_test
        if data.valid_samples is None:
            first = {"train": 0, "valid": train, "test": train + test}[split]
            return range(first, first + (train if split == "train" else test))
        held_out = num_held_out(data.valid_samples, train)
        if part_of(split, held_out) == "test":
            return range(train, train + test)
        return last_held_out(split, train, held_out)

    def _load(self, part: Part) -> tuple[NDArray, NDArray]:
        """Load the files of one part, once: splits are views of the same memory."""
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
