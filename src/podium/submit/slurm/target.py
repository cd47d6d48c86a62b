"""Slurm as a target: its commands run here, or on a login node that ssh reaches."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from podium.errors import UserError
from podium.launch.secret import VARIABLE as SECRET
from podium.launch.secret import new_secret
from podium.recipe.loading import Recipe, recipe_with, to_yaml
from podium.runs.folder import JOB
from podium.submit.container import podium_words
from podium.submit.progress import summary_of
from podium.submit.records import JobRecord, check_name, free_name, now
from podium.submit.shell import Shell, login_shell
from podium.submit.site import Site, site_from_tree
from podium.submit.slurm.script import batch_script
from podium.submit.slurm.shape import Shape, find_shape
from podium.submit.slurm.watch import job_states, status_of, status_of_study
from podium.submit.studies import begin_study, check_array, log_words, num_runs, runs_of_study, sent_files
from podium.submit.target import Prepared, Request, Status
from podium.ui.visible import visible

_SCRIPT = f"{JOB}/batch.sh"


class SlurmTarget:
    """Jobs of Slurm."""

    def prepare(self, request: Request) -> Prepared:
        """Return the batch script and the recipe beside it."""
        site, shell = request.site, login_shell(request.site.login)
        name, folder = _place(request, shell)
        shape = find_shape(request.recipe, site, request.wishes)
        requeues = site.slurm.requeues if request.wishes.requeues is None else request.wishes.requeues
        study = request.kind == "study"
        recipe = settled(request.recipe, shape)
        words = podium_words(site, [str(folder)], here=shell.host is None)
        title = visible(f"Trains {' '.join([request.what, *request.words])}")[:110]
        files = {
            _SCRIPT: batch_script(
                title, site, shape, words, str(folder), array=study, sent=shell.host is not None, requeues=requeues
            ),
            f"{JOB}/job.json": _facts(recipe, shape, requeues),
        }
        if study:
            more, log = _array_of(request), "%4a/log"
            files |= sent_files(request) if shell.host is not None else {}
        else:
            files[f"{JOB}/recipe.yaml"] = to_yaml(recipe.tree())
            more, log = [], "log"
        command = _sbatch(name, folder, site, *more, log=log)
        return Prepared(name, folder, files, (command,), tuple(_notes(site, shape, shell)))

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Write the files and hand the script to sbatch."""
        site, shell = request.site, login_shell(request.site.login)
        if request.kind == "study" and shell.host is None:
            begin_study(request, Path(prepared.folder))
        shell.write_new(prepared.folder, prepared.files)
        if request.kind == "study" and shell.host is not None:
            shell.script(_folders_for_logs(prepared.folder, num_runs(request)))
        try:
            said = _run_sbatch(shell, prepared.commands[-1], _secrets(site))
        except UserError:
            shell.remove(prepared.folder if request.kind == "study" else prepared.folder / JOB)
            raise
        return JobRecord(
            name=prepared.name,
            target="slurm",
            kind=request.kind,
            id=said,
            folder=str(prepared.folder),
            site=site.tree(),
            submitted=now(),
            words=[request.what, *request.words],
        )

    def status(self, job: JobRecord) -> Status:
        """Return what Slurm knows of a job, with what its run says."""
        shell = _shell_of(job)
        if job.kind == "study":
            return status_of_study(job_states(shell, job.id), runs_of_study(shell, job.folder))
        summary = summary_of(shell, PurePosixPath(job.folder))
        attempts = shell.read(PurePosixPath(job.folder) / JOB / "attempts.jsonl") or b""
        cancelled = shell.read(PurePosixPath(job.folder) / JOB / "cancelled", 1) is not None
        return status_of(job_states(shell, job.id), summary, attempts, cancelled=cancelled)

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield the log of a job."""
        shell, path = _shell_of(job), PurePosixPath(job.folder) / JOB / "log"
        if not follow and job.kind == "study":
            yield from shell.stream(log_words(job.folder))
            return
        if not follow:
            yield shell.read(path) or b""
            return
        words = (
            log_words(job.folder, "-F") if job.kind == "study" else ["tail", "-n", "+1", "-s", "0.5", "-F", str(path)]
        )
        # Ends with the job, or when nobody reads any more.
        known = f"squeue -h -j {shlex.quote(job.id)} 2>/dev/null | grep -q ."
        script = (
            f'{shlex.join(words)} --pid="$$" 2>/dev/null & '
            f'while kill -0 "$!" 2>/dev/null && {known}; do sleep 2; done; sleep 1; kill "$!" 2>/dev/null'
        )
        yield from shell.stream(["sh", "-c", script])

    def cancel(self, job: JobRecord) -> None:
        """Note that it must not start again, then have Slurm end it: instances save as they hear of it."""
        shell = _shell_of(job)
        shell.checked(["touch", "--", f"{job.folder}/{JOB}/cancelled"])
        shell.checked(["scancel", job.id])


def settled(recipe: Recipe, shape: Shape) -> Recipe:
    """Return the recipe with its threads settled, so that its bits do not depend on the nodes that it gets."""
    return recipe_with(recipe, {"engine.threads": shape.threads}) if recipe.engine.threads == "auto" else recipe


def _place(request: Request, shell: Shell) -> tuple[str, PurePosixPath]:
    """Return the name of a job and its folder, which nothing has yet."""
    if request.wishes.out is not None:
        folder = shell.absolute(request.wishes.out)
        name = check_name(folder.name)
        if shell.names_in(folder):
            raise UserError(f"{folder} is not empty: choose another folder with --out")
    else:
        above = shell.absolute("runs" if shell.host is None else f"{request.site.login.folder}/runs")
        name = free_name(request.what, shell.names_in(above))
        folder = above / name
    if not str(folder).isprintable() or "%" in str(folder) or "\\" in str(folder):
        raise UserError(
            f"{visible(str(folder))}: Slurm cannot write its log to a path with %, \\ or control characters"
        )
    return name, folder


def _folders_for_logs(folder: PurePosixPath, num_elements: int) -> str:
    """Return a script that makes them: Slurm does not, and the elements begin with what they print."""
    job = shlex.quote(f"{folder}/{JOB}")
    return f"cd -- {job} && seq -f %04g 0 {num_elements - 1} | xargs mkdir -p --\n"


def _array_of(request: Request) -> list[str]:
    """Return the options that make a job an array of the runs of a study."""
    check_array(request)
    last = num_runs(request) - 1
    at_once = f"%{request.wishes.at_once}" if request.wishes.at_once else ""
    return [f"--array=0-{last}{at_once}"]


def _facts(recipe: Recipe, shape: Shape, requeues: int) -> str:
    facts = {
        "num_replicas": recipe.batch.num_replicas,
        "num_stages": recipe.parallel.num_stages,
        "span": recipe.blocks.span,
        "alike": recipe.blocks.alike,
        "per_node": shape.per_node,
        "requeues": requeues,
    }
    return json.dumps(facts, indent=1) + "\n"


def _sbatch(name: str, folder: PurePosixPath, site: Site, *more: str, log: str = "log") -> tuple[str, ...]:
    # The values of these variables are in the environment of sbatch, which keeps them with the job.
    export = ",".join(["ALL", SECRET, *site.secrets])
    words = [f"--job-name={name}", f"--chdir={folder}", f"--output={folder}/{JOB}/{log}", f"--export={export}", *more]
    return ("sbatch", "--parsable", *words, str(folder / _SCRIPT))


def _notes(site: Site, shape: Shape, shell: Shell) -> Iterator[str]:
    least, most = shape.nodes
    nodes = f"{most} node{'' if most == 1 else 's'}" if least == most else f"{least} to {most} nodes"
    threads = f"{shape.threads} thread{'' if shape.threads == 1 else 's'}"
    each = f"{shape.per_node} instance{'' if shape.per_node == 1 else 's'}"
    time = f"{shape.minutes} minute{'' if shape.minutes == 1 else 's'}"
    yield f"{nodes} with {each} of {threads} each, for {time}, through {shell.name}"
    if site.secrets:
        yield f"{', '.join(site.secrets)} and the job's own secret are handed over in its environment: … (masked)"


def _secrets(site: Site) -> dict[str, str]:
    """Return the variables that nobody else may see, from the environment of this command."""
    missing = [name for name in site.secrets if not os.environ.get(name)]
    if missing:
        raise UserError(f"{missing[0]}, which the site names as a secret, is not set: export {missing[0]}=… first")
    return {SECRET: new_secret().decode(), **{name: os.environ[name] for name in site.secrets}}


def _run_sbatch(shell: Shell, command: tuple[str, ...], secrets: Mapping[str, str]) -> str:
    """Run sbatch with secrets in its environment; on another host they come through standard input."""
    if shell.host is None:
        said = shell.checked(command, env=secrets)
    else:
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in secrets.items())
        said = shell.script(f"{exports}\nexec {shlex.join(command)}\n")
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise UserError(f"sbatch on {shell.name} answered without the number of a job: {visible(said.strip()[:200])}")
    return number


def _shell_of(job: JobRecord) -> Shell:
    return login_shell(site_from_tree(job.site).login)
