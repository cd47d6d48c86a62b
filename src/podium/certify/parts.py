"""The parts of a certificate: operators that repeat, equal weights, rates. `commands/certify.py` puts them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.certify.recipes import tiny
from podium.check.operators import first_difference, record_replica
from podium.check.trials import Trials, first_differing_update, quick_overrides
from podium.profiling.rates import measured_rates
from podium.recipe.loading import load_recipe
from podium.training.build import build_training

PRECISIONS = ("32.32", "16.32", "16.16")
_NUM_UPDATES, _KILLED_AFTER = 4, 2


@dataclass(frozen=True)
class Found:
    """What was found of one workload in one number format."""

    workload: str
    precision: str
    question: str
    good: bool
    text: str = ""


def overrides_of(workload: str, precision: str) -> tuple[str, list[str]]:
    """Return the recipe's name and everything that makes it tiny and short."""
    name, overrides = tiny(workload)
    overrides = [*overrides, f"precision.mode={precision}"]
    return name, [*overrides, *quick_overrides(load_recipe(name, overrides), _NUM_UPDATES)]


def operators(workload: str, precision: str) -> Found:
    """Run a replica's passes twice, and compare every operator's outputs bit for bit."""
    name, overrides = overrides_of(workload, precision)
    first, again = record_replica(load_recipe(name, overrides), after_others=False, times=2)
    difference = first_difference(first, again)
    names = {event.name for event in first.events if event.kind == "operator"}
    text = difference.sentence() if difference else f"{len(names)} kinds, {len(first.events)} outputs and gradients"
    return Found(workload, precision, "every operator repeats its bits", difference is None, text)


def trainings(workload: str, precision: str, counts: Sequence[int], folder: Path) -> list[Found]:
    """Train twice, on several numbers of instances, and with a kill; compare the weights."""
    name, overrides = overrides_of(workload, precision)
    folder.mkdir(parents=True)
    trials = Trials(folder, name, overrides)
    first = trials.train(1)
    if first.problem:
        return [Found(workload, precision, "trains", False, first.problem)]
    found = [Found(workload, precision, "trains", True, first.sha256)]
    asked = {"the same weights when trained again": trials.train(1)}
    asked |= {f"the same weights on {count} instances": trials.train(count) for count in counts if count > 1}
    asked[f"the same weights after a kill, resumed on {max(counts)}"] = trials.train_killed(
        1, max(counts), _KILLED_AFTER
    )
    for question, trial in asked.items():
        good = not trial.problem and trial.sha256 == first.sha256
        text = trial.problem or ("" if good else first_differing_update(first.run, trial.run) or "the weights differ")
        found.append(Found(workload, precision, question, good, text))
    return found


def rates(workload: str, seconds: float) -> dict[str, float]:
    """Return samples per second of the recipe as it is shipped, on one instance, with generated samples: with the
    settings of exact and of fast reduction."""
    name, _ = tiny(workload)
    found = {}
    for reduction in ("exact", "fast"):
        words = ["workload.data.source=generated", f"engine.reduction={reduction}", "engine.tune=off"]
        found[reduction] = measured_rates(build_training(load_recipe(name, words)), seconds).both
    return found


def rates_together(workload: str, count: int, folder: Path) -> dict[str, float]:
    """Return samples per second of several instances, with exact and with fast reduction."""
    name, _ = tiny(workload)
    folder.mkdir(parents=True)
    recipe = load_recipe(name, ["workload.data.source=generated"])
    short = [*quick_overrides(recipe, 40, every=40), "engine.updates_per_call=20", "schedule.warmup=0up"]
    trials = Trials(folder, name, ["workload.data.source=generated", f"batch.replicas={count}", *short])
    found = {}
    for reduction in ("exact", "fast"):
        trial = trials.train(count, f"engine.reduction={reduction}")
        if not trial.problem:
            found[reduction] = float(trial.run.summary()["samples_per_second"])
    return found
