"""`podium attempt`: what a batch script asks before and after it starts instances. Not for people; loads no torch."""

import re
import shutil
from pathlib import Path

from podium.runs.folder import JOB, Run
from podium.submit.attempts import JobFolder
from podium.ui.console import say

_CHECKPOINT = re.compile(r"update-(\d+)")


def begin(job: Path, run: Path, nodes: list[str]) -> None:
    """Print what to do now: `done`, or `train` or `resume`, then one option of srun on each line."""
    if Run(run).summary().get("state") == "done":
        print("done")
        return
    folder = JobFolder(job)
    if folder.cancelled:
        say("this job was cancelled")
        return
    count, hosts = folder.begin(nodes)
    going = (run / "recipe.yaml").is_file()
    if not going and run.is_dir():
        _clear(run)
    say(f"{'continuing' if going else 'beginning'} on {count} instances: {', '.join(hosts)}")
    print("resume" if going else "train")
    print(f"--nodes={len(hosts)}")
    print(f"--ntasks={count}")
    print(f"--ntasks-per-node={-(-count // len(hosts))}")
    print(f"--nodelist={','.join(hosts)}")


def end(job: Path, run: Path, code: int, nodes: list[str]) -> None:
    """Print what follows an attempt (end, again, requeue), the exit code of the job, and the nodes to exclude."""
    if Run(run).summary().get("state") == "done":
        code = 0  # a signal that came after that has ended nothing
    verdict = JobFolder(job).end(code, _updates(run), nodes)
    say(f"{verdict.reason}: {_SHOWN[verdict.action]}")
    print(verdict.action)
    print(verdict.code)
    print(",".join(verdict.excluded))


_SHOWN = {"end": "this job ends", "again": "starting again on what is left", "requeue": "back into the queue"}


def collect(study: Path) -> None:
    """Take the ended runs of a study that jobs have trained into its records and its table."""
    from podium.study.collect import collect

    collect(study)


def _updates(run: Path) -> int:
    """Return the update of the newest checkpoint; 0 where there is none."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))), default=0)


def _clear(run: Path) -> None:
    """Remove what an attempt has left that was killed before there was a run."""
    for child in run.iterdir():
        if child.name != JOB:
            shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink(missing_ok=True)
