"""`podium study`: from the words of the command to a definition, then to its runs and its table."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import Interrupted, TrainingFailed
from podium.recipe.loading import Recipe, load_recipe, read_yaml
from podium.study.changes import check_same_study
from podium.study.conduct import Conductor, End
from podium.study.definition import (
    StudySection,
    check_at_once,
    check_values,
    is_study_file,
    study_from_tree,
)
from podium.study.display import StudyDisplay, counts_text, study_table
from podium.study.executor import LocalProcesses
from podium.study.export import export_study
from podium.study.folder import StudyFolder, check_free, open_study, values_text
from podium.study.notation import read_words
from podium.study.pivot import pivot_table
from podium.study.records import Records, by_point, point_value
from podium.study.steps import best_point
from podium.topology import usable_cores
from podium.ui.console import clock_text, number, out, say, show_table, warn
from podium.ui.visible import visible
from podium.workloads.registry import identity


@dataclass(frozen=True)
class Options:
    """The options of the command: keys of the definition, and how it is carried out."""

    definition: Mapping[str, Any]
    runs: int | None
    time: str | None
    at_once: str
    retries: int
    retry_failed: bool


def study(what: str, words: list[str], out: Path | None, options: Options) -> None:
    """Begin a study, continue it or add to it, and show its table."""
    most = check_at_once(options.at_once)
    defined, folder = _definition(what, words, options), StudyFolder(out or _default_folder(what))
    base = check_values(defined)
    check_free(folder.path)
    _warn_of_timed_metrics(defined)
    with folder.locked():
        if folder.exists and not folder.has_results():
            folder.clear()  # it ended before anything was trained: nothing is mixed
        if folder.exists:
            check_same_study(folder, defined, base.tree(), identity(base.workload.name))
        folder.write_definition(defined, base, ["podium", *sys.argv[1:]])
        executor = _executor(defined, base, most)
        with StudyDisplay() as display:
            conductor = Conductor(folder, defined, base, executor, display, options.retries)
            if options.retry_failed:
                conductor.retry_failed()
            try:
                end = conductor.run()
            finally:
                folder.write_table(defined, conductor.log.records)
        if end.steps.complete:
            _keep_importances(folder, defined, conductor.log.records)
    _show_tables(folder, defined, conductor.log.records)
    _conclude(folder, defined, conductor.log.records, end)


def _definition(what: str, words: list[str], options: Options) -> StudySection:
    """Return the definition of a recipe, a study file or a study folder, with the words of the command on top."""
    path = Path(what)
    if path.is_dir():
        path = open_study(path).definition_file
    is_file = path.suffix in (".yaml", ".yml") and path.is_file() and is_study_file(path)
    tree: dict[str, Any] = read_yaml(path) if is_file else {"recipe": what}
    tree |= {key: value for key, value in options.definition.items() if value is not None}
    folder = path.parent if is_file else None
    recipe = tree.get("recipe")
    schema = type(load_recipe(_from(folder, recipe))) if isinstance(recipe, str) and words else None
    if schema is not None:
        fixed, varied = read_words(words, schema, ranges=tree.get("method") in ("random", "tpe"))
        _put(tree, "set", "values", fixed)
        _put(tree, "values", "set", varied)
    limits = {"runs": options.runs, "time": options.time}
    if any(limit is not None for limit in limits.values()):
        budget = tree.get("budget") or {}
        tree["budget"] = {**budget, **{key: limit for key, limit in limits.items() if limit is not None}}
    return study_from_tree(tree, str(path) if is_file else "command line", folder)


def _from(folder: Path | None, recipe: str) -> str:
    return str((folder or Path()) / recipe) if recipe.endswith((".yaml", ".yml")) else recipe


def _put(tree: dict[str, Any], section: str, other: str, given: Mapping[str, Any]) -> None:
    """Put keys of the command line into one section of the definition, and take them out of the other."""
    if given and isinstance(tree.get(section, {}), dict) and isinstance(tree.get(other, {}), dict):
        tree[section] = {**tree.get(section, {}), **given}
        tree[other] = {key: value for key, value in tree.get(other, {}).items() if key not in given}


def _default_folder(what: str) -> Path:
    """Return `studies/neuron-quick`: always the same, so that the same command continues."""
    path = Path(what)
    if path.is_dir():
        return path
    name = path.stem if path.suffix in (".yaml", ".yml") else what
    return Path("studies") / (name.strip("./").replace("/", "-") or "study")


def _executor(study: StudySection, base: Recipe, most: int | None) -> LocalProcesses:
    """Return processes of this host, as many at once as was asked for, or as the cores allow."""
    cores = usable_cores()
    threads = study.threads if base.engine.threads == "auto" else int(base.engine.threads)
    width = threads * (study.instances or base.parallel.num_stages)
    slots = most or max(1, len(cores) // width)
    if slots * width > len(cores) and slots > 1:
        warn(f"{slots} runs at once × {width} threads share {len(cores)} cores, and will slow each other down")
    at_once = "one run at a time" if slots == 1 else f"{slots} runs at once"
    memory = ", fewer while memory is short" if most is None and slots > 1 else ""
    say(f"{at_once}, {width} thread{'s' if width > 1 else ''} each, on {len(cores)} cores{memory}")
    return LocalProcesses(slots, cores, watch_memory=most is None)


def _warn_of_timed_metrics(study: StudySection) -> None:
    names = study.timed_metrics()
    if names:
        warn(f"{names[0]} depends on the machine and its load: a repeated study may decide otherwise")


def _keep_importances(folder: StudyFolder, study: StudySection, records: Records) -> None:
    if len(study.values) > 1:
        from podium.study.suggest import importances

        folder.write_facts(importances=importances(study, records))


def _conclude(folder: StudyFolder, study: StudySection, records: Records, end: End) -> None:
    """Say what came out, and end with the code that it deserves."""
    again = f"`podium study {shlex.quote(str(folder.path))}` continues"
    best = best_point(study, records)
    if best is not None:
        say(_best_text(study, records, best))
    for name, share in folder.facts().importances.items() if end.steps.complete else ():
        say(f"importance of {visible(name)}: {100 * share:.0f} %")
    if end.steps.reached is not None:
        say(f"the target {number(study.target or 0.0)} is reached")
    elif study.target is not None and end.steps.complete:
        say(f"the target {number(study.target)} was not reached")
    if end.stopped_by:
        raise Interrupted(f"stopped by {end.stopped_by}: {counts_text(records)}; {again}")
    if end.out_of_time and not end.steps.complete:
        say(f"the time of the study, {clock_text(study.budget.time or 0.0)}, is used up; `--time` gives it more")
    failed = [record for record in records.values() if record.state == "failed"]
    if failed:
        raise TrainingFailed(
            f"{len(failed)} of {len(records)} runs failed, first run {failed[0].number}: {failed[0].reason}; "
            "--retry-failed tries them again"
        )


def _best_text(study: StudySection, records: Records, point: int) -> str:
    runs = by_point(records.values())[point]
    value = point_value(runs)
    assert value is not None
    over = f", mean of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"best: {visible(study.metric)} {number(value)}{over} ({values_text(runs[0].values) or 'nothing varied'})"


def _show_tables(folder: StudyFolder, study: StudySection, records: Records) -> None:
    show_table(study_table(folder, study, records))
    pivot = pivot_table(study, records)
    if pivot is not None:
        show_table(pivot)


def show_status(path: Path, *, as_json: bool) -> None:
    """Print how far a study is, as a table or as JSON."""
    folder = open_study(path)
    defined, records, facts = folder.definition(), folder.records(), folder.facts()
    if as_json:
        tree = {
            "study": defined.tree(),
            "facts": facts.model_dump(),
            "runs": [one.model_dump() for one in records.values()],
        }
        print(json.dumps(tree, indent=1))
        return
    _show_tables(folder, defined, records)
    missing = defined.num_points * defined.num_seeds - len(records)
    chosen = f"; up to {missing} more runs to come" if missing > 0 else ""
    going = "is being worked on" if folder.is_locked() else "nobody works on it now"
    out.print(f"{clock_text(facts.seconds)} of work so far; {going}{chosen}", highlight=False)
    for record in records.values():
        for crash in record.crashes:
            out.print(f"run {record.number} has crashed: {visible(crash)}", markup=False, highlight=False)
    best = best_point(defined, records)
    if best is not None:
        out.print(_best_text(defined, records, best), markup=False, highlight=False)


def export(path: Path, target: Path) -> None:
    """Write a study to a file for other programs."""
    folder = open_study(path)
    what = export_study(folder, target)
    say(f"{target}: {what}")
    if target.suffix == ".log":
        say(
            f"read it with optuna.load_study(study_name={folder.path.resolve().name!r}, "
            f"storage=JournalStorage(JournalFileBackend({str(target)!r})))"
        )
