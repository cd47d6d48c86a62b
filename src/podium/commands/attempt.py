"""`podium attempt`: what a batch script asks before and after it starts instances. Not for people."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from podium.machine.signals import stop_signals
from podium.runs.folder import JOB, Run
from podium.submit.attempts import JobFolder, newest_update
from podium.ui.console import say

#: the exit code of a training that was stopped and saved
_INTERRUPTED = 75


def begin(job: Path, run: Path, nodes: list[str]) -> None:
    """Print what to do now: `done`, or `train` or `resume`, then one option of srun on each line."""
    if Run(run).summary().get("state") == "done":
        print("done")
        return
    folder = JobFolder(job)
    if folder.cancelled:
        say("this job was cancelled")
        return
    if (verdict := folder.settle(newest_update(run))) is not None:
        say(f"{verdict.reason}: {_SHOWN['end' if verdict.action == 'end' else 'again']}")
        if verdict.action == "end":
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
    verdict = JobFolder(job).end(code, newest_update(run), nodes)
    say(f"{verdict.reason}: {_SHOWN[verdict.action]}")
    print(verdict.action)
    print(verdict.code)
    print(",".join(verdict.excluded))


_SHOWN = {"end": "this job ends", "again": "starting again on what is left", "requeue": "back into the queue"}


def element(definition: Path, study: Path, number: int, instances: int) -> int:
    """Train one run of a study in a process of its own, which hears the signals of this one; return its exit code.

    All elements of an array begin like this, wherever they are: the first of them writes the study's folder.
    """
    from podium.recipe.reading import read_yaml
    from podium.study.collect import collect
    from podium.study.definition import study_from_tree
    from podium.study.folder import StudyFolder
    from podium.submit.studies import begin_elements

    begin_elements(study_from_tree(read_yaml(definition), str(definition), definition.parent), study)
    folder = StudyFolder(study)
    words = ["train", folder.recipe_file(number), "--out", folder.run(number).path, "--continue"]
    command = [sys.executable, "-m", "podium", *map(str, words), "--instances", str(instances)]
    code = _ended_with_our_signals(command)
    if code != _INTERRUPTED:
        collect(study)
    return code


def _ended_with_our_signals(command: list[str]) -> int:
    """Run a command that gets the signals of this process; return its exit code as a shell tells it."""
    heard: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: object) -> None:
        heard.append(number)
        for child in children:
            child.send_signal(number)

    for one in stop_signals():
        signal.signal(one, hand_on)
    children.append(subprocess.Popen(command))
    for number in heard:  # those that came before there was a child, or as it started
        children[0].send_signal(number)
    code = children[0].wait()
    return 128 - code if code < 0 else code


def prepare(study: Path) -> None:
    """Write the folder of a study that was sent here, unless another element has done so."""
    from podium.submit.studies import begin_sent

    begin_sent(study)


def collect(study: Path) -> None:
    """Take the ended runs of a study that jobs have trained into its records and its table."""
    from podium.study.collect import collect

    collect(study)


def _clear(run: Path) -> None:
    """Remove what an attempt has left that was killed before there was a run."""
    for child in run.iterdir():
        if child.name != JOB:
            shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink(missing_ok=True)
