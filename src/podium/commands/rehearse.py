"""`podium rehearse`: a job as its target would run it, small and here, with what goes wrong there."""

from pathlib import Path

from podium.check.trials import SIMPLER, quick_overrides, trial_folder
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.rehearse.rehearsal import EVENTS, Rehearsal, carry_out, undisturbed
from podium.rehearse.stage import SmallJob, Stage, fitting, free_port
from podium.runs.folder import Run
from podium.submit.records import TargetName
from podium.submit.site import load_site
from podium.submit.target import Wishes
from podium.ui import console
from podium.ui.table import Table

#: updates of the first trial, which tells how long they take; and of the rehearsal
_TRIED, _FEWEST, _MOST = 6, 16, 2000
_NUM_CHECKPOINTS = 16
#: what a rehearsal adds beside the words of the user
_OWN = ["launch.timeout=20"]


def rehearse(
    target: TargetName, name: str, overrides: list[str], site: str | None, keep: Path | None, seconds: float
) -> bool:
    """Print what became of a job; return whether it survived everything with the weights that it should have."""
    known = load_site(site, target)
    recipe = load_recipe(name, overrides)
    if keep is not None and keep.exists():
        raise UserError(f"--keep {keep}: it already exists, choose another name")
    words = [*overrides, *_OWN, f"launch.port={free_port()}"]
    if recipe.engine.threads == "auto":
        words.append("engine.threads=1")  # the same on one instance and on all, whatever share of the cores they have
    num_hosts, per_host = fitting(recipe)
    with console.progress_display(what="rehearsing") as display, trial_folder(keep, "rehearsal") as folder:

        def tell(what: str, update: int) -> None:
            display.update(min(update, num_updates), num_updates, {"rehearsing": what})

        num_updates = _TRIED
        tell("one instance, to see how long an update takes", 0)
        words, update_s = _tried(folder, name, words)
        num_updates = max(_FEWEST, min(_MOST, int(seconds / max(update_s, 1e-4))))
        short = quick_overrides(recipe, num_updates, max(1, num_updates // _NUM_CHECKPOINTS))
        tell("one instance, undisturbed", 0)
        expected, _ = undisturbed(folder / "alone", name, [*words, *short])
        small = load_recipe(name, [*words, *short])
        job = SmallJob(folder, small, known, Wishes(), num_hosts, per_host)
        job.write()
        stage = _stage(target, job)
        done = carry_out(stage, Run(job.run), num_updates, expected, tell)
    _show(target, name, done, stage, num_hosts, per_host, num_updates)
    return done.good


def _stage(target: TargetName, job: SmallJob) -> Stage:
    if target == "kubernetes":
        from podium.rehearse.kubernetes import KubernetesStage

        return KubernetesStage(job)
    if target == "slurm":
        from podium.rehearse.slurm import SlurmStage

        return SlurmStage(job)
    from podium.rehearse.ssh import SshStage

    return SshStage(job)


def _tried(folder: Path, name: str, words: list[str]) -> tuple[list[str], float]:
    """Return the words, with a simpler schedule where that of the recipe does not fit so few updates, and the seconds
    of an update."""
    short = quick_overrides(load_recipe(name, words), _TRIED)
    try:
        return words, undisturbed(folder / "first", name, [*words, *short])[1]
    except UserError as error:
        if "schedule." not in str(error):
            raise
    return [*words, *SIMPLER], undisturbed(folder / "second", name, [*words, *short, *SIMPLER])[1]


def _show(
    target: TargetName,
    name: str,
    done: Rehearsal,
    stage: Stage,
    num_hosts: int,
    per_host: int,
    updates: int,
) -> None:
    rows = [
        [
            one.event,
            "survives" if one.good else "is lost",
            *([str(one.reached), str(one.reached - one.saved), f"{one.lost_s:.1f} s"] if one.good else ["", "", ""]),
        ]
        for one in done.outcomes
    ]
    same = done.sha256 == done.undisturbed
    rows.append(["weights at the end", "the same" if same else "others", done.sha256[:16] or "none", "", ""])
    hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    console.show_table(
        Table(
            f"{name} on {target}, rehearsed here: {hosts} × {per_host}, {updates} updates",
            ["what happens", "the job", "at update", "done again", "time lost"],
            rows,
            f"{len(EVENTS)} events in {done.total_s:.0f} s; "
            + ("ready to submit" if done.good else "not ready to submit"),
        )
    )
    for one in done.outcomes:
        if one.found:
            console.out.print(f"{one.event}: {one.found}", markup=False, highlight=False)
    if not same:
        console.out.print(f"undisturbed weights: {done.undisturbed[:16]}", markup=False, highlight=False)
    for sentence in stage.not_rehearsed:
        console.out.print(f"not rehearsed: {sentence}", markup=False, highlight=False)
