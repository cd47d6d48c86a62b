"""Stands in for the commands of Slurm and for ssh in a rehearsal: what a batch script or a launcher calls there.

    python -m podium.rehearse.stand_in srun|scontrol|squeue|ssh ARGUMENTS...

Only what the scripts of `podium submit` use. `STAGE` is the folder where it leaves what happened.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

#: variable with the folder; files in it: a line for each step and each of its processes, and a wish to start again
STAGE = "PODIUM_STAGE"
STEPS, TASKS, REQUEUE = "steps", "tasks", "requeue"


def main(words: Sequence[str]) -> int:
    """Do what the command would do; return its exit code."""
    folder, (name, *arguments) = Path(os.environ[STAGE]), words
    if name == "srun":
        return _srun(folder, arguments)
    if name == "ssh":
        return _ssh(folder, arguments)
    if name == "squeue":
        print("RUNNING")
    elif arguments[:2] == ["show", "hostnames"]:
        print(os.environ["SLURM_NODELIST"].replace(",", "\n"))
    elif arguments[:1] == ["requeue"]:
        (folder / REQUEUE).touch()
    return 0


def write_commands(folder: Path, names: Sequence[str]) -> None:
    """Write commands of these names that lead here."""
    folder.mkdir()
    for name in names:
        command = folder / name
        words = shlex.join([sys.executable, "-m", "podium.rehearse.stand_in", name])
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        command.chmod(0o700)


def _srun(folder: Path, arguments: Sequence[str]) -> int:
    count = next(number for number, word in enumerate(arguments) if not word.startswith("--"))
    options = dict(word[2:].partition("=")[::2] for word in arguments[:count])
    nodes, num_tasks = options["nodelist"].split(","), int(options["ntasks"])
    per_node = num_tasks // len(nodes)
    step = _add(folder / STEPS, options["nodelist"])
    tasks = []
    for index in range(num_tasks):
        node = nodes[index // per_node]
        place = {
            "SLURM_PROCID": index,
            "SLURM_NTASKS": num_tasks,
            "SLURM_LOCALID": index % per_node,
            "SLURM_STEP_ID": step,
            "SLURM_STEP_NUM_NODES": len(nodes),
            "SLURM_STEP_NODELIST": options["nodelist"],
            "SLURMD_NODENAME": node,
        }
        env = {**os.environ, **{key: str(value) for key, value in place.items()}}
        tasks.append((node, subprocess.Popen(list(arguments[count:]), env=env, start_new_session=True)))
        _add(folder / TASKS, f"{step} {node} {tasks[-1][1].pid}")

    def forward(number: int, frame: FrameType | None) -> None:
        for _, task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    codes = []
    for index, (node, task) in enumerate(tasks):
        code = task.wait()
        if code < 0:
            sys.stderr.write(f"srun: error: {node}: task {index}: {signal.strsignal(-code)}\n")
        codes.append(128 - code if code < 0 else code)
    return max(codes)


def _ssh(folder: Path, arguments: Sequence[str]) -> int:
    """Run the command of another host here; its number is all that tells it from the first."""
    host, command = arguments[-2:]
    _add(folder / STEPS, host)
    _add(folder / TASKS, f"0 {host} {os.getpid()}")
    os.execvpe("sh", ["sh", "-c", command], {**os.environ, "PODIUM_HOST_INDEX": "1"})


def _add(path: Path, line: str) -> int:
    """Add a line to a file; return how many there were."""
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        before = len(file.readlines())
        file.write(line + "\n")
    return before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
