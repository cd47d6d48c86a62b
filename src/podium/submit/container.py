"""The words that run Podium at a site: the command itself, or inside a container."""

import shlex
import sys
from collections.abc import Sequence

from podium.submit.site import ContainerSection, Site


def podium_words(site: Site, folders: Sequence[str], *, here: bool) -> list[str]:
    """Return the command of Podium on a node; `folders` are those that a container must see.

    `here`: whether nodes have the files of this machine, so that this very Podium can be used.
    """
    if site.container is not None:
        seen = [*site.container.mounts, *folders, *site.scratch.values()]
        variables = [*site.environment, *site.secrets, "PODIUM_SECRET", "PODIUM_CACHE", "TMPDIR"]
        return [*_runtime(site.container, seen, variables, bool(site.node.devices)), *_split(site.container.podium)]
    if site.podium is not None:
        return _split(site.podium)
    return [sys.executable, "-m", "podium"] if here else ["podium"]


def _runtime(container: ContainerSection, folders: Sequence[str], variables: Sequence[str], devices: bool) -> list[str]:
    if container.runtime == "apptainer":
        words = ["apptainer", "exec", *(["--nv"] if devices else [])]
        return [*words, *(f"--bind={folder}" for folder in folders), *container.options, container.image]
    if container.runtime == "shifter":
        mounts = [f"--volume={folder if ':' in folder else f'{folder}:{folder}'}" for folder in folders]
        return ["shifter", f"--image={container.image}", *mounts, *container.options]
    # Files belong to who submits; signals reach Podium, and end it also while it loads.
    words = ["sh", "-c", 'exec docker run --user="$(id -u):$(id -g)" "$@"', "docker", "--rm", "--init", "--interactive"]
    words += ["--network=host", "--ipc=host", "--security-opt=no-new-privileges", "--env=HOME=/tmp"]
    words += [f"--volume={folder if ':' in folder else f'{folder}:{folder}'}" for folder in folders]
    # Names alone: their values come from the environment, and are on no command line.
    words += [f"--env={name}" for name in [*variables, *_OF_SLURM]]
    return [*words, *(["--gpus=all"] if devices else []), *container.options, container.image]


#: what an instance reads of its place (`launch/environment.py`)
_OF_SLURM = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME",
)  # fmt: skip


def _split(command: str) -> list[str]:
    return shlex.split(command)
