"""What a site says about its Slurm."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt

from podium.recipe.durations import Seconds
from podium.recipe.section import Section
from podium.submit.words import Features, Line, Word

#: options of sbatch that the batch script sets itself
_OURS = (
    "array", "chdir", "cpus-per-task", "error", "exclude", "export", "job-name", "nodes", "no-requeue", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time", "wrap",
)  # fmt: skip


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z-]*", name):
        raise ValueError("options: expected names of long options of sbatch without dashes before them, such as mem")
    if name in _OURS:
        raise ValueError(f"options: {name} is set by the batch script itself")
    return name


class SlurmSection(Section):
    """How jobs are handed to Slurm."""

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    constraint: Features | None = None
    #: of a job, where none is given
    time: Seconds = 3600.0
    #: how often a job goes back into the queue, at most
    requeues: NonNegativeInt = 10
    #: seconds before the end of a job's time at which it saves; a sixth of its time where that is less
    save_before_end: Seconds = 120.0
    #: how a node's devices are asked for: gres (`--gres=gpu:4`) or gpus (`--gpus-per-node=4`)
    devices_as: Annotated[str, Field(pattern="^(gres|gpus)$")] = "gres"
    #: further long options of sbatch: {mem: 64G, mail-type: END}
    options: dict[Annotated[str, AfterValidator(_option)], Line] = Field(default_factory=dict)
    #: further long options of srun, each one word: [--mpi=none]
    srun: tuple[Word | Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:/-]+)?$")], ...] = ()
