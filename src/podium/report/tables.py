"""Cards and tables of a report that need no script: of a run, of many, of time to solution, of scaling."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podium.recipe.differences import written
from podium.report.scaling import Scaling
from podium.report.solution import Group
from podium.runs.facts import shorter_than_an_epoch
from podium.ui.console import clock_text, number
from podium.ui.table import Table
from podium.ui.visible import visible

if TYPE_CHECKING:
    from podium.report.page import Comparison

PHASE_COLOURS = {
    "startup": "#c7cdd4",
    "compile": "#94a3b8",
    "train": "#2563eb",
    "input_wait": "#e4572e",
    "communication": "#a855f7",
    "valid": "#0f9d78",
    "checkpoint": "#eab308",
    "report": "#64748b",
}
_MAX_KEYS = 4


@dataclass(frozen=True)
class Card:
    """A number at the top of the page, with what it is and, below, what goes with it."""

    value: str
    name: str
    note: str = ""


def cards_of_run(facts: Any) -> list[Card]:
    """Return the numbers of one run."""
    summary = facts.summary
    valid, averaged = summary.get("valid") or {"last": {}, "best": {}}, summary.get("average") or {}
    best, topology, cards = valid["best"], summary.get("topology") or {}, []
    for name, value in valid["last"].items():
        note = f"best {number(best[name])} at update {best['update']:,}" if name in best else ""
        cards.append(Card(number(value), f"validation {visible(name)}", note))
    cards += [
        Card(number(value), f"validation {visible(name)}", "averaged weights")
        for name, value in averaged.items()
        if name != "weights"
    ]
    if "updates" in summary:
        epochs = "" if shorter_than_an_epoch(summary) else f" · {summary.get('epochs', 0):.4g} epochs"
        cards.append(Card(f"{summary['updates']:,}", "updates", f"of {summary.get('total_updates', 0):,}{epochs}"))
    if facts.rate is not None:
        cards.append(Card(number(facts.rate), "samples/s", f"{summary.get('samples', 0):,} samples"))
    if facts.seconds is not None:
        hours = facts.seconds * facts.num_devices / 3600
        cards.append(Card(clock_text(facts.seconds), "time", f"{number(hours)} {facts.device_name}-hours"))
    if "cpu_percent" in summary:
        instances = topology.get("instances", 1)
        note = f"{instances} instance{'s' if instances > 1 else ''}"
        cards.append(Card(f"{summary['cpu_percent']:.0f} %", "processor use", note))
    if summary:
        cards.append(_energy_card(facts.energy_j))
    if "num_parameters" in summary:
        cards.append(Card(f"{summary['num_parameters']:,}", "parameters"))
    return cards


def cards_of_runs(comparison: "Comparison") -> list[Card]:
    """Return the numbers of many runs."""
    runs = comparison.runs
    counts: dict[str, int] = {}
    for facts in runs:
        counts[facts.state] = counts.get(facts.state, 0) + 1
    cards = []
    best = comparison.ranked()[0]
    if comparison.metric is not None and (found := comparison.best(best)) is not None:
        cards.append(Card(number(found[0]), f"best {visible(comparison.metric)}", f"{best.name}, update {found[1]:,}"))
    cards.append(Card(f"{len(runs):,}", "runs", ", ".join(f"{count:,} {state}" for state, count in counts.items())))
    rates = [facts.rate for facts in runs if facts.rate is not None]
    if rates:
        cards.append(Card(number(max(rates)), "samples/s, the fastest", f"{number(min(rates))} the slowest"))
    known = [facts for facts in runs if facts.seconds is not None]
    if known:
        hours = math.fsum((facts.seconds or 0.0) * facts.num_devices for facts in known) / 3600
        names = {facts.device_name for facts in known}
        device = names.pop() if len(names) == 1 else "device"
        total = math.fsum(facts.seconds or 0.0 for facts in known)
        cards.append(Card(clock_text(total), "time of all runs", f"{number(hours)} {device}-hours"))
    energies = [facts.energy_j for facts in runs]
    whole = None if any(one is None for one in energies) else math.fsum(one or 0.0 for one in energies)
    cards.append(_energy_card(whole))
    return cards


def _energy_card(joules: float | None) -> Card:
    if joules is None:
        return Card("unknown", "energy", "not measured")
    return Card(energy_text(joules), "energy", "measured")


def energy_text(joules: float | None) -> str:
    """Return an energy in the unit that suits it."""
    if joules is None:
        return "unknown"
    return f"{number(joules / 3.6e6)} kWh" if joules >= 3.6e5 else f"{number(joules / 1000)} kJ"


def phases_of(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return where the time of a run went, for the bar."""
    total = max(1e-9, sum(seconds.get(name, 0.0) for name in PHASE_COLOURS))
    return [
        {
            "name": name.replace("_", " "),
            "colour": colour,
            "seconds": f"{seconds[name]:.1f} s",
            "percent": 100 * seconds[name] / total,
        }
        for name, colour in PHASE_COLOURS.items()
        if seconds.get(name, 0.0) / total >= 0.001
    ]


def brief_solution_table(groups: Sequence[Group], keys: Sequence[str]) -> Table:
    """Return the same for a terminal: costs without their range, energy only where some of it is known."""
    table = solution_table(groups, keys)
    rows = [[*row[:-2], row[-2].partition(" (")[0], row[-1].partition(" (")[0]] for row in table.rows]
    if any(row[-1] not in ("unknown", "–") for row in rows):
        return Table(table.title, table.columns, rows)
    return Table(table.title, table.columns[:-1], [row[:-1] for row in rows], "energy: unknown, as it was not measured")


def solution_table(groups: Sequence[Group], keys: Sequence[str]) -> Table:
    """Return what each choice took to reach the target, the fastest first: median over seeds, least and most."""
    varied = [key for key in keys if key != "seed"][:_MAX_KEYS]
    ordered = sorted(groups, key=lambda group: (not group.complete, (group.spread("seconds") or (math.inf,))[0]))
    rows = []
    for group in ordered:
        seconds, hours, energy = (group.spread(name) for name in ("seconds", "device_hours", "energy_j"))
        facts = group.solutions[0].facts
        rows.append(
            [
                *([facts.name] if not varied else []),
                *(_value(group.values.get(key)) for key in varied),
                f"{group.global_batch:,}",
                str(facts.num_devices),
                _spread(seconds, seconds_text) if seconds else "unknown" if group.reached else "not reached",
                f"{len(group.reached)} of {len(group.solutions)}",
                _spread(hours, number) if hours else "unknown" if group.reached else "–",
                _spread(energy, energy_text) if energy else "unknown" if group.reached else "–",
            ]
        )
    device = groups[0].solutions[0].facts.device_name if groups else "device"
    names = short_names(varied) if varied else ["run"]
    columns = [*names, "global batch", f"{device}s", "time", "seeds", f"{device}-hours", "energy"]
    return Table("Time to solution", columns, rows)


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else visible(written(value))


def seconds_text(seconds: float) -> str:
    """Return a duration, with a fraction where it is short."""
    return clock_text(seconds) if seconds >= 60 else f"{seconds:.3g} s"


def _spread(values: tuple[float, float, float], text: Any) -> str:
    middle, least, most = values
    return text(middle) if least == most else f"{text(middle)} ({text(least)} … {text(most)})"


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the last parts of keys where these differ."""
    short = [visible(key.rpartition(".")[2]) for key in keys]
    return short if len({*short}) == len(short) else [visible(key) for key in keys]


def scaling_table(scaling: Scaling) -> Table:
    """Return throughput and efficiency by number of devices."""
    rows = [
        [
            f"{row.devices:,}",
            str(row.num_runs),
            number(row.rate)
            if row.least == row.most
            else f"{number(row.rate)} ({number(row.least)} … {number(row.most)})",
            number(row.rate / row.devices),
            f"{100 * row.efficiency:.0f} %",
        ]
        for row in scaling.rows
    ]
    name = scaling.device_name
    columns = [f"{name}s", "runs", "samples/s", f"samples/s per {name}", "efficiency"]
    return Table(scaling.name or "all runs", columns, rows)
