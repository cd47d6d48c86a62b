"""`podium report`: one page about runs, or about a study, and what it took to reach a target, in the terminal too."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from podium.errors import UserError
from podium.report.page import Comparison, StudyView, compare, write_report
from podium.report.reading import find_runs, names_of, read_runs
from podium.report.solution import Target, parse_target, recommendation
from podium.report.tables import brief_solution_table
from podium.study.folder import StudyFolder, open_study
from podium.ui.console import clock_text, out, say, show_table, warn
from podium.ui.table import Table
from podium.ui.visible import visible

_MAX_ROWS = 24


def report(paths: Sequence[Path], target_file: Path | None, target: str | None) -> None:
    """Write the page, print where it is, and how the runs came to the target if there is one."""
    comparison, title = compared(paths, target)
    file = target_file or _default_file(paths)
    if file.is_dir():
        raise UserError(f"{file} is a folder: give --out the name of a file, such as {file / 'report.html'}")
    if not file.parent.is_dir():
        raise UserError(f"--out {file}: the folder {file.parent} does not exist")
    words = ["podium", *sys.argv[1:]]
    write_report(comparison, file, title, words)
    if comparison.target is not None:
        show_solution(comparison)
    out.print(f"report: {file.resolve()} ({file.stat().st_size / 1e6:.1f} MB)", soft_wrap=True, markup=False)


def compared(paths: Sequence[Path], target: str | None = None) -> tuple[Comparison, str]:
    """Return the runs of these folders beside each other, and a title; those of a study by what it looks for."""
    folder = _study(paths)
    runs = read_runs(find_runs(paths), warn)
    wanted = parse_target(target, runs) if target is not None else None
    title = paths[0].resolve().name if len(paths) == 1 else f"{len(runs)} runs"
    if folder is None:
        return compare(runs, wanted), title
    study, records = folder.definition(), folder.records()
    if wanted is None and study.target is not None:
        wanted = Target(study.metric, study.target, study.less_is_better)
    facts = folder.facts()
    states = {name: records[number].state for number, name in _numbers(folder).items() if number in records}
    note = f"study by {study.method} of {visible(study.metric)}, {clock_text(facts.seconds)} of work"
    if facts.command:
        note += f": {shlex.join(facts.command)}"
    found = StudyView([key for key in study.values if key != "seed"], facts.importances, note, states)
    return compare(runs, wanted, found, study.metric, study.less_is_better), title


def _study(paths: Sequence[Path]) -> StudyFolder | None:
    if len(paths) != 1 or not (paths[0] / "study.yaml").is_file():
        return None
    return open_study(paths[0])


def _numbers(folder: StudyFolder) -> dict[int, str]:
    """Return the names under which the runs of a study are shown, by their number."""
    paths = [run.path for run in find_runs([folder.path])]
    return {int(path.name): name for path, name in zip(paths, names_of(paths), strict=True) if path.name.isdecimal()}


def _default_file(paths: Sequence[Path]) -> Path:
    return paths[0] / "report.html" if len(paths) == 1 else Path("report.html")


def show_solution(comparison: Comparison) -> None:
    """Print what each choice took to reach the target, and what to train with."""
    assert comparison.target is not None
    groups = comparison.groups()
    table = brief_solution_table(groups, comparison.keys)
    left = len(table.rows) - _MAX_ROWS
    notes = [table.caption, f"{left} more rows in the page" if left > 0 else ""]
    caption = "; ".join(filter(None, notes))
    show_table(Table(f"Time to {comparison.target}", table.columns, table.rows[:_MAX_ROWS], caption))
    say(recommendation(groups, comparison.target))
