"""How plans came out: at the end of a planned training, and all of them with `podium plan --history`."""

from podium.plan import history
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

_UNITS = {"samples_per_second": "samples/s", "total_s": "seconds to the end", "memory": "memory per instance"}


def show_grades(graded: history.Graded) -> None:
    """Print what was predicted of a training beside what was measured."""
    rows = [
        [
            _UNITS.get(one.what, one.what),
            _value(one.what, one.predicted.value),
            f"{_value(one.what, one.predicted.low)} … {_value(one.what, one.predicted.high)}",
            _value(one.what, one.measured),
            f"{100 * one.error:+.0f} %",
            "inside" if one.inside else "outside",
        ]
        for one in graded.grades
    ]
    columns = ["", "predicted", "nine of ten", "measured", "error", "interval"]
    console.show_table(Table("this training was planned", columns, rows, "`podium plan --history` shows earlier ones"))


def show_history() -> None:
    """Print the errors of all plans whose trainings have ended, the newest last."""
    found = history.history()
    if not found:
        console.say("no planned training has ended yet: plan one with `podium plan RECIPE --measure`, then train it")
        return
    rows = []
    for graded in found:
        errors = {one.what: one for one in graded.grades}
        cells = [
            f"{100 * errors[what].error:+.0f} %{'' if errors[what].inside else ' (outside)'}" if what in errors else ""
            for what in _UNITS
        ]
        rows.append([graded.when, graded.run, *cells])
    grades = [one for graded in found for one in graded.grades]
    inside = sum(one.inside for one in grades)
    typical = sorted(abs(one.error) for one in grades)[len(grades) // 2] if grades else 0.0
    caption = (
        f"{inside} of {len(grades)} measured values lay inside their intervals; median error {100 * typical:.0f} %"
    )
    console.show_table(Table("plans and what came of them", ["ended", "run", *_UNITS.values()], rows, caption))


def _value(what: str, value: float) -> str:
    return f"{value / 1e9:.2f} GB" if what == "memory" else number(value)
