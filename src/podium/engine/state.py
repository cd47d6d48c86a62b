"""The task of a training, and the state that checkpoints hold.

Task         the workload with its samples, and the length of the training
TrainState   everything that an update changes: weights, optimiser, schedule, loss scale, average, progress
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn

from podium.chain import Chain
from podium.contract import Workload
from podium.data.source import Source
from podium.distributed.pipeline.meta_blocks import local_tensors, remote_names
from podium.engine.loss_scale import LossScale
from podium.engine.losses import Sums
from podium.engine.saved_state import check_average, check_saved, damaged_state
from podium.errors import UserError
from podium.optim.averaging import WeightAverage
from podium.optim.optimisers import Optimiser
from podium.optim.schedules import Schedule
from podium.recipe.durations import Duration
from podium.recipe.sections.metric import BestSection, StopSection


@dataclass(frozen=True)
class Lengths:
    """The length of an epoch and of the training, in updates."""

    updates_per_epoch: int
    total_updates: int
    global_batch: int

    def updates(self, duration: Duration) -> int:
        return duration.updates(
            updates_per_epoch=self.updates_per_epoch, global_batch=self.global_batch, total_updates=self.total_updates
        )

    def place(self, update: int) -> dict[str, float]:
        """Return the position of update number `update` in the training, as given in every record."""
        return {
            "update": update,
            "epoch": update / self.updates_per_epoch,
            "samples": update * self.global_batch,
        }


@dataclass
class Progress:
    """How far the training is, with its last and best results; saved in every checkpoint, so that resumed runs keep
    it."""

    update: int = 0
    train_last: dict[str, float] = field(default_factory=dict)
    train_best: dict[str, float] = field(default_factory=dict)
    valid_last: dict[str, float] = field(default_factory=dict)
    valid_best: dict[str, float] = field(default_factory=dict)
    best_update: int | None = None
    #: of the metric that the best validation is chosen by
    best_value: float | None = None
    #: of the metric that training stops by: the best value, and validations since that did not improve it
    stop_value: float | None = None
    num_missed: int = 0
    stopped_early: bool = False
    #: the last validation of the averaged weights, where the training keeps an average
    average_last: dict[str, float] = field(default_factory=dict)
    num_averaged: int = 0
    #: losses of updates since the last record (for a run that stopped between two records)
    pending: Sums = field(default_factory=Sums)
    #: digests of the weights at all records so far
    chain: Chain = field(default_factory=Chain)

    def take_train(self) -> dict[str, float]:
        """Return the means of the pending losses; nothing is pending afterwards."""
        self.train_last, self.pending = self.pending.means(), Sums()
        if self.train_last["loss"] <= self.train_best.get("loss", math.inf):
            self.train_best = self.train_last
        return self.train_last

    def take_valid(self, means: dict[str, float], ranking: BestSection, stop: StopSection | None = None) -> bool:
        """Store the result of a validation; return whether it is the best so far. `stop`: when to stop early."""
        self.valid_last = means
        known = {**means, **{f"average_{name}": value for name, value in self.average_last.items()}}
        value = metric_of(known, ranking, "checkpoint.best.metric")
        improved = ranking.better(value, self.best_value)
        if improved:
            self.valid_best, self.best_update, self.best_value = means, self.update, value
        if stop is not None:
            value = metric_of(known, stop, "train.stop.metric")
            if stop.better(value, self.stop_value, stop.min_delta):
                self.stop_value, self.num_missed = value, 0
            else:
                self.num_missed += 1
            self.stopped_early = self.num_missed >= stop.patience
        return improved

    def last_update(self, total: int) -> int:
        """Return the update that ends the training: this one where it was stopped early, else the recipe's last."""
        return self.update if self.stopped_early else total

    def state(self) -> dict[str, Any]:
        """Return the fields for the checkpoint, as values that JSON stores exactly."""
        return {**vars(self), "pending": self.pending.parts, "chain": self.chain.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        if "best_value" not in state:  # written before there was a choice of metrics
            state = {**state, "best_value": state["valid_best"].get("loss")}
        pending = {name: [(total, count) for total, count in parts] for name, parts in state["pending"].items()}
        try:
            return cls(**{**state, "pending": Sums(pending), "chain": Chain.from_state(state.get("chain", {}))})
        except TypeError:  # keys that are no fields
            raise damaged_state("progress has keys of another version") from None


def metric_of(known: Mapping[str, float], section: BestSection, key: str) -> float:
    """Return the metric that a section of the recipe decides by; raise UserError if there is no such metric."""
    if section.name not in known:
        names = ", ".join(f"valid/{name}" for name in known)
        raise UserError(f"{key} = {section.metric}: the validation of this workload has {names}")
    return known[section.name]


@dataclass(frozen=True)
class Task:
    """The task of a training: a workload, its samples, and the length."""

    workload: Workload
    train_source: Source
    valid_source: Source
    lengths: Lengths


@dataclass
class TrainState:
    """Everything that updates change, and that a checkpoint must hold."""

    model: nn.Module
    optimiser: Optimiser
    schedule: Schedule
    loss_scale: LossScale = field(default_factory=lambda: LossScale(1.0))
    progress: Progress = field(default_factory=Progress)
    #: average of the weights, where the recipe asks for one
    average: WeightAverage | None = None

    def state(self) -> dict[str, Any]:
        """Return everything but the tensors, as values that JSON stores exactly."""
        return {
            "schedule": self.schedule.state(),
            "progress": self.progress.state(),
            "loss_scale": self.loss_scale.state(),
        }

    def load(self, saved: Mapping[str, Any], average: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; raise UserError if `saved` is something else.

        Weights and optimiser state are restored by the checkpoint itself.
        """
        self.load_facts(saved)
        if self.average is not None:
            elsewhere = remote_names(self.model)
            held = {name: tensor for name, tensor in average.items() if name not in elsewhere}
            check_average(held, local_tensors(self.model))
            self.average.load(held, self.progress.num_averaged)

    def load_facts(self, saved: Mapping[str, Any]) -> None:
        """Restore everything but tensors."""
        check_saved(saved)
        self.progress = Progress.from_state(saved["progress"])
        try:
            self.schedule.load(saved["schedule"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise damaged_state("schedule does not hold what it should") from None
        if saved.get("loss_scale") is not None:
            self.loss_scale.load(saved["loss_scale"])

    def take_average(self, model: nn.Module) -> None:
        """Add the weights of `model`, the whole model, to the average."""
        assert self.average is not None
        self.average.take(local_tensors(model))
        self.progress.num_averaged = self.average.num_taken
