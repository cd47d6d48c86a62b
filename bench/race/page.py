"""The results of a race, lane by lane, and the page that shows them."""

import datetime
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch

from bench.race.contenders import CONTENDERS, OWN, PLAIN, PODIUM
from bench.race.lane import Lane
from podium.runs.folder import environment

#: Contenders round differently, and the differences grow with the updates. Measured on the plain loop of each lane:
#: weights 1e-6 larger, float64 or another number of threads change the loss by up to 1e-4; an update less, or a
#: learning rate 2 % higher, by 1e-3 and more.
TOLERANCE = 5e-4
#: a loss that has not fallen by this fraction is no basis for a comparison
LEAST_FALL = 0.05


#: named in the table's heading; rows with another number say so
_USUALLY_COMPARED = 100
_TABLE_BEGINS, _TABLE_ENDS = "<!-- the race -->", "<!-- end of the race -->"


@dataclass
class LaneResult:
    """Losses after the same number of updates, and samples per second round by round."""

    lane: Lane
    flops_per_sample: float
    #: of the initial weights
    first_loss: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)

    def deviation(self, contender: str) -> float:
        """Return the deviation of its loss from the plain loop's, relative to the latter."""
        return abs(self.losses[contender] / self.losses[PLAIN] - 1)

    @property
    def void(self) -> str:
        """Return why the lane does not count; empty if it does."""
        deviating = [name for name in self.losses if not self.deviation(name) <= TOLERANCE]
        if deviating:
            return f"another loss than the plain loop's: {', '.join(CONTENDERS[name].title for name in deviating)}"
        if not self.losses[PLAIN] <= (1 - LEAST_FALL) * self.first_loss:
            return f"the loss has hardly fallen from {self.first_loss:.6g}, so it compares nothing"
        return ""

    def median(self, contender: str) -> float:
        return statistics.median(self.rates[contender])

    @property
    def fastest_other(self) -> str | None:
        others = [contender for contender in self.rates if contender not in OWN]
        return max(others, key=self.median) if others else None

    def ratios(self, other: str) -> list[float]:
        """Return Podium / other for every round: a slow minute affects both sides."""
        return [podium / its for podium, its in zip(self.rates[PODIUM], self.rates[other], strict=True)]


def table(results: Sequence[LaneResult], peak: float) -> str:
    lines = [
        "| lane | contender | samples/s | least … most | Podium / it (least … most) | of SGEMM peak | "
        f"loss after {_USUALLY_COMPARED} updates |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        lines += [_row(result, contender, peak) for contender in CONTENDERS if contender in result.losses]
    lines += [f"\nVoid: {result.lane.title}, {result.void}." for result in results if result.void]
    return "\n".join(lines) + "\n"


def _row(result: LaneResult, contender: str, peak: float) -> str:
    title = CONTENDERS[contender].title
    if contender in result.rates:
        rates, middle = result.rates[contender], result.median(contender)
        share = middle * result.flops_per_sample / peak
        spread = f"{_rate(min(rates))} … {_rate(max(rates))}"
        cells = [_rate(middle), spread, _ratio(result, contender), f"{share:.0%}"]
    else:
        cells = ["void" if result.void else "–", "", "", ""]
    shown = [result.lane.title, f"**{title}**" if contender == PODIUM else title, *cells, _loss(result, contender)]
    return f"| {' | '.join(shown)} |"


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def _ratio(result: LaneResult, contender: str) -> str:
    """Format Podium's rate divided by the contender's; in Podium's own row, by that of the fastest other."""
    other = result.fastest_other if contender == PODIUM else contender
    if other is None or PODIUM not in result.rates:
        return ""
    ratios = result.ratios(other)
    middle, spread = f"{statistics.median(ratios):.2f}", f"({min(ratios):.2f} … {max(ratios):.2f})"
    return f"**{middle}** {spread} to the fastest other" if contender == PODIUM else f"{middle} {spread}"


def _loss(result: LaneResult, contender: str) -> str:
    text = f"{result.losses[contender]:.6g}"
    if result.lane.num_compared != _USUALLY_COMPARED:
        text += f" after {result.lane.num_compared}"
    if contender == PLAIN:
        return text
    deviation = result.deviation(contender)
    return f"{text} ({deviation:.0e} off)" if deviation else f"{text} (equal)"


def page(results: Sequence[LaneResult], peak: float, num_rounds: int, seconds: float, load: float) -> str:
    """Format the table with when, where and how it was measured."""
    machine = environment(torch.get_num_threads(), torch.device("cpu"))
    threads = sorted({count for result in results for count in result.threads.values()})
    packages = {CONTENDERS[contender].package for result in results for contender in result.losses}
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in sorted(packages | {"torch"}))
    return (
        f"# The race\n\n"
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}; {machine['processor']}, {machine['num_cores']} cores, "
        f"{machine['instruction_set']}, threads: {' or '.join(map(str, threads))}, load {load:.2f} at the start; "
        f"{versions}, Python {machine['python']}. SGEMM peak {peak / 1e9:,.0f} GFLOP/s. Medians of {num_rounds} rounds "
        f"of {_stretch(results, seconds)}, contenders in turns, each in a process of its own; ratios are those of each "
        "round. "
        f"Made by `make race`; `bench/race/__main__.py` says what is compared.\n\n"
        f"{table(results, peak)}"
    )


def _stretch(results: Sequence[LaneResult], seconds: float) -> str:
    longer = [result.lane for result in results if result.lane.least_updates > 1]
    return f"{seconds:g} s each" + "".join(f" ({lane.title}: {lane.least_updates} updates or more)" for lane in longer)


def merged(earlier: str, page: str) -> str:
    """Return a page of some lanes, with the other lanes of an earlier page and when those were raced."""
    titles = {_title(row) for row in _rows(page)}
    kept = [row for row in _rows(earlier) if _title(row) not in titles]
    if not kept:
        return page
    # The last line that names a lane says when it was raced; without one, it was raced when the page was made.
    lines = [line for line in earlier.splitlines() if line.startswith(_EARLIER)]
    lanes: dict[str, list[str]] = {}
    for title in dict.fromkeys(map(_title, kept)):
        told = [line.split(": ", 2)[2] for line in lines if title in line.split(": ", 2)[1]]
        lanes.setdefault(told[-1] if told else earlier.splitlines()[2], []).append(title)
    before = [f"{_EARLIER} {'; '.join(titles)}: {how}" for how, titles in lanes.items()]
    return "\n".join([page.rstrip("\n"), *kept, "", "\n\n".join(before), ""])


_EARLIER = "Raced before:"


def _rows(page: str) -> list[str]:
    """Return the rows of the table without the two of its heading."""
    return [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| lane |")]


def _title(row: str) -> str:
    return row.split(" | ")[0].removeprefix("| ")


def show_table(readme: str, page: str) -> str:
    """Return a README with a short table of a race's page between the markers: Podium and the fastest other."""
    before, rest = readme.split(_TABLE_BEGINS)
    _, after = rest.split(_TABLE_ENDS)
    lanes: dict[str, list[list[str]]] = {}
    for row in _rows(page):
        lane, *cells = row.removeprefix("| ").removesuffix(" |").split(" | ")
        lanes.setdefault(lane, []).append(cells)
    lines = [
        "| lane | Podium, samples/s | the fastest other | Podium / it (least … most) | of SGEMM peak |",
        "|---|---:|---|---|---:|",
    ]
    for lane, ((_, rate, _, ratio, share, *_), *others) in lanes.items():
        named = ratio.removesuffix(" to the fastest other")
        # The row of the fastest other has the same numbers.
        fastest = next((cells for cells in others if cells[3] == named.replace("*", "")), None)
        shown = f"{fastest[0]}, {fastest[1]}" if fastest else ""
        lines.append(f"| {lane} | {rate} | {shown} | {named} | {share} |")
    return "\n".join([f"{before}{_TABLE_BEGINS}", *lines, f"{_TABLE_ENDS}{after}"])


def load_average() -> float:
    return os.getloadavg()[0]
