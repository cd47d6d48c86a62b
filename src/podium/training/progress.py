"""The speed of a run, and its progress as shown on the console and in `summary.json`."""

from collections.abc import Mapping
from typing import Any

from podium.engine.state import Lengths, Progress
from podium.recipe.sections.metric import StopSection
from podium.topology import usable_cores
from podium.training.build import Training
from podium.training.clock import Clock, Utilisation
from podium.ui.console import clock_text, number


class Meter:
    """Samples per second of training time since the last record, and on what they were trained."""

    def __init__(self, clock: Clock, lengths: Lengths, update: int, training: Training) -> None:
        self._clock, self._lengths, self._training = clock, lengths, training
        self._utilisation = Utilisation(len(usable_cores()))
        self._update, self._seconds = update, clock.seconds()
        self.samples_per_second = 0.0

    def record(self, update: int) -> dict[str, float]:
        now, before = self._clock.seconds(), self._seconds
        spent = training_seconds(now) - training_seconds(before)
        if update > self._update:  # else this record is made again
            self.samples_per_second = (update - self._update) * self._lengths.global_batch / max(spent, 1e-9)
        self._update, self._seconds = update, now
        topology = self._training.placement.topology.record()
        return {
            "train/samples_per_second": self.samples_per_second,
            "time/input_wait_s": now["input_wait"] - before["input_wait"],
            "time/total_s": now["total"],
            "device/cpu_percent": self._utilisation.percent(),
            **{f"topology/{name}": topology[name] for name in ("hosts", "instances")},
        }


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the time spent on updates, including their waits."""
    return seconds["train"] + seconds["input_wait"] + seconds["communication"]


def facts(progress: Progress, lengths: Lengths, samples_per_second: float) -> dict[str, str]:
    """Return the fields of the progress line."""
    left_s = (lengths.total_updates - progress.update) * lengths.global_batch / samples_per_second
    num_epochs = lengths.total_updates / lengths.updates_per_epoch
    if num_epochs < 1:
        shown = {"update": f"{progress.update:,}/{lengths.total_updates:,}"}
    else:
        shown = {"epoch": f"{progress.update / lengths.updates_per_epoch:.1f}/{num_epochs:.4g}"}
    shown |= {f"train {name}": number(value) for name, value in progress.train_last.items()}
    shown |= {f"valid {name}": number(value) for name, value in progress.valid_last.items()}
    return {**shown, "samples/s": number(samples_per_second), "left": clock_text(left_s)}


def early_end(progress: Progress, stop: StopSection | None) -> str:
    """Return a sentence about a training that has stopped early."""
    assert stop is not None
    best = "" if progress.stop_value is None else f" on {number(progress.stop_value)}"
    return (
        f"stopped early after update {progress.update}: {stop.metric} has not improved{best} for "
        f"{progress.num_missed} validations"
    )


def summary(progress: Progress, lengths: Lengths, seconds: Mapping[str, float], state: str) -> dict[str, Any]:
    """Return the part of `summary.json` that describes progress."""
    place = lengths.place(progress.update)
    training_s = training_seconds(seconds)
    best_at = {} if progress.best_update is None else {"update": progress.best_update}
    return {
        "state": state,
        "updates": progress.update,
        "epochs": place["epoch"],
        "samples": place["samples"],
        "total_updates": lengths.total_updates,
        **({"stopped_early": True} if progress.last_update(lengths.total_updates) < lengths.total_updates else {}),
        "train": {"last": progress.train_last, "best": progress.train_best},
        "valid": {"last": progress.valid_last, "best": progress.valid_best | best_at},
        **({"average": progress.average_last | {"weights": progress.num_averaged}} if progress.num_averaged else {}),
        "samples_per_second": place["samples"] / training_s if training_s > 0 else 0.0,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }


def named(prefix: str, means: Mapping[str, float], separator: str = "/") -> dict[str, float]:
    """Return metrics by their names in a record."""
    return {f"{prefix}{separator}{name}": value for name, value in means.items()}
