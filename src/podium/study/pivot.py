"""The results of a study of two keys as a table of one against the other, as people write it down."""

from podium.study.definition import StudySection
from podium.study.folder import shown_value
from podium.study.records import Records, by_point, point_value
from podium.ui.console import number
from podium.ui.table import Table

_MAX_ROWS, _MAX_COLUMNS = 40, 8


def pivot_table(study: StudySection, records: Records) -> Table | None:
    """Return the means over seeds, first key down and second key across; None unless it is a grid of two keys."""
    lists = [given for given in study.values.values() if isinstance(given, list)]
    if study.method != "grid" or len(study.values) != 2 or min(map(len, lists)) < 2:
        return None
    down, across = lists
    if len(down) > _MAX_ROWS or len(across) > _MAX_COLUMNS:
        return None
    keys = list(study.values)
    found = {
        tuple(shown_value(runs[0].values.get(key)) for key in keys): value
        for runs in by_point(records.values()).values()
        if (value := point_value(runs)) is not None and all(run.feasible for run in runs)
    }
    best = {}
    for right in map(shown_value, across):
        column = [found[shown_value(left), right] for left in down if (shown_value(left), right) in found]
        best[right] = (min if study.less_is_better else max)(column, default=None)
    rows = [
        [left, *(_cell(found.get((left, right)), best[right]) for right in best)] for left in map(shown_value, down)
    ]
    if all(cell == "–" for row in rows for cell in row[1:]):
        return None
    names = [key.rpartition(".")[2] for key in keys]
    columns = [f"{names[0]} \\ {names[1]}", *best]
    return Table(f"{study.metric} by {keys[0]} and {keys[1]}", columns, rows, "* the best of its column")


def _cell(value: float | None, best: float | None) -> str:
    return "–" if value is None else f"{number(value)}{' *' if value == best else '  '}"
