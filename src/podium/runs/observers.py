"""A user's own loggers and pictures: told what happens in a training, without a way to change it.

Named in a recipe (`log.observers`) or handed to `podium.fit`. Instance 0 calls them, between two updates.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from podium.errors import Interrupted, UserError
from podium.recipe.sections.log import LogSection
from podium.runs import own_code
from podium.runs.folder import Run
from podium.ui.user_frames import describe, user_frames
from podium.workloads.registry import observer_class, short_name

EVENTS = ("record", "validation", "checkpoint", "end")


class Observer:
    """What watches a training: a class with any of these four methods, derived from this one or not.

    Whatever a method is given is a copy of its own. Random numbers drawn in it are none of the training's. One that
    raises is switched off with a warning, and the training goes on. `run` is the run's folder.
    """

    def record(self, run: Path, record: dict[str, float]) -> None:
        """Take a record of `metrics.jsonl`: `update`, `epoch`, `samples`, `train/loss`, `train/lr`, …"""

    def validation(self, run: Path, update: int, metrics: dict[str, float]) -> None:
        """Take loss and metrics of a validation, by their names without `valid/`."""

    def checkpoint(self, run: Path, update: int, path: Path) -> None:
        """Take the folder of a checkpoint, once it is on the disk: `podium.load(run, checkpoint=update)` reads it."""

    def end(self, run: Path, summary: dict[str, Any]) -> None:
        """Take `summary.json` of a run that has ended: its `state` is done, interrupted or failed."""


#: those that `podium.fit` was given
_given: ContextVar[Sequence[Any]] = ContextVar("podium_observers", default=())


@contextmanager
def watched_by(observers: Sequence[Any]) -> Iterator[None]:
    """Have objects of this session watch the trainings that begin in this context."""
    for observer in observers:
        _check_events(observer, type(observer).__name__, "observers")
    before = _given.set(tuple(observers))
    try:
        yield
    finally:
        _given.reset(before)


def load_observers(section: LogSection, received: Run | None = None) -> dict[str, type]:
    """Return the classes that a recipe names, imported. Raise UserError where one is not found or lacks every event.

    `received`: a run that may come from elsewhere; what its recipe names is imported only if it is trusted.
    """
    if received is not None and section.observers:
        log = received.tree().get("log")
        named = log.get("observers") if isinstance(log, dict) else None
        own_code.check_observers(received.path, [name for name in section.observers if name in (named or ())])
    found = {name: observer_class(name) for name in section.observers}
    for name, kind in found.items():
        _check_events(kind, short_name(name), "log.observers")
    return found


class Observers:
    """All that watch one training. A context manager: on exit they are told that it has ended."""

    def __init__(self, section: LogSection, run: Run, warn: Callable[[str], None], *, lead: bool = True) -> None:
        """Make an object of every class that `section` names, on instance 0."""
        self._run, self._warn = run, warn
        self._all: dict[str, Any] = {}
        if not lead:
            return
        for name in section.observers:
            with self._guarded(short_name(name)):
                self._all[short_name(name)] = load_observers(section)[name]()
        for number, observer in enumerate(_given.get()):
            name = type(observer).__name__
            self._all[name if name not in self._all else f"{name} {number + 1}"] = observer

    def record(self, record: Mapping[str, float]) -> None:
        """Tell of a record, and of the validation in it if there is one."""
        self._tell("record", dict(record))
        metrics = {name.removeprefix("valid/"): value for name, value in record.items() if name.startswith("valid/")}
        if metrics:
            self._tell("validation", int(record["update"]), metrics)

    def checkpoint(self, update: int, path: Path) -> None:
        """Tell of a checkpoint that is on the disk."""
        self._tell("checkpoint", update, path)

    def _tell(self, event: str, *facts: Any) -> None:
        for name, observer in list(self._all.items()):
            method = getattr(observer, event, None)
            if method is not None:
                with self._guarded(name):
                    method(self._run.path, *copy.deepcopy(facts))

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Keep what an observer does from the training: its errors, and the state of the process that it may set."""
        try:
            with _process_kept():
                yield
        except Interrupted:
            raise
        except (Exception, SystemExit) as error:
            self._all.pop(name, None)
            said = str(error) if isinstance(error, UserError) else f"{describe(error)}{user_frames(error)}"
            first, newline, frames = said.partition("\n")
            self._warn(f"the observer {name} is switched off, and the run goes on: {first}{newline}{frames}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._all:
            self._tell("end", self._run.summary())


@contextmanager
def _process_kept() -> Iterator[None]:
    """Give back random states and the settings of torch that a caller may have changed."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def _check_events(observer: Any, name: str, key: str) -> None:
    if not any(callable(getattr(observer, event, None)) for event in EVENTS):
        raise UserError(f"{key}: {name} has none of the methods {', '.join(EVENTS)}")
