"""The results of a race, lane by lane, and the page that shows them."""

import datetime
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.race.contenders import CONTENDERS, OWN, PLAIN, PODIUM
from bench.race.lane import Lane
from bench.race.machine import Work
from podium.profiling.peaks import Peaks
from podium.runs.folder import environment

#: Contenders round differently, and the differences grow with the updates. Measured on the plain loop of each lane:
#: weights 1e-6 larger, float64 or another number of threads change the loss by up to 1e-4; an update less, or a
#: learning rate 2 % higher, by 1e-3 and more.
TOLERANCE = 5e-4
#: a loss that has not fallen by this fraction is no basis for a comparison
LEAST_FALL = 0.02
#: A contender that makes less than this share of the samples/s of both Podium and the fastest other while losses are
#: compared, or that three others leave behind, is not raced further.
FAR_BEHIND, MOST_OTHERS = 0.6, 3

#: named in the table's heading; rows with another number say so
_USUALLY_COMPARED = 100
_SUMMARY = "Podium against the fastest of all others, lane by lane:"
_TABLE_BEGINS, _TABLE_ENDS = "<!-- the race -->", "<!-- end of the race -->"


@dataclass
class LaneResult:
    """Losses after the same number of updates, and samples per second round by round."""

    lane: Lane
    work: Work
    #: of the initial weights
    first_loss: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    #: samples per second while losses were compared
    first_rates: dict[str, float] = field(default_factory=dict)
    #: contenders that could not run, and what they said
    failed: dict[str, str] = field(default_factory=dict)

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

    def still_racing(self) -> list[str]:
        """Return who races on after losses were compared: ours, the plain loop, and the fastest others."""
        others = {name: rate for name, rate in self.first_rates.items() if name not in OWN}
        fastest_other = max(others.values(), default=0.0)
        least = FAR_BEHIND * min(fastest_other, self.first_rates.get(PODIUM, fastest_other))
        fastest = [name for name in sorted(others, key=lambda name: -others[name]) if others[name] >= least]
        kept = {*OWN, PLAIN, *fastest[:MOST_OTHERS]}
        return [name for name in self.first_rates if name in kept]

    def median(self, contender: str) -> float:
        return statistics.median(self.rates[contender])

    @property
    def fastest_other(self) -> str | None:
        others = [contender for contender in self.rates if contender not in OWN]
        return max(others, key=self.median) if others else None

    def ratios(self, other: str) -> list[float]:
        """Return Podium / other for every round: a slow minute affects both sides."""
        return [podium / its for podium, its in zip(self.rates[PODIUM], self.rates[other], strict=True)]


def summary(results: Sequence[LaneResult]) -> str:
    """Return the line about Podium against the fastest of all others, over the lanes."""
    against = {result.lane.title: _middle_ratio(result) for result in results if PODIUM in result.rates}
    known = {title: ratio for title, ratio in against.items() if ratio is not None}
    if not known:
        return ""
    lowest, highest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return (
        f"{_SUMMARY} geometric mean of {len(known)} lanes **{statistics.geometric_mean(known.values()):.2f}**, "
        f"lowest {known[lowest]:.2f} ({lowest}), highest {known[highest]:.2f} ({highest}).\n\n"
    )


def _middle_ratio(result: LaneResult) -> float | None:
    other = result.fastest_other
    return None if other is None else statistics.median(result.ratios(other))


def roofline(results: Sequence[LaneResult], peaks: Peaks) -> str:
    """Return the table of how close Podium comes to what arithmetic and memory of this machine allow."""
    lines = [
        "\n## How close to the machine's limits\n",
        f"Measured: {peaks.flops_per_second / 1e9:,.0f} GFLOP/s in float32 products, "
        f"{peaks.bytes_per_second / 1e9:,.1f} GB/s to and from memory, so arithmetic limits from {peaks.ridge:.1f} "
        "FLOPs per byte on. FLOPs are those of products and convolutions in their plain form, so a kernel that gets by "
        "with fewer may pass the limit; bytes are what crosses even if all else is fused and no cache holds it "
        "(`bench/race/machine.py`): an update whose megabytes fit the caches needs fewer.\n",
        "| lane | GFLOP per update | MB per update | FLOPs per byte | limited by | limit, samples/s | Podium's share |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for result in results:
        work, limit = result.work, result.work.fastest(peaks)
        share = f"{result.median(PODIUM) / limit:.0%}" if PODIUM in result.rates else ""
        cells = [f"{work.flops / 1e9:.3g}", f"{work.bytes / 1e6:,.0f}", f"{work.flops / work.bytes:.1f}"]
        cells += [work.limited_by(peaks), _rate(limit), share]
        lines.append(f"| {result.lane.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(results: Sequence[LaneResult], peak: float) -> str:
    lines = [
        "| lane | contender | samples/s | least … most | Podium / it (least … most) | of SGEMM peak | "
        f"loss after {_USUALLY_COMPARED} updates |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        lines += [_row(result, contender, peak) for contender in CONTENDERS if contender in result.losses]
    lines += [f"\nVoid: {result.lane.title}, {result.void}." for result in results if result.void]
    lines += [
        f"\nFailed: {CONTENDERS[name].title} on {result.lane.title}: {why}"
        for result in results
        for name, why in result.failed.items()
    ]
    return "\n".join(lines) + "\n"


def _row(result: LaneResult, contender: str, peak: float) -> str:
    title = CONTENDERS[contender].title
    if contender in result.rates:
        rates, middle = result.rates[contender], result.median(contender)
        spread = f"{_rate(min(rates))} … {_rate(max(rates))}"
        cells = [_rate(middle), spread, _ratio(result, contender), _share(result, middle, peak)]
    elif contender in result.first_rates and not result.void:
        rate = result.first_rates[contender]
        behind = f"{result.first_rates[PODIUM] / rate:.2f}" if PODIUM in result.first_rates else ""
        cells = [_rate(rate), "raced no further", behind, _share(result, rate, peak)]
    else:
        cells = ["void" if result.void else "–", "", "", ""]
    shown = [result.lane.title, f"**{title}**" if contender == PODIUM else title, *cells, _loss(result, contender)]
    return f"| {' | '.join(shown)} |"


def _share(result: LaneResult, rate: float, peak: float) -> str:
    return f"{rate * result.work.flops_per_sample / peak:.0%}"


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


def page(
    results: Sequence[LaneResult], peaks: Peaks, num_rounds: int, seconds: float, load: float, minutes: float
) -> str:
    """Format the table with when, where and how it was measured."""
    machine = environment(torch.get_num_threads(), torch.device("cpu"))
    threads = sorted({count for result in results for count in result.threads.values()})
    raced = {contender for result in results for contender in result.losses} | {PLAIN}
    packages = {CONTENDERS[contender].package: CONTENDERS[contender].version for contender in raced}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    return (
        f"# The race\n\n"
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}; {machine['processor']}, {machine['num_cores']} cores, "
        f"{machine['instruction_set']}, threads: {' or '.join(map(str, threads))}, load {load:.2f} at the start; "
        f"{versions}, Python {machine['python']}. SGEMM peak {peaks.flops_per_second / 1e9:,.0f} GFLOP/s. Medians of "
        f"{num_rounds} rounds of {_stretch(results, seconds)}, contenders in turns, each in a process of its own; "
        "ratios are those of each round. Who was far behind while losses were compared, without dropout, was raced no "
        "further: such rows show that one stretch. "
        f"The whole race took {minutes:.0f} minutes. "
        f"Made by `make race`; `bench/race/__main__.py` says what is compared.\n\n"
        f"{summary(results)}{table(results, peaks.flops_per_second)}{roofline(results, peaks)}"
    )


def _stretch(results: Sequence[LaneResult], seconds: float) -> str:
    longer = [result.lane for result in results if result.lane.least_updates > 1]
    return f"{seconds:g} s each" + "".join(f" ({lane.title}: {lane.least_updates} updates or more)" for lane in longer)


def _rows(page: str) -> list[str]:
    """Return the rows of the first table without the two of its heading."""
    table = page.split("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| lane |")]


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
    lines += [f"\n{line}" for line in page.splitlines() if line.startswith(_SUMMARY)]
    return "\n".join([f"{before}{_TABLE_BEGINS}", *lines, f"{_TABLE_ENDS}{after}"])


def load_average() -> float:
    return os.getloadavg()[0]
