"""What `podium.fit` trains: a model and samples that were given in Python, as a workload.

They are in this process's memory (`given`), or written to the run's folder for other processes (`blueprint.py`).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from pydantic import Field as Default
from torch import nn

from podium.contract import Split
from podium.data.source import Source
from podium.errors import UserError
from podium.recipe.section import Section
from podium.workloads.own.base import Adapted
from podium.workloads.own.blueprint import read_objects
from podium.workloads.own.code import file_sha256
from podium.workloads.own.data import as_source, held_out, num_samples, part_of

OBJECTS = "objects.json"


class FittedModel(Section):
    """The model of a fit. `class_name` and `loss` are for people; the objects themselves are in memory or a folder."""

    class_name: str = ""
    loss: str = ""
    #: folder with the objects; None: they are in memory
    objects: Path | None = None
    #: the user's files that the objects come from, with their checksums
    files: dict[str, str] = Default(default_factory=dict)


class FittedData(Section):
    """The samples of a fit."""

    train: str = ""
    valid: str = ""
    #: of what `valid: 0.1` holds out, and of random numbers inside of a Dataset
    seed: int = 1
    #: processes that prepare the samples of a Dataset
    workers: int = 0


@dataclass
class Given:
    """What `podium.fit` was given."""

    model: nn.Module
    loss: Any
    train: Any = None
    valid: Any = None
    test: Any = None
    #: members of the contract that were given as functions
    members: dict[str, Any] = field(default_factory=dict)
    #: what is to watch the training, where other processes train
    observers: list[Any] = field(default_factory=list)

    def objects(self, *, data: bool) -> dict[str, Any]:
        """Return everything by name, to be written for other processes; without `data`, what a model needs alone."""
        kept = {"model": self.model, "loss": self.loss, "members": self.members}
        more = {"train": self.train, "valid": self.valid, "test": self.test, "observers": self.observers}
        return kept | (more if data else {})


_given: list[Given] = []


@contextmanager
def given(objects: Given) -> Iterator[None]:
    """Let workloads that are built meanwhile have these objects."""
    _given.append(objects)
    try:
        yield
    finally:
        _given.pop()


class Workload(Adapted):
    """A workload of given objects."""

    ModelSection: ClassVar[type[Section]] = FittedModel
    DataSection: ClassVar[type[Section]] = FittedData

    def __init__(self, model: FittedModel, data: FittedData) -> None:
        self._data = data
        self._objects = _given[-1] if _given else _read(model)
        #: those that this process has to call: where `podium.fit` trains in its own, it calls the given ones itself
        self.observers = [] if _given else self._objects.observers
        own = _Members(self._objects, data)
        super().__init__(own, "podium.fit")
        self._parts: tuple[NDArray, NDArray] | None = None

    def build_model(self) -> nn.Module:
        if self._objects.train is None:  # only the model is wanted
            return copy.deepcopy(self._objects.model)
        return super().build_model()

    def _open(self, split: Split) -> Source:
        objects, seed, workers = self._objects, self._data.seed, self._data.workers
        if objects.train is None:
            raise UserError(
                "the samples of this run were given to podium.fit in memory, and are not in the run: give them "
                "again in Python, as in podium.fit(…, resume=True)"
            )
        if split == "test" and objects.test is None:
            return self.source("valid")
        if split == "test":
            return as_source(objects.test, seed=seed, where="test", workers=workers, split="test")
        if isinstance(objects.valid, float):
            if self._parts is None:
                count = num_samples(objects.train, seed=seed, where="train")
                self._parts = held_out(count, objects.valid, seed)
            numbers = self._parts[split == "valid"]
            return part_of(objects.train, numbers, seed=seed, where="train", workers=workers)
        samples = objects.train if split == "train" else objects.valid
        return as_source(samples, seed=seed, where=split, workers=workers, split=split)


class _Members:
    """The members of the contract that a fit has: those that were given; the rest have defaults."""

    target = None

    def __init__(self, objects: Given, data: FittedData) -> None:
        self._model = objects.model
        self.loss, self.data = objects.loss, data
        for name, function in objects.members.items():
            setattr(self, name, function)

    def build_model(self) -> nn.Module:
        """Return a copy: the model that was given stays as it is."""
        return copy.deepcopy(self._model)


def _read(section: FittedModel) -> Given:
    if section.objects is None:
        raise UserError(
            "this run was trained by podium.fit from objects in memory that other processes cannot build: give them "
            "again in Python, as in podium.fit(…, resume=True) or podium.open_run(…, model=model)"
        )
    path = section.objects / OBJECTS
    if not path.is_file():
        raise UserError(f"there is no file {path}, which holds what podium.fit was given")
    for file, digest in section.files.items():
        if file_sha256(Path(file)) != digest:
            raise UserError(
                f"{file} has changed since podium.fit was called: give it back its content, or call podium.fit again"
            )
    before = torch.random.get_rng_state()
    found = read_objects(path)
    torch.random.set_rng_state(before)  # a user's file may draw random numbers while it is imported
    return Given(**found)
