"""Carries out a job on a stage, has something happen to it three times, and compares its weights with those of a
training that nothing happened to."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from podium.check.trials import Trials
from podium.checkpoints.reading import checkpoint_paths
from podium.errors import UserError
from podium.machine.bounded_files import open_regular
from podium.rehearse.stage import Event, Stage
from podium.runs.folder import Run

EVENTS: tuple[Event, ...] = ("preempted", "timed out", "loses a node")
_POLL_S = 0.02
#: a job that makes no progress for so long after an event has not survived it
_PATIENCE_S = 300.0
_TAIL_BYTES = 1 << 14
#: records after the loss of a host that show that the others go on: what all had summed before it gives one or two
_SURELY_FURTHER = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one event."""

    event: str
    good: bool
    #: the update that training had reached; the one that was saved; seconds until training was further than before
    reached: int = 0
    saved: int = 0
    lost_s: float = 0.0
    found: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """All of it."""

    outcomes: tuple[Outcome, ...]
    sha256: str
    undisturbed: str
    total_s: float

    @property
    def good(self) -> bool:
        """Whether the job would survive, with the weights that it should have."""
        return all(one.good for one in self.outcomes) and self.sha256 == self.undisturbed != ""


def undisturbed(folder: Path, name: str, overrides: list[str]) -> tuple[str, float]:
    """Return the weights of a training on one instance, and the seconds of one update; raise UserError where it
    does not train."""
    folder.mkdir()
    trial = Trials(folder, name, overrides).train(1)
    if trial.problem:
        raise UserError(f"the recipe does not train here, before anything happens to it: {trial.problem}")
    summary = trial.run.summary()
    seconds = summary["seconds"]
    training_s = seconds["train"] + seconds["input_wait"] + seconds["communication"]
    return trial.sha256, training_s / max(1, summary["updates"])


def carry_out(
    stage: Stage,
    run: Run,
    num_updates: int,
    expected: str,
    tell: Callable[[str, int], None] = lambda what, update: None,
) -> Rehearsal:
    """Run the job of a stage to its end, with every event on the way; `tell` hears how far it is."""
    began, outcomes = time.monotonic(), []
    try:
        stage.begin()
        for number, event in enumerate(EVENTS, 1):
            at = number * num_updates // (len(EVENTS) + 1)
            if not _until(stage, lambda at=at: _last_update(run) >= at, tell, f"next: {event}", run):  # type: ignore[misc]
                outcomes.append(Outcome(event, False, found="the job ended before it"))
                continue
            outcomes.append(_survived(stage, run, event, tell))
        _until(stage, lambda: False, tell, "to its end", run)
        problem = stage.problem()
        sha256 = "" if problem else str(run.summary().get("weights_sha256", ""))
        if problem:
            outcomes.append(Outcome("comes to its end", False, found=problem))
    finally:
        stage.end()
    return Rehearsal(tuple(outcomes), sha256, expected, time.monotonic() - began)


def _survived(stage: Stage, run: Run, event: Event, tell: Callable[[str, int], None]) -> Outcome:
    starts, began = stage.starts, time.monotonic()
    stage.play(event)
    reached = _last_update(run)

    def goes_on() -> bool:
        """Return whether the other hosts train further without the one that is lost."""
        return event == "loses a node" and sum(update > reached for update in _updates(run)) >= _SURELY_FURTHER

    survives = _until(stage, lambda: stage.starts > starts or goes_on(), tell, f"{event}, going on", run)
    if not survives and (event != "loses a node" or stage.problem()):
        return Outcome(event, False, reached, found=stage.problem() or "it did not start again")
    if stage.starts == starts:
        return Outcome(event, True, reached, reached, time.monotonic() - began)
    saved = max((int(path.name.rpartition("-")[2]) for path in checkpoint_paths(run.checkpoints)), default=0)
    reached = max(reached, saved)
    if not _until(stage, lambda: _last_update(run) > reached, tell, f"{event}, going on", run):
        return Outcome(event, False, reached, saved, found=stage.problem() or "it made no more progress")
    return Outcome(event, True, reached, saved, time.monotonic() - began)


def _until(stage: Stage, happened: Callable[[], bool], tell: Callable[[str, int], None], what: str, run: Run) -> bool:
    """Return whether it happened before the job ended; True also where it happened with the job's end."""
    deadline, update = time.monotonic() + _PATIENCE_S, -1
    while stage.step():
        if happened():
            return True
        if (now := _last_update(run)) != update:
            deadline, update = time.monotonic() + _PATIENCE_S, now
            tell(what, now)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return happened()


def _last_update(run: Run) -> int:
    """Return the update of the last complete record."""
    return next(reversed(_updates(run)), 0)


def _updates(run: Run) -> list[int]:
    """Return the updates of the last complete records; the file is being written by somebody else."""
    try:
        with open_regular(run.metrics_file) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:
        with suppress(ValueError, KeyError, TypeError):
            found.append(int(json.loads(line)["update"]))
    return found
