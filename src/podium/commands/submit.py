"""`podium submit`, `jobs`, `status`, `logs`, `cancel`: from the words of the command to a target, and back."""

import shlex
import sys
from pathlib import Path

from podium.errors import PodiumError, UserError
from podium.recipe.loading import Recipe, load_recipe, read_yaml, recipe_with
from podium.submit.records import JobRecord, TargetName, all_jobs, find_job, keep_job
from podium.submit.site import load_site
from podium.submit.target import Prepared, Request, Status, Wishes, target_called
from podium.ui.console import out, say, show_table
from podium.ui.table import Table
from podium.ui.visible import visible, visible_lines

#: the word that begins `podium submit TARGET study STUDY.yaml`
_STUDY = "study"


def submit(target: TargetName, words: list[str], site: str | None, wishes: Wishes, *, dry_run: bool) -> None:
    """Hand a training or a study to a target, or print what would be done."""
    request = _request(target, words, site, wishes)
    there = target_called(target)
    prepared = there.prepare(request)
    if dry_run:
        _show(prepared)
        return
    for note in prepared.notes:
        say(note)
    job = there.submit(request, prepared)
    keep_job(job)
    called = f" as {job.id}" if job.id != job.name else ""
    say(
        f"submitted {job.name}{called}; `podium status {job.name}` and `podium logs -f {job.name}` show how it is doing"
    )
    print(job.name)


def _request(target: TargetName, words: list[str], site: str | None, wishes: Wishes) -> Request:
    known = load_site(site, target)
    if words[0] != _STUDY:
        recipe = load_recipe(words[0], words[1:])
        return Request("run", words[0], tuple(words[1:]), recipe, known, wishes)
    if len(words) < 2:
        raise UserError(f"podium submit {target} study: expected a study.yaml")
    return Request("study", words[1], tuple(words[2:]), _base_of_study(words[1], words[2:]), known, wishes)


def _base_of_study(what: str, words: list[str]) -> Recipe:
    """Return the recipe that all runs of a study share."""
    from podium.study.definition import check_values, is_study_file, study_from_tree

    path = Path(what)
    if words:
        raise UserError(f"a study is submitted as it is written: put {words[0]} into {what}")
    if not path.is_file() or not is_study_file(path):
        raise UserError(f"{what} is not the file of a study (it has no key `recipe`)")
    study = study_from_tree(read_yaml(path), str(path), path.parent)
    base = check_values(study)
    return recipe_with(base, {"engine.threads": study.threads}) if base.engine.threads == "auto" else base


def _show(prepared: Prepared) -> None:
    """Print everything that would be written and run."""
    for name, text in prepared.files.items():
        out.print(f"[bold]# {visible(str(prepared.folder / name))}[/]", soft_wrap=True)
        sys.stdout.write(visible_lines(text) + "\n")
        sys.stdout.flush()
    for command in prepared.commands:
        out.print("$ " + visible(shlex.join(command)), markup=False, highlight=False, soft_wrap=True)
    for note in prepared.notes:
        say(note)


def jobs() -> None:
    """Print what was submitted from here, and how it is doing."""
    known = all_jobs()
    if not known:
        say("nothing was submitted from here yet: `podium submit` does")
        return
    rows = []
    for job in known:
        status = _status_or_reason(job)
        number = f" {job.id}" if job.id != job.name else ""
        when = job.submitted[5:16].replace("T", " ")
        rows.append([job.name, f"{job.target}{number}", status.state, _progress(status), when])
    show_table(Table("", ["job", "target", "state", "updates", "submitted"], rows))


def _status_or_reason(job: JobRecord) -> Status:
    try:
        return target_called(job.target).status(job)
    except PodiumError as error:  # one host that is off must not hide the other jobs
        return Status("unknown", str(error))


def _progress(status: Status) -> str:
    if status.updates is None:
        return ""
    return f"{status.updates:,}" + (f" of {status.of_updates:,}" if status.of_updates else "")


def status(name: str) -> None:
    """Print how one job is doing."""
    job = find_job(name)
    known = target_called(job.target).status(job)
    rows = [
        ("state", known.state + (f" ({known.reason})" if known.reason else "")),
        ("updates", _progress(known)),
        ("where", known.where),
        ("requeued", f"{known.requeues} times" if known.requeues else ""),
        ("target", f"{job.target} {job.id}"),
        ("folder", job.folder),
        ("submitted", job.submitted),
    ]
    show_table(Table(job.name, ["", ""], [[key, value] for key, value in rows if value]))
    for line in known.lines:
        out.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def logs(name: str, *, follow: bool) -> None:
    """Print what a job has printed."""
    job = find_job(name)
    for part in target_called(job.target).logs(job, follow=follow):
        sys.stdout.write(part.decode(errors="replace"))
        sys.stdout.flush()


def cancel(name: str) -> None:
    """Have a job save and end."""
    job = find_job(name)
    target_called(job.target).cancel(job)
    say(f"{job.name} is asked to save and end; it will not start again by itself")
