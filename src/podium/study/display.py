"""What a person sees of a study: a live table in a terminal, plain lines elsewhere, and the table at the end."""

import os
import time
from collections.abc import Iterable, Mapping
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

    def restore_terminal(self) -> None:
        """Show the cursor again where this process ends at once."""
        if self._live is not None:
            with suppress(OSError):
                os.write(2, b"\x1b[?25h\n")

    def changed(self, study: StudySection, records: Records, changes: Iterable[RunRecord]) -> None:
        """Say what has become of runs; in a terminal, the table shows it."""
        for record in changes:
            if record.state == "waiting" or (self._live is not None and record.state == "running"):
                continue
            self.say(_line(study, records, record))

    def refresh(
        self, study: StudySection, records: Records, folder: StudyFolder, seconds: float, going: Mapping[int, float]
    ) -> None:
        """Draw the table again, now and then; `seconds` were worked on the study, and by number on what is going."""
        if self._live is not None and time.monotonic() >= self._drawn_at + _REFRESH_S:
            self._drawn_at = time.monotonic()
            heading = f"{folder.path}: {counts_text(records)}; {clock_text(seconds)}{_left_text(study, records, going)}"
            table = _drawing(study, records, folder, going, console.err.height)
            self._live.update(Group(Text(heading, style="bold"), table), refresh=True)

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


def _drawing(
    study: StudySection, records: Records, folder: StudyFolder, going: Mapping[int, float], height: int
) -> RichTable:
    """Return the live table: what runs, and the best so far."""
    ranked = sorted(
        (record for record in records.values() if record.state == "finished" and record.value is not None),
        key=lambda record: (record.value or 0.0) * (1 if study.less_is_better else -1),
    )
    room = max(2, height - 8)
    shown_going = list(going)[: max(1, room - 3)]
    table = RichTable(box=None, pad_edge=False, expand=False)
    for name in ("run", "state", study.metric, "epoch", "time"):
        table.add_column(escape(visible(name)), justify="left" if name == "state" else "right", no_wrap=True)
    table.add_column("values", no_wrap=True, overflow="ellipsis", ratio=1)
    for number_, seconds in going.items():
        if number_ in shown_going:
            record = records[number_]
            value, epoch = _newest(study, folder.run(number_))
            time_ = clock_text(record.seconds + seconds)
            table.add_row(
                str(number_), "running", value, epoch, time_, escape(values_text(record.values)), style="cyan"
            )
    for record in ranked[: room - len(shown_going)]:
        table.add_row(
            str(record.number),
            "finished" if record is not ranked[0] else "best",
            number(record.value or 0.0),
            "",
            clock_text(record.seconds),
            escape(values_text(record.values)),
        )
    return table


def _left_text(study: StudySection, records: Records, going: Mapping[int, float]) -> str:
    """Return how long the rest will take if its runs take as long as those before; empty where that says little."""
    took = [record.seconds for record in records.values() if record.state == "finished" and record.seconds]
    if study.by_generations or not took or not going:
        return ""
    left = sum(mean(took) for record in records.values() if not record.settled)
    left -= sum(min(mean(took), records[number].seconds + seconds) for number, seconds in going.items())
    return f", about {clock_text(left / len(going))} left"


def _newest(study: StudySection, run: Run) -> tuple[str, str]:
    """Return the newest value of the metric that a run has recorded, and its epoch."""
    records = last_records(run)
    values = [record[study.metric] for record in records if isinstance(record.get(study.metric), int | float)]
    epoch = records[-1].get("epoch") if records else None
    return (number(values[-1]) if values else "…"), (f"{epoch:.1f}" if isinstance(epoch, int | float) else "…")


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
        rates = [run.samples_per_second for run in runs if run.samples_per_second is not None]
        seconds = [run.seconds for run in runs if run.state == "finished" and run.seconds]
        cost = [f"{mean(rates):,.0f}" if rates else "–", clock_text(mean(seconds)) if seconds else "–"]
        rows.append([label, *(shown_value(runs[0].values.get(key)) for key in keys), result + mark, *cost, state])
    more = f"; {len(points) - len(shown)} more rows in {folder.table_file}" if len(points) > len(shown) else ""
    names = _short_names(keys)
    return Table(
        str(folder.path),
        ["run", *names, study.metric, "samples/s", "time", "state"],
        rows,
        f"{counts_text(records)}{more}",
    )


def _short_names(keys: list[str]) -> list[str]:
    short = [key.rpartition(".")[2] for key in keys]
    return short if len({*short}) == len(short) else keys


def _spread(values: list[float]) -> float:
    """Return the standard deviation of a sample."""
    middle = mean(values)
    return float((sum((value - middle) ** 2 for value in values) / (len(values) - 1)) ** 0.5)
