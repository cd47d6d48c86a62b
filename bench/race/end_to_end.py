"""The race as a person waits for it: from the start of the command to the end of a short training.

    python -m bench.race.end_to_end              half an hour on an idle machine; writes results/race_end_to_end.md
    python -m bench.race.end_to_end --lanes mnist-8 --contenders podium pytorch --rounds 1

Everything counts: Python's start, imports, data, the model's building and compilation, the updates (as many as the
race compares losses after), and with Podium its checkpoint and records. JAX finds its samples and weights in files that
are written before. Contenders take turns; each is a process of its
own, whose caches of compiled code are kept from round to round, as on a machine that is used every day. The round
before the first fills them, and is not counted.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from bench.race.contenders import CONTENDERS, JAX, OWN, PLAIN, PODIUM, entered
from bench.race.heat import Heat
from bench.race.lane import Lane, build_workload
from bench.race.lanes import LANES
from bench.race.process import HeatError, run_heat
from bench.where import when_and_where

#: those that a person would choose between
CHOSEN = (PODIUM, PLAIN, "pytorch-tuned-compiled", "lightning", JAX)
RESULTS = Path(__file__).parents[1] / "results" / "race_end_to_end.md"


def race(lane_name: str, contenders: list[str], num_rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of every contender's commands, round by round."""
    lane = LANES[lane_name]
    lane.make_data(folder)
    build_workload(lane.load(folder)).source("train")  # makes simulated data
    contenders = entered(lane, contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    failed: set[str] = set()
    for number in range(num_rounds + 1):
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            if contender in failed:
                continue
            try:
                took = run_heat(_whole(lane, contender, folder)).end_to_end_s
            except HeatError as error:
                print(error, flush=True)
                failed.add(contender)
                continue
            print(f"{lane_name}, round {number} of {num_rounds}: {contender}: {took:.2f} s", flush=True)
            if number:
                seconds[contender].append(took)
    return {name: times for name, times in seconds.items() if name not in failed}


def _whole(lane: Lane, contender: str, folder: Path) -> Heat:
    warmup = lane.num_not_timed
    return Heat(contender, lane.name, str(folder), warmup, lane.num_compared - warmup, end_to_end=True)


def rows(lane_name: str, seconds: dict[str, list[float]]) -> list[str]:
    """Return the lane's rows: Podium first, the others with how many times as long as Podium they took."""
    lane, found = LANES[lane_name], []
    for contender, times in seconds.items():
        ratio = ""
        if contender != PODIUM and PODIUM in seconds:
            ratios = [other / podium for other, podium in zip(times, seconds[PODIUM], strict=True)]
            own = " (Podium)" if contender in OWN else ""
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}){own}"
        title, spread = CONTENDERS[contender].title, f"{min(times):.1f} … {max(times):.1f}"
        found.append(
            f"| {lane.title} | {lane.num_compared} | {title} | {statistics.median(times):.1f} | {spread} | {ratio} |"
        )
    return found


def main() -> None:
    """Race all lanes, and write the page after a whole race."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES), metavar="LANE")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CHOSEN), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        "# The race, end to end",
        "",
        f"{when_and_where(load)}. Made by `python -m bench.race.end_to_end`, which says what counts.",
        "",
        f"Seconds from the start of the command to its end; medians of {options.rounds} rounds.",
        "",
        "| lane | updates | contender | seconds | least … most | it / Podium (least … most) |",
        "|---|---:|---|---:|---|---|",
    ]
    for name in options.lanes:
        with tempfile.TemporaryDirectory(prefix="podium-race-") as folder:
            lines += rows(name, race(name, options.contenders, options.rounds, Path(folder)))
    text = "\n".join(lines) + "\n"
    print(text)
    if set(options.lanes) == set(LANES) and set(options.contenders) == set(CHOSEN):
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
