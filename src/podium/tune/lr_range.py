"""A learning-rate range test: `podium tune RECIPE --lr`.

The recipe trains from its initial weights while the rate rises by the same factor every update, until the loss
diverges. Where the smoothed loss falls fastest is a good rate to begin with; where it is lowest, training is about to
break. Losses are those of an ordinary training, so the result is the same on every call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.training.build import Training, build_training
from podium.training.feeding import build_engine, samples_of_updates
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

_LOWEST, _HIGHEST = 1e-7, 10.0
#: weight of what came before in the smoothed loss
_SMOOTHING = 0.9
#: the test ends once the smoothed loss is this many times the lowest so far
_DIVERGED = 4.0
#: the first losses say little: the smoothed loss still settles
_SETTLING = 10


@dataclass(frozen=True)
class RangeTest:
    """Learning rates with the loss at each and the smoothed loss up to it."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def steepest(self) -> float | None:
        """The rate at which the smoothed loss falls fastest over a factor of the rate; None where it never falls."""
        end = self._lowest_at()
        slopes = {
            index: self.smoothed[index + 1] - self.smoothed[index - 1]
            for index in range(min(_SETTLING, end), end)
            if index
        }
        falling = {index: slope for index, slope in slopes.items() if slope < 0}
        return self.rates[min(falling, key=falling.__getitem__)] if falling else None

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss is lowest."""
        return self.rates[self._lowest_at()]

    def _lowest_at(self) -> int:
        start = min(_SETTLING, len(self.smoothed) - 1)
        return min(range(start, len(self.smoothed)), key=lambda index: self.smoothed[index])


def rising_rates(num_updates: int) -> list[float]:
    """Return rates from the lowest to the highest, each the same factor above the one before."""
    factor = (_HIGHEST / _LOWEST) ** (1 / max(1, num_updates - 1))
    return [_LOWEST * factor**index for index in range(num_updates)]


def range_test(training: Training, num_updates: int, display: console.Display | None = None) -> RangeTest:
    """Train with a rising rate; stop early where the loss diverges."""
    display = display or console.NoDisplay()
    engine = build_engine(training)
    found = RangeTest([], [], [])
    mean = 0.0
    with samples_of_updates(training, 0, num_updates) as all_samples:
        for update, (samples, rate) in enumerate(zip(all_samples, rising_rates(num_updates), strict=True)):
            engine.update(update, samples, rate)
            loss = engine.collect().means()["loss"]
            if not math.isfinite(loss):
                break
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
            found.rates.append(rate)
            found.losses.append(loss)
            found.smoothed.append(mean / (1 - _SMOOTHING ** (update + 1)))
            display.update(update + 1, num_updates, {"lr": number(rate), "loss": number(loss)})
            settled = found.smoothed[_SETTLING:]
            if settled and settled[-1] > _DIVERGED * min(settled) and min(settled) > 0:
                break
    return found


def tune_lr(name: str, overrides: Sequence[str], num_updates: int, plot: Path) -> None:
    """Run the test, print what it suggests, and draw it."""
    if plot.exists():
        raise UserError(f"{plot} already exists: choose another name with --plot")
    recipe = load_recipe(name, overrides)
    if recipe.parallel.num_stages > 1:
        raise UserError("the test is of one instance, which cannot be split into stages: add parallel.stages=1")
    training = build_training(recipe, fresh=True)
    with console.progress_display(what="trying rates") as display:
        found = range_test(training, num_updates, display)
    if len(found.rates) <= _SETTLING:
        raise UserError(f"the loss was not finite after {len(found.rates)} updates, though the rate was tiny")
    own = training.state.schedule.base_lr
    console.show_table(_table(name, found, own))
    draw(found, own, plot)
    console.out.print(f"plot: {plot}", soft_wrap=True)


def _table(name: str, found: RangeTest, own: float) -> Table:
    rows = [["the recipe's highest", number(own), ""]]
    if found.steepest is not None:
        rows.append(["loss falls fastest", number(found.steepest), "a rate to begin with"])
    rows.append(["loss is lowest", number(found.lowest), "about to break: stay well below"])
    rows.append(["loss has diverged, or test ends", number(found.rates[-1]), ""])
    caption = f"{len(found.rates)} updates of {name}; rates without warm-up, from its initial weights"
    return Table("learning rates", ["", "lr", ""], rows, caption)


def draw(found: RangeTest, own: float, path: Path) -> None:
    """Draw the loss against the rate."""
    from podium.ui import figures  # imports matplotlib, which takes long

    with figures.style():
        fig = figures.figure(9, 4.5)
        axes = fig.subplots()
        axes.set_xscale("log")
        axes.plot(found.rates, found.losses, color=figures.MUTED, alpha=0.4, linewidth=1, label="loss of an update")
        axes.plot(found.rates, found.smoothed, color=figures.ACCENT, label="smoothed")
        settled = found.smoothed[_SETTLING:]
        low, high = min(settled), max(settled[0], min(settled))
        axes.set_ylim(low - 0.1 * (high - low) - 1e-9, high + 0.5 * (high - low) + 1e-9)
        marks = [(own, figures.MUTED, "the recipe's highest"), (found.lowest, figures.SECOND, "lowest")]
        if found.steepest is not None:
            marks.append((found.steepest, figures.THIRD, "falls fastest"))
        for rate, colour, label in marks:
            axes.axvline(rate, color=colour, linestyle="--", linewidth=1.2, label=f"{label}: {number(rate)}")
        axes.set_title("Loss while the learning rate rises")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss")
        axes.legend(fontsize=9)
        figures.save(fig, path)
