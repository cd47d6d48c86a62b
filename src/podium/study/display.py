"""What a person sees of a study: a live table in a terminal, plain lines elsewhere, and the table at the end."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from podium.machine.bounded_files import parse_mapping
from podium.runs.folder import Run
from podium.study.definition import StudySection
from podium.study.folder import StudyFolder, read_tail, shown_value, values_text
from podium.study.records import Records, RunRecord, by_point, mean
from podium.study.steps import best_point
from podium.ui import console
from podium.ui.console import clock_text, number
from podium.ui.table import Table
from podium.ui.visible import visible

_REFRESH_S = 0.5
_STATES = ("running", "finished", "pruned", "failed", "stopped", "waiting")
#: of the table at the end; all rows are in table.csv
_MAX_ROWS = 40


class StudyDisplay:
    """Progress of a study; use as a context manager. Redrawn by whoever calls it: there is no thread."""

    def __init__(self) -> None:
        self._live = Live(console=console.err, auto_refresh=False, transient=True) if console.err.is_terminal else None
        self._drawn_at = 0.0
        #: runs that are known to record the study's metric
        self.checked: set[int] = set()

    def say(self, text: str) -> None:
        """Print a message above the table."""
        console.say(text)

    def say_from_signal(self, text: str) -> None:
        """Print a message from within a signal's handler, which may have interrupted any other write."""
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())

    def changed(self, study: StudySection, records: Records, changes: Iterable[RunRecord]) -> None:
        """Say what has become of runs; in a terminal, the table shows it."""
        for record in changes:
            if record.state == "waiting" or (self._live is not None and record.state == "running"):
                continue
            self.say(_line(study, records, record))

    def refresh(self, study: StudySection, records: Records, folder: StudyFolder) -> None:
        """Draw the table again, now and then."""
        if self._live is not None and time.monotonic() >= self._drawn_at + _REFRESH_S:
            self._drawn_at = time.monotonic()
            self._live.update(_drawing(study, records, folder, console.err.height), refresh=True)

    def recorded(self, run: Run) -> set[str]:
        """Return the names of metrics that a run has recorded of late."""
        return {name for record in last_records(run) for name in record}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def last_records(run: Run) -> list[dict[str, Any]]:
    """Return the records at the end of a run that may be writing more of them."""
    found = []
    for line in read_tail(run.metrics_file).splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith("\n"):
                found.append(parse_mapping(line.encode()))
    return found


def counts_text(records: Records) -> str:
    """Return how many runs are in which state: `2 running, 5 finished, 2 waiting`."""
    counts = {state: sum(record.state == state for record in records.values()) for state in _STATES}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no runs yet"


def _line(study: StudySection, records: Records, record: RunRecord) -> str:
    """Return one line about a run whose state has changed."""
    parts = [f"run {record.number} of {len(records)}", record.state]
    if record.state in ("finished", "pruned") and record.value is not None:
        parts.append(f"{visible(record.metric)} {number(record.value)}")
    if record.state in ("failed", "stopped") and record.reason:
        parts.append(visible(record.reason))
    values = values_text(record.values)
    if study.num_seeds > 1:
        values += f"{', ' if values else ''}seed {record.seed}"
    took = f" in {clock_text(record.seconds)}" if record.state == "finished" and record.seconds else ""
    return f"{parts[0]}: {', '.join(parts[1:])}{took} ({values})" if values else f"{parts[0]}: {', '.join(parts[1:])}"


def _drawing(study: StudySection, records: Records, folder: StudyFolder, height: int) -> Group:
    """Return the live table: what runs, the best so far, and how many there are."""
    going = [record for record in records.values() if record.state == "running"]
    ranked = sorted(
        (record for record in records.values() if record.state == "finished" and record.value is not None),
        key=lambda record: (record.value or 0.0) * (1 if study.less_is_better else -1),
    )
    room = max(2, height - 8)
    shown_going = going[: max(1, room - 3)]
    table = RichTable(box=None, pad_edge=False, expand=False)
    for name, justify in (("run", "right"), ("state", "left"), (study.metric, "right"), ("at", "right")):
        table.add_column(escape(visible(name)), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("values", no_wrap=True, overflow="ellipsis", ratio=1)
    for record in shown_going:
        value, at = _newest(study, folder.run(record.number))
        table.add_row(str(record.number), "running", value, at, escape(values_text(record.values)), style="cyan")
    for record in ranked[: room - len(shown_going)]:
        table.add_row(
            str(record.number),
            "finished" if record is not ranked[0] else "best",
            number(record.value or 0.0),
            clock_text(record.seconds),
            escape(values_text(record.values)),
        )
    return Group(Text(f"{folder.path}: {counts_text(records)}", style="bold", no_wrap=True, overflow="ellipsis"), table)


def _newest(study: StudySection, run: Run) -> tuple[str, str]:
    """Return the newest value of the metric that a run has recorded, and how far it is."""
    records = last_records(run)
    values = [record[study.metric] for record in records if isinstance(record.get(study.metric), int | float)]
    epoch = records[-1].get("epoch") if records else None
    at = f"{epoch:.1f}ep" if isinstance(epoch, int | float) else "…"
    return (number(values[-1]) if values else "…"), at


def study_table(folder: StudyFolder, study: StudySection, records: Records) -> Table:
    """Return the table of results for people: one row for each choice of values, the mean and spread over its seeds."""
    keys, points = list(study.values), by_point(records.values())
    several = study.num_seeds > 1
    best = best_point(study, records)
    shown = dict(list(points.items())[:_MAX_ROWS])
    if best is not None and best not in shown:
        shown[best] = points[best]
    rows = []
    for point, runs in shown.items():
        values = [run.value for run in runs if run.value is not None]
        result = number(mean(values)) if values else "–"
        if several and len(values) > 1:
            result += f" ± {number(_spread(values))}"
        states = sorted({run.state for run in runs}, key=_STATES.index)
        state = ", ".join(states) + ("" if all(run.feasible for run in runs) else ", over a constraint")
        tries = max(run.attempts for run in runs)
        state += f", {tries} attempts" if tries > 1 else ""
        label = str(runs[0].number) if len(runs) == 1 else f"{runs[0].number}–{runs[-1].number}"
        mark = " (best)" if point == best else ""
        rows.append([label, *(shown_value(runs[0].values.get(key)) for key in keys), result + mark, state])
    more = f"; {len(points) - len(shown)} more rows in {folder.table_file}" if len(points) > len(shown) else ""
    names = _short_names(keys)
    return Table(str(folder.path), ["run", *names, study.metric, "state"], rows, f"{counts_text(records)}{more}")


def _short_names(keys: list[str]) -> list[str]:
    short = [key.rpartition(".")[2] for key in keys]
    return short if len({*short}) == len(short) else keys


def _spread(values: list[float]) -> float:
    """Return the standard deviation of a sample."""
    middle = mean(values)
    return float((sum((value - middle) ** 2 for value in values) / (len(values) - 1)) ** 0.5)
