"""The race: the same model, samples, optimiser and global batch, trained by Podium and by what others use.

    make race                                   all of it; writes bench/results/race.md; meant to fit into 35 minutes
    python -m bench.race --quick                to see that it works, not to measure
    python -m bench.race --lanes mnist-8 --contenders podium pytorch --rounds 3

Podium          `podium train` as installed, by the wall clock: feed, metric records, TensorBoard, digests of the
                weights; a checkpoint only at the end, as the others save nothing.
PyTorch loop    as its tutorials write it, with a DataLoader (and again with two loader workers), torch's optimiser
                and torch's number of threads.
Tuning guide    that loop as PyTorch's own guides tune it for processors: the fused optimiser, channels-last weights
                and images for two-dimensional convolutions, jemalloc with the guide's settings; and all that again
                with torch.compile.
Lightning       its Trainer with logger, checkpoints, progress bar and summary switched off; and with torch.compile.
Accelerate      the loop of its tutorials.
JAX + Flax      the same network written in Flax, each update one compiled call with donated buffers, samples on the
                device; mnist, neuron, ResNet-20 and GPT-2. In an environment of its own, with all of XLA's threads.
Trainer         Hugging Face's, with the library's own model of the same weights; only for BERT and GPT-2;
                and with torch.compile.
Podium, 2 × 1   Podium against itself: two instances of one thread, two replicas of half the micro-batch; only where
                no batch norm looks at a whole micro-batch.

All start from the same weights, and all but the last train the workload's own module. The others get the samples as
tensors in memory, images as floats (Podium keeps them as stored, and converts them while it trains), save nothing and
read no loss.

In every lane, each contender first trains some updates without dropout; afterwards all must have the plain loop's loss
(within rounding, see `page.py`), or the lane is void and the exit code 1. Whoever was far behind in that is not raced
further. Then come the rounds: in each one, every contender warms up and is timed in a process of its own, for some
seconds or for the lane's minimum number of updates; who starts changes from round to round. Compiled code is kept in
`.venv/compiled`, also from race to race, so each contender compiles a lane once, and the warm-up loads it.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.race.contenders import CONTENDERS, OWN, PLAIN, entered
from bench.race.heat import Heat
from bench.race.lane import Lane, build_workload
from bench.race.lanes import LANES
from bench.race.machine import best_of, count_work, measured_peaks
from bench.race.page import LaneResult, load_average, page, show_table
from bench.race.process import HeatError, Result, run_heat
from podium.recipe.loading import Recipe

RESULTS = Path(__file__).parents[1] / "results" / "race.md"
#: contains the table of RESULTS, see `show_table`
README = Path(__file__).parents[2] / "README.md"
MIN_ROUNDS = 3


def main() -> None:
    options = _options()
    began, load = time.monotonic(), load_average()
    if load > 0.5:
        print(f"the machine is busy (load {load:.2f}): the numbers will say little")
    results, peaks = [], [measured_peaks()]
    for name in options.lanes:
        with tempfile.TemporaryDirectory(prefix="podium-race-") as folder:
            results.append(race(name, options.contenders, options.rounds, options.seconds, Path(folder)))
        peaks.append(measured_peaks())
    text = page(results, best_of(peaks), options.rounds, options.seconds, load, (time.monotonic() - began) / 60)
    print(f"\n{text}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
        print("written to", options.out)
    if options.out == RESULTS:
        README.write_text(show_table(README.read_text(encoding="utf-8"), text), encoding="utf-8")
    if any(result.void or result.failed for result in results):
        sys.exit(1)


def race(lane_name: str, contenders: list[str], num_rounds: int, seconds: float, folder: Path) -> LaneResult:
    """Race one lane: compare the losses, then run the rounds."""
    lane = LANES[lane_name]
    lane.make_data(folder)
    recipe = lane.load(folder)
    build_workload(recipe).source("train")  # makes simulated data
    result = LaneResult(lane, count_work(lane, recipe))
    _compare(result, entered(lane, contenders), folder)
    if result.void:
        return result
    contenders = [name for name in result.still_racing() if name in contenders]
    _say(f"{lane_name}: racing on: {', '.join(contenders)}")
    guesses = dict(result.first_rates)
    for number in range(1, num_rounds + 1):
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            heat = _stretch(lane, recipe, contender, seconds * guesses[contender], folder)
            if (done := _run(result, heat)) is None:
                continue
            guesses[contender] = done.samples_per_second
            result.rates.setdefault(contender, []).append(done.samples_per_second)
            rate = f"{done.samples_per_second:,.2f} samples/s over {done.seconds:.1f} s"
            _say(f"{lane_name}, round {number} of {num_rounds}: {contender}: {rate}")
    result.rates = {name: rates for name, rates in result.rates.items() if name not in result.failed}
    return result


def _compare(result: LaneResult, contenders: list[str], folder: Path) -> None:
    """Have all train the same updates, and note their losses and a first estimate of their speed."""
    lane = result.lane
    for contender in [PLAIN, *(name for name in contenders if name != PLAIN)]:
        warmup = lane.num_not_timed
        heat = Heat(contender, lane.name, str(folder), warmup, lane.num_compared - warmup, compare=True)
        if (done := _run(result, heat)) is None:
            continue
        if contender == PLAIN:
            result.first_loss = done.first_loss  # the same for all
        result.losses[contender], result.threads[contender] = done.loss, done.threads
        result.first_rates[contender] = done.samples_per_second
        told = f"loss {done.loss:.7g}, {result.deviation(contender):.1e} off, {done.samples_per_second:,.1f} samples/s"
        _say(f"{lane.name}: {contender}: {told}")


def _stretch(lane: Lane, recipe: Recipe, contender: str, num_samples: float, folder: Path) -> Heat:
    """Return the heat over about so many samples, or the lane's least updates.

    Podium's records carry its times, so warm-up and stretch end with one. The first record is slow to write.
    """
    per_record = recipe.engine.updates_per_call
    num_updates = max(num_samples / recipe.batch.global_batch, lane.least_updates)
    num_records = max(1, round(num_updates / per_record))
    return Heat(contender, lane.name, str(folder), 2 * per_record, per_record * num_records)


def _run(result: LaneResult, heat: Heat) -> Result | None:
    """Run a heat. A contender other than Podium and the plain loop may fail: the page tells, and the race goes on."""
    try:
        return run_heat(heat)
    except HeatError as error:
        if heat.contender in (*OWN, PLAIN):
            sys.exit(str(error))
        said = str(error).strip().splitlines()
        result.failed[heat.contender] = said[-1]
        _say(str(error))
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES), metavar="LANE", help=", ".join(LANES))
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME",
        help=", ".join(CONTENDERS),
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one stretch of one contender")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 s")
    parser.add_argument(
        "--out", type=Path, help=f"file for the table [default: {RESULTS.name} in bench/results after a whole race]"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, 1.0
    whole = set(options.lanes) == set(LANES) and set(options.contenders) == set(CONTENDERS)
    if whole and options.rounds >= MIN_ROUNDS and options.out is None:
        options.out = RESULTS
    missing = {CONTENDERS[name].package for name in options.contenders if not CONTENDERS[name].version}
    if missing:
        sys.exit(f"not installed: {', '.join(sorted(missing))}; `make race` installs them")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
