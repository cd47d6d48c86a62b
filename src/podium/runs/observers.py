"""A user's own loggers and pictures: told what happens in a training, without a way to change it.

Named in a recipe (`log.observers`) or handed to `podium.fit`. Instance 0 calls them, between two updates.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from podium.contract import Workload
from podium.errors import Interrupted, UserError
from podium.machine.process_state import process_state_kept
from podium.machine.signals import TookTooLong, limited_time
from podium.recipe.sections.log import LogSection
from podium.runs.folder import Run
from podium.ui.user_frames import describe, user_frames
from podium.workloads.registry import fitted_observers, observer_class, short_name


class Observer:
    """What watches a training: a class with any of these four methods, derived from this one or not.

    Whatever a method is given is a copy of its own, and what it sets for the whole process (random states, threads, the
    working folder, …) is put back. One that raises, or takes too long, is switched off with a warning, and the training
    goes on. `run` is the run's folder.
    """

    def on_record(self, run: Path, record: dict[str, float]) -> None:
        """Take a record of `metrics.jsonl`: `update`, `epoch`, `samples`, `train/loss`, `train/lr`, …"""

    def on_validation(self, run: Path, update: int, metrics: dict[str, float]) -> None:
        """Take loss and metrics of a validation, by their names without `valid/`."""

    def on_checkpoint(self, run: Path, update: int, path: Path) -> None:
        """Take the folder of a checkpoint, once it is on the disk: `podium.load(run, checkpoint=update)` reads it."""

    def on_end(self, run: Path, summary: dict[str, Any]) -> None:
        """Take `summary.json` of a run that has ended: its `state` is done, interrupted or failed."""


#: those that `podium.fit` was given
_given: ContextVar[Sequence[Any]] = ContextVar("podium_observers", default=())


@contextmanager
def watched_by(observers: Sequence[Any]) -> Iterator[None]:
    """Have objects of this session watch the trainings that begin in this context."""
    before = _given.set(tuple(observers))
    try:
        yield
    finally:
        _given.reset(before)


class Observers:
    """All that watch one training. A context manager: on exit they are told that it has ended."""

    def __init__(
        self,
        section: LogSection,
        run: Run,
        warn: Callable[[str], None],
        workload: Workload | None = None,
        lead: bool = True,
    ) -> None:
        """Make an object of every class that `section` names, on instance 0. `workload`: what is trained."""
        self._run, self._warn, self._limit_s = run, warn, section.observer_timeout
        self._all: dict[str, Any] = {}
        for name in section.observers if lead else ():
            self._add(short_name(name), lambda name=name: observer_class(name)())  # type: ignore[misc]
        for observer in (*_given.get(), *fitted_observers(workload)) if lead else ():
            self._add(type(observer).__name__, lambda observer=observer: observer)  # type: ignore[misc]

    def record(self, record: Mapping[str, float]) -> None:
        """Tell of a record, and of the validation in it if there is one."""
        self._tell("on_record", dict(record))
        metrics = {name.removeprefix("valid/"): value for name, value in record.items() if name.startswith("valid/")}
        if metrics:
            self._tell("on_validation", int(record["update"]), metrics)

    def checkpoint(self, update: int, path: Path) -> None:
        """Tell of a checkpoint that is on the disk."""
        self._tell("on_checkpoint", update, path)

    def _add(self, name: str, build: Callable[[], Any]) -> None:
        number = sum(known.partition(" ")[0] == name for known in self._all)
        with self._guarded(shown := f"{name} {number + 1}" if number else name):
            self._all[shown] = build()

    def _tell(self, event: str, *facts: Any) -> None:
        for name, observer in list(self._all.items()):
            method = getattr(observer, event, None)
            if method is not None:
                with self._guarded(name):
                    method(self._run.path, *copy.deepcopy(facts))

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Keep what an observer does from the training: its errors, and what it sets for the whole process."""
        try:
            with process_state_kept(), limited_time(self._limit_s):
                yield
        except Interrupted:
            raise
        except (Exception, SystemExit, TookTooLong) as error:
            self._all.pop(name, None)
            said = str(error) if isinstance(error, UserError) else f"{describe(error)}{user_frames(error)}"
            if isinstance(error, TookTooLong):
                said = f"it took more than log.observer_timeout = {self._limit_s:g} s{user_frames(error)}"
            self._warn(f"the observer {name} is switched off, and the run goes on: {said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._all:
            self._tell("on_end", self._run.summary())
