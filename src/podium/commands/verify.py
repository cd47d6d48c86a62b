"""`podium verify RUN`: makes updates of a run again and compares their records with those that the run has written.

The stretch is trained by the real command in a folder of its own, from a checkpoint of the run or from the beginning,
on any number of instances. Nothing in the run's folder is written.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.chain import LINK, WEIGHTS, linked
from podium.checkpoints import reading
from podium.checkpoints.reading import Checkpoint
from podium.checkpoints.writing import Snapshot, write
from podium.commands import train
from podium.commands.bits import (
    RecordDifference,
    different_tensors,
    first_difference,
    has_digests,
    shared_checkpoints,
    tensor_table,
)
from podium.distributed.digest import joined_digest, tensor_digests
from podium.errors import Interrupted, UserError
from podium.launch.environment import find_place
from podium.machine.numerics import numerics_variables
from podium.recipe.durations import Duration
from podium.recipe.loading import Recipe, recipe_with, to_yaml
from podium.runs import observer_code, own_code
from podium.runs.folder import Run, differing_conditions, open_run
from podium.runs.recipe_changes import changed_keys
from podium.training.stop_request import StopRequest
from podium.ui.console import clock_text, out, say, show_table, warn

#: what others would see of a training is left out
_QUIET: dict[str, Any] = {
    "log.tensorboard": False,
    "log.report": False,
    "log.monitor": False,
    "log.wandb": "off",
    "log.mlflow": "off",
    "log.trackio": "off",
    "log.observers": (),
    "train.time_limit": None,
    "engine.audit": 0.0,
}
_STRETCH = re.compile(r"(\d{0,18}):(\d{0,18})")

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stretch:
    """Updates that are made again: those after `first`, up to and with `last`, both of which have a record (or `first`
    is 0)."""

    first: int
    last: int


def verify(path: Path, updates: str | None, num_instances: str | None, keep: Path | None, stop: StopRequest) -> bool:
    """Make a stretch of a run again and print whether its records are the same; return that.

    `updates`: as in 400:450; all of them if there is none. `keep`: a new folder in which the stretch stays.
    """
    if find_place(os.environ) is not None:
        raise UserError("`podium verify` starts its own instances: call it outside of srun and torchrun")
    if keep is not None and keep.exists():
        raise UserError(f"--keep {keep}: it already exists, choose another name")
    run = open_run(path)
    records = run.records(digests=True)
    asked = _parsed(updates, run, records)
    found = _start(run, asked.first)
    stretch = Stretch(found.update if found is not None else 0, asked.last)
    recipe = _recipe(run, found)
    if not has_digests(records):
        warn(f"{path} has no digests of its weights: losses and metrics are compared")
    _warn_of_gaps(path, records)
    if found is not None and (problem := _problem_of(found, records)):
        _tell(f"the checkpoint of update {found.update} {problem}")
        return False
    with _folder(keep, run) as folder:
        _fill(folder, run, recipe, found)
        _say_what_follows(run, stretch, asked, found)
        _train(folder, num_instances, stretch.last, stop)
        return _compared(run, records, folder, stretch)


def _parsed(text: str | None, run: Run, records: Records) -> Stretch:
    """Return the stretch that is asked for: its end is moved on to where the run has a record."""
    if not records:
        raise UserError(f"{run.path} has no records yet: there is nothing to compare with")
    known = [int(record["update"]) for record in records]
    if text is None:
        return Stretch(0, known[-1])
    match = _STRETCH.fullmatch(text)
    first, last = (int(match[1] or 0), int(match[2] or known[-1])) if match else (0, 0)
    if match is None or first >= last:
        raise UserError(f"--updates {text[:80]}: expected two updates, the smaller one first, such as 400:450")
    if first >= known[-1]:
        raise UserError(f"--updates {text}: the last record of {run.path} is that of update {known[-1]}")
    if last > known[-1]:
        warn(f"the last record of {run.path} is that of update {known[-1]}")
    return Stretch(first, next((update for update in known if update >= last), known[-1]))


def _start(run: Run, first: int) -> Checkpoint | None:
    """Return the newest good checkpoint of update `first` or before; None: begin with the first update."""
    paths = reading.checkpoint_paths(run.checkpoints)
    for path in reversed(paths):
        if int(path.name.removeprefix(reading.PREFIX)) <= first:
            try:
                return reading.load(path)
            except UserError as error:
                warn(f"{error}; trying the previous one")
    if first:
        kept = ", ".join(str(int(path.name.removeprefix(reading.PREFIX))) for path in paths) or "none"
        say(
            f"{run.path} has no checkpoint of update {first} or before (there are: {kept}): starting from the beginning"
        )
    return None


def _recipe(run: Run, found: Checkpoint | None) -> Recipe:
    """Return the recipe that the run was trained with; say so first where its file was edited since."""
    state = found.state if found is not None else None
    if state is None:
        for path in reversed(reading.checkpoint_paths(run.checkpoints)):
            with _leave_out():
                state = reading.load(path).state
                break
    recipe = run.recipe()
    changed = changed_keys(recipe, state) if state is not None else []
    if changed:
        assert state is not None
        if "recipe" not in state:
            raise UserError(
                f"{run.recipe_file} has changed since the run was trained, in {changed[0]}: undo that first"
            )
        warn(f"{run.recipe_file} was edited since, and what the run was trained with is used: {'; '.join(changed[:5])}")
        recipe = run.recipe(state["recipe"])
    return recipe_with(recipe, {**_QUIET, "checkpoint.keep": recipe.checkpoint.keep + 1})


@contextmanager
def _leave_out() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        warn(str(error))


def _warn_of_gaps(path: Path, records: Records) -> None:
    """Warn of records that do not follow from each other: some are missing, or were changed."""
    before: Mapping[str, Any] | None = None
    for record in records:
        if WEIGHTS in record and LINK in record:
            if before is not None and linked(before[LINK], record["update"], record[WEIGHTS]) != record[LINK]:
                warn(
                    f"the chain of {path} is broken between updates {before['update']} and {record['update']}: records "
                    "are missing there, or were changed"
                )
            before = record


def _problem_of(found: Checkpoint, records: Records) -> str:
    """Return how a checkpoint contradicts the record of its update; empty: it does not."""
    record = next((record for record in records if record["update"] == found.update), {})
    digest = joined_digest(tensor_digests(found.weights.items()))
    if record.get(WEIGHTS, digest) != digest:
        return f"holds other weights than its record tells: {digest} instead of {record[WEIGHTS]}"
    link = found.state.get("progress", {}).get("chain", {}).get("link") or None
    if link is not None and record.get(LINK, link) != link:
        return f"has another chain than its record: {link} instead of {record[LINK]}"
    return ""


@contextmanager
def _folder(keep: Path | None, run: Run) -> Iterator[Run]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield Run(keep)
        return
    with tempfile.TemporaryDirectory(prefix="podium-verify-") as folder:
        again = Run(Path(folder) / run.path.resolve().name)
        again.path.mkdir()
        yield again


def _fill(again: Run, run: Run, recipe: Recipe, found: Checkpoint | None) -> None:
    """Prepare a run that `resume` continues: without records, so that those of the run stay apart."""
    again.recipe_file.write_text(to_yaml(recipe.tree()), encoding="utf-8")
    if run.environment_file.is_file():
        shutil.copyfile(run.environment_file, again.environment_file)
    for name in (*own_code.PLACES.values(), own_code.OBJECTS, observer_code.COPIES):
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, again.path / name)
    again.log.mkdir()
    again.checkpoints.mkdir()
    if found is not None:
        state = {**found.state, "recipe_sha256": recipe.sha256(), "recipe": recipe.tree()}
        text = json.dumps(state, indent=1).encode()
        write(again.checkpoints, Snapshot(found.update, found.weights, found.optimiser, found.average, text))
        found.forget_tensors()


def _say_what_follows(run: Run, stretch: Stretch, asked: Stretch, found: Checkpoint | None) -> None:
    num, summary = stretch.last - stretch.first, run.summary()
    origin = "the beginning" if found is None else f"the checkpoint of update {found.update}"
    took = ""
    rate, made = summary.get("samples_per_second"), summary.get("updates")
    if rate and made and summary.get("samples"):
        took = f", about {clock_text(num * summary['samples'] / made / rate)} at the rate of the run"
    say(f"making {num:,} update{'' if num == 1 else 's'} again, from {origin} to update {stretch.last}{took}")


def _train(again: Run, num_instances: str | None, last: int, stop: StopRequest) -> None:
    stop.until = Duration(last, "up")
    try:
        train.resume(again.path, [], num_instances, None, False, stop, quiet=True)
    except Interrupted as error:
        if int(again.summary().get("updates", 0)) < last:
            raise Interrupted(f"stopped before update {last}: nothing is verified ({error})") from None


def _compared(run: Run, records: Records, again: Run, stretch: Stretch) -> bool:
    """Print the verdict and return it."""
    made = again.records(digests=True)
    ours = [record for record in records if stretch.first < record["update"] <= stretch.last]
    difference, equal = first_difference(ours, made)
    compared = {record["update"] for record in made}
    missing = next((record["update"] for record in ours if record["update"] not in compared), None)
    if difference is None and missing is not None:
        _tell(f"update {missing} has a record in {run.path}, and none when it is made again")
        return False
    instances = int(made[-1].get("topology/instances", 1)) if made else 1
    on = f"on {instances} instance{'' if instances == 1 else 's'}"
    if difference is None:
        what = "weights, losses and metrics" if has_digests(ours) else "losses and metrics"
        counted = f"{len(equal)} record{' is' if len(equal) == 1 else 's are'}"
        _tell(f"{counted} equal, to update {equal[-1]}: {what}, to the bit, made again {on}")
        return True
    _tell_difference(run, again, difference, on)
    return False


def _tell_difference(run: Run, again: Run, difference: RecordDifference, on: str) -> None:
    until = "" if difference.equal_until is None else f", after equal ones up to update {difference.equal_until}"
    _tell(
        f"the record of update {difference.update} is the first that differs{until}: {difference.sentence()} "
        f"(the run's, and when made again {on})"
    )
    if begin := difference.begin():
        _tell(begin)
    equal: list[int] = []
    for theirs, ours in shared_checkpoints(run, again, difference.update):
        if different := different_tensors(theirs, ours):
            show_table(tensor_table(theirs.update, different))
            break
        equal.append(theirs.update)
    else:
        if equal:
            _tell(f"the checkpoints of update {equal[-1]} are equal to the bit: records differ, but not the weights")
        else:
            _tell(f"in which tensors is not known: {run.path} keeps no checkpoint from there on that was made again")
    recorded = run.environment()
    now = {
        "torch": torch.__version__,
        "torch_build": torch.__config__.show(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "numerics_variables": numerics_variables(os.environ),
    }
    if recorded and (differing := differing_conditions(recorded, {**recorded, **now})):
        _tell(f"the bits may differ for this reason alone: {', '.join(differing)}")


def _tell(text: str) -> None:
    out.print(text, soft_wrap=True, markup=False)
