"""What a rehearsal asks of a target's stand-in, and the small form of a job that it carries out here."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from podium.recipe.loading import Recipe, to_yaml
from podium.submit.site import Site
from podium.submit.target import Wishes
from podium.topology import possible_instances, usable_cores

Event = Literal["preempted", "timed out", "loses a node"]
#: what one machine is called by its stand-ins for several
ADDRESSES = ("127.0.0.1", "127.0.0.2")
PODIUM = (sys.executable, "-m", "podium")


@dataclass(frozen=True)
class SmallJob:
    """A training for a few updates, on as many instances as this machine has cores for."""

    #: with everything that belongs to the rehearsal
    folder: Path
    recipe: Recipe
    site: Site
    wishes: Wishes
    num_hosts: int
    per_host: int

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "rehearsal"

    def write(self) -> None:
        """Write what a target finds when its job starts."""
        self.run.parent.mkdir()
        self.recipe_file.write_text(to_yaml(self.recipe.tree()), encoding="utf-8")


class Stage(Protocol):
    """A stand-in for a target, with one job."""

    @property
    def not_rehearsed(self) -> Sequence[str]:
        """What is different here, in sentences."""
        ...

    @property
    def starts(self) -> int:
        """How often the instances were started."""
        ...

    def begin(self) -> None:
        """Start the job."""
        ...

    def play(self, event: Event) -> None:
        """Have something happen to the job."""
        ...

    def step(self) -> bool:
        """Do what a scheduler does all the time; return whether the job goes on."""
        ...

    def problem(self) -> str:
        """Return why the job did not end well, in one sentence; nothing where it did."""
        ...

    def end(self) -> None:
        """End what still runs."""
        ...


def fitting(recipe: Recipe) -> tuple[int, int]:
    """Return how many hosts and instances on each fit here: two hosts, if the recipe can be divided at all."""
    num_replicas, num_stages = recipe.batch.num_replicas, recipe.parallel.num_stages
    room = max(2 * num_stages, len(usable_cores()))
    counts = [count for count in possible_instances(num_replicas, num_stages, 1, recipe.blocks) if count <= room]
    equal = [count for count in counts if count % (2 * num_stages) == 0]
    return (2, equal[-1] // 2) if equal else (1, counts[-1] if counts else num_stages)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server((ADDRESSES[0], 0)) as server:
        return int(server.getsockname()[1])
