"""What every target does, and what is said about a job. Implementations are imported when they are needed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol

from podium.recipe.loading import Recipe
from podium.submit.records import JobRecord, TargetName
from podium.submit.site import Site

State = Literal["waiting", "running", "done", "interrupted", "failed", "cancelled", "unknown"]


@dataclass(frozen=True)
class Wishes:
    """What the command line says about a job; None: derived from the recipe and the site."""

    #: folder of the run, instead of the next free one
    out: str | None = None
    #: nodes (or pods, or hosts): at least, at most
    nodes: tuple[int, int] | None = None
    #: instances on each
    per_node: int | None = None
    time_s: float | None = None
    requeues: int | None = None
    #: runs of a study at the same time
    at_once: int | None = None
    #: hosts of ssh with the instances on each
    hosts: str | None = None
    #: send the code of a workload of the user's own along
    send_code: bool = False
    #: what one target alone knows, by the name of its option
    more: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A training, or a study, to be handed to a target."""

    kind: Literal["run", "study"]
    #: the recipe or study file as it was named, and the words after it
    what: str
    words: tuple[str, ...]
    #: of the run; of a study, the one that all its runs share
    recipe: Recipe
    site: Site
    wishes: Wishes


@dataclass(frozen=True)
class Prepared:
    """Everything that is going to happen, and nothing has happened yet. `--dry-run` prints it."""

    #: name of the job
    name: str
    #: the folder of its run or study, as the target sees it
    folder: PurePosixPath
    #: texts by their path below `folder`
    files: Mapping[str, str]
    #: what is then run, as words
    commands: tuple[tuple[str, ...], ...]
    #: what the user should know, in sentences
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """How a job is doing."""

    state: State
    #: in the target's own words
    reason: str = ""
    where: str = ""
    #: of the run's `summary.json`, where there is one
    updates: int | None = None
    of_updates: int | None = None
    requeues: int = 0
    #: further lines for people
    lines: tuple[str, ...] = ()


class Target(Protocol):
    """Where jobs go."""

    def prepare(self, request: Request) -> Prepared:
        """Return what `submit` is going to do; raise UserError where it could not work."""
        ...

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Hand the job over; either it is there afterwards, or a UserError says why not and nothing is left behind."""
        ...

    def status(self, job: JobRecord) -> Status:
        """Return how a job is doing."""
        ...

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield what a job has printed so far; `follow`: and what it prints until it ends."""
        ...

    def cancel(self, job: JobRecord) -> None:
        """Have a job save and end, and not start again."""
        ...


def target_called(name: TargetName) -> Target:
    """Return the target of this name."""
    if name == "slurm":
        from podium.submit.slurm.target import SlurmTarget

        return SlurmTarget()
    if name == "kubernetes":
        from podium.submit.kubernetes.target import KubernetesTarget

        return KubernetesTarget()
    from podium.submit.ssh.target import SshTarget

    return SshTarget()
