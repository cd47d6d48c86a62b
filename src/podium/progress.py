"""What a run knows about itself beside its weights: how far it is, how well it does, how fast it goes.

`train.py` keeps one `Progress`; checkpoints hold it, the console and `summary.json` are written from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from podium.clock import Clock, Utilisation
from podium.console import clock_text, number
from podium.durations import Duration
from podium.engine.update import Sums


@dataclass(frozen=True)
class Lengths:
    """How long everything is, in updates."""

    updates_per_epoch: int
    total_updates: int
    global_batch: int

    def updates(self, duration: Duration) -> int:
        return duration.updates(
            updates_per_epoch=self.updates_per_epoch, global_batch=self.global_batch, total_updates=self.total_updates
        )

    def place(self, update: int) -> dict[str, float]:
        """Where in the training update number `update` is, as every record says it."""
        return {
            "update": update,
            "epoch": update / self.updates_per_epoch,
            "samples": update * self.global_batch,
        }


@dataclass
class Progress:
    """Saved in every checkpoint, so that a resumed run remembers."""

    update: int = 0
    train_last: dict[str, float] = field(default_factory=dict)
    train_best: dict[str, float] = field(default_factory=dict)
    valid_last: dict[str, float] = field(default_factory=dict)
    valid_best: dict[str, float] = field(default_factory=dict)
    best_update: int | None = None
    #: validation of the averaged weights, where the training keeps an average
    average_last: dict[str, float] = field(default_factory=dict)
    num_averaged: int = 0
    #: losses of updates that no record holds yet (the run stopped between two records)
    pending: Sums = field(default_factory=Sums)

    def take_train(self) -> dict[str, float]:
        """The means of what is pending; nothing is pending afterwards."""
        self.train_last, self.pending = self.pending.means(), Sums()
        if self.train_last["loss"] <= self.train_best.get("loss", math.inf):
            self.train_best = self.train_last
        return self.train_last

    def take_valid(self, means: dict[str, float]) -> bool:
        """Notes a validation; True when none before was as good."""
        self.valid_last = means
        if means["loss"] < self.valid_best.get("loss", math.inf):
            self.valid_best, self.best_update = means, self.update
            return True
        return False

    def state(self) -> dict[str, Any]:
        """For the checkpoint, as JSON can hold it exactly."""
        return {**vars(self), "pending": self.pending.parts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        pending = {name: [(total, count) for total, count in parts] for name, parts in state["pending"].items()}
        return cls(**{**state, "pending": Sums(pending)})


class Meter:
    """Samples per second of training time, over the stretch since the last record."""

    def __init__(self, clock: Clock, lengths: Lengths, update: int, num_cores: int) -> None:
        self._clock, self._lengths = clock, lengths
        self._utilisation = Utilisation(num_cores)
        self._update, self._seconds = update, clock.seconds()
        self.samples_per_second = 0.0

    def record(self, update: int) -> dict[str, float]:
        now, before = self._clock.seconds(), self._seconds
        spent = training_seconds(now) - training_seconds(before)
        self.samples_per_second = (update - self._update) * self._lengths.global_batch / max(spent, 1e-9)
        self._update, self._seconds = update, now
        return {
            "train/samples_per_second": self.samples_per_second,
            "time/input_wait_s": now["input_wait"] - before["input_wait"],
            "time/total_s": now["total"],
            "device/cpu_percent": self._utilisation.percent(),
        }


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Time spent on updates, with what they waited for."""
    return seconds["train"] + seconds["input_wait"] + seconds["communication"]


def facts(progress: Progress, lengths: Lengths, samples_per_second: float) -> dict[str, str]:
    """What the progress line says."""
    left_s = (lengths.total_updates - progress.update) * lengths.global_batch / samples_per_second
    num_epochs = lengths.total_updates / lengths.updates_per_epoch
    shown = {"epoch": f"{progress.update / lengths.updates_per_epoch:.1f}/{num_epochs:.4g}"}
    shown |= {f"train {name}": number(value) for name, value in progress.train_last.items()}
    shown |= {f"valid {name}": number(value) for name, value in progress.valid_last.items()}
    return {**shown, "samples/s": number(samples_per_second), "left": clock_text(left_s)}


def summary(progress: Progress, lengths: Lengths, seconds: Mapping[str, float], state: str) -> dict[str, Any]:
    """The part of `summary.json` that progress is made of."""
    place = lengths.place(progress.update)
    training_s = training_seconds(seconds)
    best_at = {} if progress.best_update is None else {"update": progress.best_update}
    return {
        "state": state,
        "updates": progress.update,
        "epochs": place["epoch"],
        "samples": place["samples"],
        "total_updates": lengths.total_updates,
        "train": {"last": progress.train_last, "best": progress.train_best},
        "valid": {"last": progress.valid_last, "best": progress.valid_best | best_at},
        **({"average": progress.average_last | {"weights": progress.num_averaged}} if progress.num_averaged else {}),
        "samples_per_second": place["samples"] / training_s if training_s > 0 else 0.0,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }
