"""Carries a study out: starts what is due, takes in what has ended, tries again what has crashed, stops when asked.

The only writer of `runs.jsonl`; called with the study's lock held. What is done next is decided in `steps.py`.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from podium.errors import UserError, writing
from podium.machine.signals import stop_signals_heard
from podium.recipe.loading import Recipe, to_yaml
from podium.runs.folder import Run, replace_file
from podium.runs.recipe_changes import may_change
from podium.study.changes import differing_keys
from podium.study.definition import StudySection, run_recipe
from podium.study.display import StudyDisplay
from podium.study.executor import Executor
from podium.study.folder import StudyFolder, now, read_tail
from podium.study.outcomes import MetricMissing, missing_metric, read_constraints, read_outcome, updates_of
from podium.study.records import RecordLog, RunRecord
from podium.study.steps import Steps, Task, new_points, new_runs, next_steps

#: how a run's process ends when it was stopped and has saved, and when another try would end in the same way
_SAVED, _MISTAKE, _TRAINING_FAILED = 75, 2, 3
_WRITE_FACTS_EVERY_S = 15.0


@dataclass
class Active:
    """A run that is being trained."""

    task: Task
    words: list[str]
    began: float = field(default_factory=time.monotonic)
    log_from: int = 0


@dataclass(frozen=True)
class End:
    """How the work on a study ended: complete, or by a signal, or because its time is used up."""

    steps: Steps
    stopped_by: str = ""
    out_of_time: bool = False


class Conductor:
    """The work on one study, from one command to its end."""

    def __init__(
        self,
        folder: StudyFolder,
        study: StudySection,
        base: Recipe,
        executor: Executor,
        display: StudyDisplay,
        retries: int,
    ) -> None:
        self._folder, self._study, self._base = folder, study, base
        self._executor, self._display, self._retries = executor, display, retries
        self.log = RecordLog(folder.records_file)
        self._active: dict[int, Active] = {}
        #: runs that cannot be grown, and so are trained from the start
        self._anew: set[int] = set()
        self._stopped_by, self._asked_again = "", False
        self._seconds_before = folder.facts().seconds
        self._began = self._facts_at = time.monotonic()

    def run(self) -> End:
        """Work until the study is complete, its time is used up, or a signal asks to stop."""
        with self._listening():
            try:
                self._reopen()
                return self._work()
            except BaseException:
                self._end_all("the study ended with an error")
                raise
            finally:
                self._folder.write_facts(seconds=round(self._seconds(), 1))

    def _work(self) -> End:
        while True:
            steps = next_steps(self._study, self.log.records)
            if self._stopped_by or self._out_of_time():
                self._end_all(self._stopped_by or "the time is used up")
                return End(next_steps(self._study, self.log.records), self._stopped_by, not self._stopped_by)
            if steps.complete:
                return End(steps)
            if steps.prune:
                self._put(*(self.log.records[number].but(state="pruned", reason="") for number in steps.prune))
                continue
            if steps.suggest:
                self._suggest(steps.suggest)
                continue
            for task in steps.tasks:
                if not self._executor.has_room():
                    break
                if task.number not in self._active:
                    self._start(task)
            ended = self._executor.wait()
            for number, code in ended.items():
                self._take_in(number, code)
            self._look_at_metrics()
            self._refresh()
            self._keep_time(at_once=bool(ended))

    # --- what is to be done -------------------------------------------------------------------------------------------

    def _suggest(self, points: list[int]) -> None:
        """Give the next points their values, and their runs numbers, before anything of it is started."""
        if self._study.method == "grid":
            chosen = new_points(self._study, self.log.records)
        else:
            from podium.study.suggest import suggest

            chosen = [(point, values) for point, values in suggest(self._study, self.log.records, points)]
        self._put(*new_runs(self._study, self.log.records, chosen, self._base.seed))

    def _reopen(self) -> None:
        """Bring records from before up to this definition: more seeds, another metric, longer trainings."""
        known = self.log.records
        if known:
            self._put(*new_runs(self._study, known, [], self._base.seed))
        changed = []
        for record in known.values():
            varied = "train.length" in record.values
            length = str((self._recipe(record) if varied else self._base).train.length)
            if record.length and record.length != length:
                # Of the longer run nothing is known yet; the shorter one's folder says what there was.
                changed.append(_forgotten(record, length))
            elif record.state == "finished" and self._folder.run(record.number).metrics_file.exists():
                read = self._finished(record)
                if (read.metric, read.value, read.constraints) != (record.metric, record.value, record.constraints):
                    changed.append(read)
        self._put(*changed)

    def retry_failed(self) -> int:
        """Let all runs that have failed begin once more; return how many these are."""
        failed = [record for record in self.log.records.values() if record.state == "failed"]
        self._put(*(record.but(state="waiting", attempts=0, reason="", rungs=[]) for record in failed))
        return len(failed)

    def choose_all(self) -> list[int]:
        """Give all runs their values and write their recipes, for others to train; return those that are not settled.

        Only for studies whose choices do not depend on results.
        """
        steps = next_steps(self._study, self.log.records)
        if steps.suggest:
            self._suggest(steps.suggest)
        waiting = [record for record in self.log.records.values() if not record.settled]
        for record in waiting:
            replace_file(self._folder.recipe_file(record.number), to_yaml(self._recipe(record).tree()).encode())
        return [record.number for record in waiting]

    def collect(self) -> None:
        """Take in runs that others have trained, as far as they have ended, and write the table."""
        for record in list(self.log.records.values()):
            run = self._folder.run(record.number)
            state = str(run.summary().get("state", ""))
            if record.settled or not state:
                continue
            if state == "done":
                self._put(self._finished(record.but(length=str(self._recipe(record).train.length))))
            elif state == "failed":
                self._put(self._facts(record, run).but(state="failed", reason="its job failed; see its log"))
        self._folder.write_table(self._study, self.log.records)

    # --- one run ------------------------------------------------------------------------------------------------------

    def _start(self, task: Task) -> None:
        record = self.log.records[task.number]
        recipe, run = self._recipe(record), self._folder.run(task.number)
        if run.state() == "done" and not self._differing(run, recipe):
            self._put(self._finished(record.but(length=str(recipe.train.length))))
            return
        if run.state() == "running":  # a process of an earlier command is still ending
            return
        words = self._words(task, run, recipe)
        replace_file(self._folder.recipe_file(task.number), to_yaml(recipe.tree()).encode())
        log = self._folder.log_file(task.number)
        self._put(
            record.but(
                state="running",
                reason="",
                attempts=max(1, record.attempts),
                length=str(recipe.train.length),
                started=record.started or now(),
                ended=None,
            )
        )
        self._active[task.number] = Active(task, words, log_from=log.stat().st_size if log.exists() else 0)
        self._executor.start(task.number, words, log)

    def _words(self, task: Task, run: Run, recipe: Recipe) -> list[str]:
        """Return the command that begins a run, continues it, or grows it to another length."""
        until = [] if task.until is None else ["--until", str(task.until)]
        instances = self._study.instances or recipe.parallel.num_stages
        more = ["--instances", str(instances), *until]
        if run.recipe_file.is_file():
            differing = self._differing(run, recipe)
            if not differing:
                return ["resume", str(run.path), *more]
            if differing != ["train.length"]:
                raise UserError(f"{run.path} was trained with another {differing[0]}: move it away, or undo that")
            self._set_aside(run)
        elif run.path.exists():
            shutil.rmtree(run.path)  # what a kill has left of a folder that was being made
        earlier = self._earlier(task.number)
        if earlier is not None and task.number not in self._anew and not until:
            length = f"train.length={recipe.train.length}"
            return ["extend", str(earlier), length, "--only-exact", "--out", str(run.path), *more]
        return ["train", str(self._folder.recipe_file(task.number)), "--out", str(run.path), *more]

    def _set_aside(self, run: Run) -> None:
        """Move a run that will be grown out of the way; it stays as it is."""
        target = self._folder.earlier / f"{run.path.name}-{run.tree()['train']['length']}"
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(run.path)  # the same training, already kept
            else:
                run.path.rename(target)

    def _earlier(self, number: int) -> Path | None:
        """Return the run that this one was before it was to be longer, if there is one."""
        found = sorted(self._folder.earlier.glob(f"{number:04d}-*"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None

    def _differing(self, run: Run, recipe: Recipe) -> list[str]:
        """Return the keys in which a run's recipe is not the one wanted now."""
        return [key for key in differing_keys(run.tree(), recipe.tree()) if not may_change(key)]

    def _recipe(self, record: RunRecord) -> Recipe:
        return run_recipe(self._study, record.values, None if "seed" in record.values else record.seed)

    # --- how it ended -------------------------------------------------------------------------------------------------

    def _take_in(self, number: int, code: int, *, stopping: str = "") -> None:
        active = self._active.pop(number)
        record, run = self.log.records[number], self._folder.run(number)
        seconds = round(record.seconds + time.monotonic() - active.began, 1)
        record = record.but(ended=now(), seconds=seconds)
        text = read_tail(self._folder.log_file(number), active.log_from)
        if code == 0:
            self._put(self._finished(record))
        elif code == _SAVED and active.task.until is not None and self._is_there(run, active.task):
            value = read_outcome(self._study, run, active.task.until).taken(self._study)
            rungs = [*record.rungs[: (active.task.rung or 1) - 1], value]
            facts = self._facts(record, run)
            self._put(facts.but(state="stopped", reason=f"compared at {active.task.until}", rungs=rungs, value=value))
        elif stopping:
            self._put(record.but(state="stopped", reason=stopping))
        elif active.words[0] == "extend" and code == _MISTAKE and not run.path.exists():
            self._anew.add(number)
            self._display.say(f"run {number} is trained from the start, as {_last_sentence(text, code)}")
            self._put(record.but(state="waiting", ended=None, seconds=0.0))
        elif code == _MISTAKE and number == min(self.log.records):
            # Most likely it is one of the whole study: nothing else is worth starting.
            self._put(record.but(state="waiting", reason=_last_sentence(text, code)))
            raise UserError(f"run {number}: {_last_sentence(text, code)}")
        elif self._is_final(code) or record.attempts > self._retries:
            self._put(self._facts(record, run).but(state="failed", reason=_last_sentence(text, code)))
        else:
            self._display.say(
                f"run {number} has crashed ({_last_sentence(text, code)}) and is tried again "
                f"({record.attempts} of {self._retries})"
            )
            reason = _last_sentence(text, code)
            crashes = [*record.crashes, reason]
            self._put(record.but(state="stopped", reason=reason, attempts=record.attempts + 1, crashes=crashes))

    def _is_final(self, code: int) -> bool:
        """Return whether another try would end in the same way. Of several instances, one may have been lost."""
        return code == _MISTAKE or (code == _TRAINING_FAILED and (self._study.instances or 1) == 1)

    def _is_there(self, run: Run, task: Task) -> bool:
        """Return whether a run that has stopped is where it was to be compared."""
        assert task.until is not None
        updates = int(run.summary().get("updates", 0))
        return updates > 0 and updates >= updates_of(task.until, run)

    def _finished(self, record: RunRecord) -> RunRecord:
        run = self._folder.run(record.number)
        outcome = read_outcome(self._study, run)
        return self._facts(record, run).but(
            state="finished",
            reason="",
            metric=self._study.metric,
            value=outcome.taken(self._study),
            best=outcome.best,
            last=outcome.last,
            constraints=read_constraints(self._study, run),
            ended=record.ended or now(),
        )

    def _facts(self, record: RunRecord, run: Run) -> RunRecord:
        summary = run.summary()
        return record.but(
            metric=self._study.metric,
            updates=summary.get("updates"),
            samples_per_second=summary.get("samples_per_second"),
            weights_sha256=summary.get("weights_sha256"),
        )

    def _look_at_metrics(self) -> None:
        """Raise as soon as a run has validated without recording the metric of the study."""
        kind = self._study.metric.partition("/")[0]
        for number in self._active:
            if number in self._display.checked:
                continue
            names = self._display.recorded(self._folder.run(number))
            if self._study.metric in names:
                self._display.checked.add(number)
            elif (kind == "train" and any(name.startswith("train/") for name in names)) or any(
                name.startswith("valid/") for name in names
            ):
                raise missing_metric(self._study, names)

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _end_all(self, reason: str) -> None:
        """Have everything that runs save and end, and note that it can be continued."""
        if self._executor.running():
            self._display.say(f"{reason}: the runs save and stop; Ctrl-C once more ends them at once")
        self._executor.end()
        while self._executor.running():
            for number, code in self._executor.wait().items():
                if number in self._active:
                    try:
                        self._take_in(number, code, stopping=reason)
                    except MetricMissing:
                        continue
            self._refresh()
            if self._asked_again:
                self._executor.kill()

    def _refresh(self) -> None:
        seconds = {number: time.monotonic() - active.began for number, active in self._active.items()}
        self._display.refresh(self._study, self.log.records, self._folder, self._seconds(), seconds)

    def _put(self, *records: RunRecord) -> None:
        self.log.put(*records)
        self._display.changed(self._study, self.log.records, records)

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def _out_of_time(self) -> bool:
        return self._study.budget.time is not None and self._seconds() >= self._study.budget.time

    def _keep_time(self, *, at_once: bool) -> None:
        if at_once or time.monotonic() >= self._facts_at + _WRITE_FACTS_EVERY_S:
            self._facts_at = time.monotonic()
            self._folder.write_facts(seconds=round(self._seconds(), 1))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Note signals that ask to stop. A second SIGINT ends the runs without saving, a third this process, too."""

        def hear(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self._asked_again:
                self._executor.kill()
                self._display.restore_terminal()
                os._exit(130)
            self._asked_again |= number == signal.SIGINT and bool(self._stopped_by)
            self._stopped_by = self._stopped_by or signal.Signals(number).name

        with stop_signals_heard(hear):
            yield


def _forgotten(record: RunRecord, length: str) -> RunRecord:
    return RunRecord(
        number=record.number,
        point=record.point,
        state="waiting",
        values=record.values,
        seed=record.seed,
        reason=f"grows from {record.length} to {length}",
        length=length,
        seconds=record.seconds,
    )


def _last_sentence(text: str, code: int) -> str:
    """Return why a process ended, from the end of what it printed."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" if -code in {*signal.Signals} else f"killed by signal {-code}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix("podium: ") for line in lines if line.startswith("podium: ")]
    return (own or lines or [f"exit code {code}"])[-1][:300]
