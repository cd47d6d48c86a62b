"""The defaults of the contract: the base class of users' workloads, and what stands between them and Podium.

`podium.Workload` is `OwnWorkload`. A user's class need not derive from it: `adapted` mixes it in.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.source import SampleRequest, Source, empty_buffers, start_gather
from podium.errors import PodiumError, UserError
from podium.recipe.section import Section
from podium.ui.user_frames import describe, user_frames
from podium.workloads.own.data import as_source
from podium.workloads.own.losses import LossFunction, place_of, target_field

_NUM_TRIED = 2


class OwnWorkload:
    """The base class of users' workloads: `build_model`, `source` (or `datasets`) and `loss` are theirs to write.

    `source(split)` returns samples of "train", "valid" or "test" in any form that `podium.fit` takes; without a test
    split, the one for validation serves. `datasets()` returns all splits at once, by name. `loss` is a name, a mapping
    with a name and options, or a method (model, batch) or (output, target).
    """

    class ModelSection(Section):
        """No keys, until a workload says otherwise."""

    class DataSection(Section):
        """No keys, until a workload says otherwise."""

    target: ClassVar[Target | None] = None

    def __init__(self, model: Any, data: Any) -> None:
        """Keep the two sections of the recipe, for `build_model` and `source`."""
        self.model, self.data = model, data


def adapted(cls: type, where: str) -> "Callable[[Any, Any], Adapted]":
    """Return a function from the two sections to the workload, with defaults for what the user's class leaves out."""
    whole = with_defaults(cls)
    return lambda model, data: Adapted(whole(model, data), where)


def with_defaults(cls: type) -> type:
    """Return the class itself or, if it has another base, one with what a workload's base provides."""
    return (
        cls if issubclass(cls, OwnWorkload) else type(cls.__name__, (cls, OwnWorkload), {"__module__": cls.__module__})
    )


class Adapted:
    """A user's workload as Podium takes it: the whole contract, with their mistakes told in a sentence."""

    ModelSection: ClassVar[type[Section]] = Section
    DataSection: ClassVar[type[Section]] = Section

    def __init__(self, own: Any, where: str) -> None:
        self._own, self._where = own, where
        self._sources: dict[Split, Source] = {}
        self._loss = LossFunction(own.loss, where)
        self._forward: inspect.Signature | None = None
        self.target: Target | None = own.target
        #: whether a new model is tried on a few samples
        self.tries = True
        self.seed: int = getattr(getattr(own, "data", None), "seed", 1)

    def __getattr__(self, name: str) -> Any:
        """Pass on what a workload may have besides: `to_huggingface` and the like."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def build_model(self) -> nn.Module:
        model = self._own.build_model()
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{place_of(self._own.build_model) or self._where}: build_model returned {type(model).__name__}, "
                "expected a torch.nn.Module"
            )
        self._forward = inspect.signature(model.forward)
        if self.tries:
            self._try(model)
        return model

    def _try(self, model: nn.Module) -> None:
        """Compute a loss before anything is written; weights, buffers and random numbers stay as they are."""
        if not any(True for _ in model.parameters()):
            raise UserError(f"{self._where}: the model has no parameters, so there is nothing to train")
        device = next(model.parameters()).device
        batch = {name: rows.to(device) for name, rows in self.example(_NUM_TRIED).items()}
        was_training = model.training
        model.eval()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self.loss(model, batch)
        except PodiumError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {list(rows.shape)} {rows.dtype}" for name, rows in batch.items())
            raise UserError(
                f"{self._where}: the loss of {_NUM_TRIED} samples cannot be computed: {describe(error)}; their batch "
                f"has {shapes}{user_frames(error)}"
            ) from error
        finally:
            model.train(was_training)

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    def _open(self, split: Split) -> Source:
        given = None
        if hasattr(self._own, "source"):
            try:
                given = self._own.source(split)
            except (KeyError, ValueError, NotImplementedError):
                if split != "test":  # many data sets have two splits only
                    raise
        else:
            splits = self._own.datasets()
            if not isinstance(splits, Mapping) or "train" not in splits or "valid" not in splits:
                raise UserError(
                    f"{place_of(self._own.datasets) or self._where}: datasets returned {type(splits).__name__}, "
                    'expected a mapping with "train" and "valid"'
                )
            given = splits.get(split)
        if given is None:
            if split == "test":
                return self.source("valid")
            what = getattr(self._own, "source", None) or self._own.datasets
            raise UserError(f"{place_of(what) or self._where}: there are no samples of the split {split!r}")
        return as_source(given, seed=self.seed, where=f"source({split!r})", workers=self._workers(), split=split)

    def _workers(self) -> int:
        return int(getattr(getattr(self._own, "data", None), "workers", 0))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self._loss(model, batch)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        if (own := self._given("inputs")) is not None:
            found = own(batch)
            return tuple(found) if isinstance(found, tuple | list) else (found,)
        if self._loss.takes_output:
            field = target_field(batch)
            return tuple(rows for name, rows in batch.items() if name != field)
        return self._recorded(batch)

    def _recorded(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the loss calls its model with, in the order of the model's parameters."""
        try:
            self._loss(_Recorder(), batch)
        except _Called as called:
            if not called.named:
                return called.args
            assert self._forward is not None
            bound = self._forward.bind(*called.args, **called.named)
            values = {**{name: param.default for name, param in self._forward.parameters.items()}, **bound.arguments}
            last = max(place for place, name in enumerate(values) if name in bound.arguments)
            return tuple(list(values.values())[: last + 1])
        raise UserError(f"{self._loss.where}: the loss does not call its model: write `inputs(batch)` as well")

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        if (own := self._given("param_groups")) is not None:
            groups: list[ParamGroup] = own(model)
            return groups
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if (own := self._given("stages")) is not None:
            blocks: list[tuple[str, nn.Module]] = own(model)
            return blocks
        return default_stages(model)

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        if (own := self._given("example")) is not None:
            batch: dict[str, Tensor] = own(num_samples)
            return batch
        return drawn(self.source("train"), num_samples)

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        if (own := self._given("predict")) is not None:
            found = own(model, outputs, folder)
            if not isinstance(found, Prediction):
                raise UserError(
                    f"{place_of(own)}: predict returned {type(found).__name__}, expected podium.Prediction(pictures, "
                    "tables)"
                )
            return found
        from podium.workloads.own.predict import default_prediction  # draws with matplotlib, slow to import

        return default_prediction(self, model, outputs, folder, self._loss.kind)

    def _given(self, name: str) -> Any:
        return getattr(self._own, name, None)


def default_stages(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of a Sequential, else the model as a whole."""
    # Transforms derive classes of their own, with another forward, from the one that was built.
    built = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("podium."))
    if isinstance(model, nn.Sequential) and len(model) and built.forward is nn.Sequential.forward:  # type: ignore[attr-defined]
        return [(f"{name} {type(child).__name__}", child) for name, child in model.named_children()]
    return [(type(model).__name__, model)]


def drawn(source: Source, num_samples: int) -> dict[str, Tensor]:
    """Return the first samples of a source as a batch; they are repeated where there are too few."""
    buffers = empty_buffers(source.fields, num_samples)
    numbers: Sequence[int] = [number % len(source) for number in range(num_samples)]
    start_gather(source, SampleRequest(np.array(numbers, dtype=np.int64)), buffers)()
    return {name: torch.from_numpy(rows) for name, rows in buffers.items()}


class _Called(BaseException):  # not an Exception, so that no user's code catches it
    def __init__(self, args: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.named = args, named


class _Recorder(nn.Module):
    """A stand-in for the model that says what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.training = False

    def forward(self, *args: Tensor, **named: Any) -> None:
        raise _Called(args, named)
