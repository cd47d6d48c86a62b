"""What a contender has to do in one heat, and what it returns."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from bench.race.lane import Lane, Task, build_task
from bench.race.lanes import LANES
from podium.recipe.loading import Recipe


@dataclass(frozen=True)
class Heat:
    """One contender on one lane: some updates to warm up, then those that are timed."""

    contender: str
    lane_name: str
    #: where the lane's data is
    data_folder: str
    num_warmup: int
    num_updates: int
    #: nothing random in training, and the loss is compared
    compare: bool = False
    #: everything from the start of the process on is timed
    end_to_end: bool = False
    #: for the contender to write in; empty at first
    folder: str = ""

    @property
    def lane(self) -> Lane:
        return LANES[self.lane_name]

    @property
    def total_updates(self) -> int:
        return self.num_warmup + self.num_updates

    @property
    def overrides(self) -> list[str]:
        return self.lane.all_overrides(Path(self.data_folder), self.compare)

    def recipe(self) -> Recipe:
        return self.lane.load(Path(self.data_folder), self.compare)

    def task(self) -> Task:
        """Build the lane in plain PyTorch."""
        return build_task(self.lane, self.recipe(), self.total_updates)


@dataclass(frozen=True)
class Outcome:
    """What a contender's `race(heat)` returns."""

    #: of the timed updates
    seconds: float
    #: after the last update; None: the heat does not compare losses
    model: nn.Module | None
    threads: int = field(default_factory=torch.get_num_threads)
    #: from the start of its command to the end; None: this process is the command
    end_to_end_s: float | None = None


class Stopwatch:
    """A clock that is notified after every update and times those after the warm-up."""

    def __init__(self, heat: Heat) -> None:
        self._num_warmup, self._total = heat.num_warmup, heat.total_updates
        self._done = 0
        self._began = self._ended = 0.0

    def update_done(self) -> None:
        self._done += 1
        if self._done == self._num_warmup:
            self._began = time.perf_counter()
        elif self._done == self._total:
            self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        assert self._done == self._total, f"{self._done} updates instead of {self._total}"
        return self._ended - self._began
