"""One host's share of a study by ssh: it takes a run that no host has taken yet, trains it, and takes the next.

The hosts share the study's folder. A run is taken by making a file, which only one host can.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from podium.errors import UserError, system_reason
from podium.machine.signals import stop_signals_heard
from podium.runs.folder import JOB
from podium.study.collect import collect
from podium.study.executor import Executor, LocalProcesses
from podium.study.folder import StudyFolder
from podium.submit.attempts import JobFolder, newest_update
from podium.submit.studies import begin_sent
from podium.topology import usable_cores
from podium.ui.console import say

#: below the study's folder: which host has taken which run
TAKEN = f"{JOB}/taken"
_INTERRUPTED, _FAILED = 75, 3


def train_share(study: Path, host: str, at_once: int) -> int:
    """Train runs, at most `at_once` of them at the same time, until none is left; return this host's exit code."""
    definition = begin_sent(study)
    try:
        (study / TAKEN).mkdir(exist_ok=True)
        for number in range(definition.num_points * definition.num_seeds):
            JobFolder.of_element(study, number).path.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{study / JOB} cannot be written: {system_reason(error)}") from None
    share = _Share(study, host, LocalProcesses(at_once, usable_cores(), watch_memory=True))
    with share.listening():
        return share.train(iter(range(definition.num_points * definition.num_seeds)))


@dataclass
class _Share:
    """The runs of this host."""

    study: Path
    host: str
    executor: Executor
    stopping: bool = False
    codes: list[int] = field(default_factory=list)

    def train(self, numbers: Iterator[int]) -> int:
        again, told = list[int](), False
        free = (number for number in numbers if self._take(number))
        while True:
            while not self.stopping and self.executor.has_room():
                number = again.pop() if again else next(free, None)
                if number is None:
                    break
                self._start(number)
            if not self.executor.running():
                break
            if self.stopping and not told:
                self.executor.end()
                told = True
            for number, code in self.executor.wait().items():
                if self._goes_on(number, 128 - code if code < 0 else code):
                    again.append(number)
        if self.stopping:
            return _INTERRUPTED
        return _FAILED if any(self.codes) else 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have all runs save and end when this process is asked to stop."""

        def hear(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        with stop_signals_heard(hear):
            yield

    def _take(self, number: int) -> bool:
        try:
            with (self.study / TAKEN / f"{number:04d}").open("x", encoding="utf-8") as file:
                file.write(self.host)
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"{self.study / TAKEN} cannot be written: {system_reason(error)}") from None
        return True

    def _start(self, number: int) -> None:
        folder, job = StudyFolder(self.study), JobFolder.of_element(self.study, number)
        count, _ = job.begin([self.host])
        words = ["train", str(folder.recipe_file(number)), "--out", str(folder.run(number).path), "--continue"]
        say(f"run {number} on {self.host}")
        self.executor.start(number, [*words, "--instances", str(count)], job.log_file)

    def _goes_on(self, number: int, code: int) -> bool:
        """Note how a run has ended; return whether it starts again."""
        run = StudyFolder(self.study).run(number).path
        verdict = JobFolder.of_element(self.study, number).end(code, newest_update(run), [self.host])
        goes_on = verdict.action != "end" and not self.stopping
        say(f"run {number}: {verdict.reason}{': it starts again' if goes_on else ''}")
        if goes_on:
            return True
        self.codes.append(verdict.code)
        if code != _INTERRUPTED:
            try:
                collect(self.study)
            except UserError as error:  # somebody else works on the table: no reason to end what trains
                say(str(error))
        return False
