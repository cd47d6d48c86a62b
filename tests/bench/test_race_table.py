"""The README shows what was measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.race import __main__ as the_race
from bench.race.lanes import LANES
from bench.race.machine import Work
from bench.race.page import LaneResult, page, roofline, show_table, summary, table
from bench.race.process import HeatError, Result

from podium.profiling.peaks import Peaks

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_last_race():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert show_table(readme, (ROOT / "bench/results/race.md").read_text(encoding="utf-8")) == readme


def test_a_table_replaces_the_one_before():
    head = "| lane | contender | samples/s | least … most | Podium / it (least … most) | of SGEMM peak | loss |\n"
    rows = [
        "| a, small | **Podium** | 30 | 29 … 31 | **2.00** (1.90 … 2.10) to the fastest other | 50% | 1 |",
        "| a, small | slow | 10 | 9 … 11 | 3.00 (2.90 … 3.10) | 17% | 1 |",
        "| a, small | quick | 15 | 14 … 16 | 2.00 (1.90 … 2.10) | 25% | 1 |",
        "| b | **Podium** | void |  |  |  | 1 |",
    ]
    page = f"# The race\n\nwhen and how\n\n{head}|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    readme = "before\n<!-- the race -->\n| old |\n<!-- end of the race -->\nafter\n"
    shown = show_table(readme, page)
    assert "| a, small | 30 | quick, 15 | **2.00** (1.90 … 2.10) | 50% |\n" in shown
    assert "slow" not in shown
    assert "old" not in shown
    assert shown.startswith("before\n<!-- the race -->\n| lane | Podium, samples/s |")
    assert shown.endswith("<!-- end of the race -->\nafter\n")
    assert show_table(shown, page) == shown


WORK, PEAKS = Work(samples=8, flops=8e9, bytes=1e9), Peaks(100e9, 10e9)


@pytest.mark.parametrize(("lane", "text"), [("resnet50-8", "| 2 after 6 |"), ("mnist-8", "| 2 |")])
def test_a_row_says_where_losses_were_compared_after_fewer_updates(lane, text):
    result = LaneResult(LANES[lane], WORK, 2.5, losses={"pytorch": 2.0})
    assert text in table([result], 1.0)


def raced(lane: str, podium: float, **others: float) -> LaneResult:
    rates = {name: [rate] * 3 for name, rate in {"podium": podium, **others}.items()}
    return LaneResult(LANES[lane], WORK, 2.5, dict.fromkeys(rates, 2.0), rates, first_rates={"slow": 1.0})


def test_the_page_says_how_podium_does_against_the_fastest_of_all():
    results = [raced("mnist-8", 4.0, pytorch=1.0, jax=2.0), raced("resnet50-8", 4.0, pytorch=0.5)]
    said = summary(results)
    assert "geometric mean of 2 lanes **4.00**, lowest 2.00 (mnist, micro-batch 8), highest 8.00 (ResNet-50" in said
    shown = show_table("<!-- the race --><!-- end of the race -->", page(results, PEAKS, 3, 4.0, 0.0, 31.0))
    assert said.strip() in shown
    assert "GFLOP" not in shown
    assert "took 31 minutes" in page(results, PEAKS, 3, 4.0, 0.0, 31.0)


def test_the_roofline_takes_the_lower_of_two_limits():
    assert WORK.limited_by(PEAKS) == "memory"
    assert WORK.fastest(PEAKS) == pytest.approx(80)  # 1 GB at 10 GB/s, 8 samples
    assert Work(8, 8e9, 1e8).fastest(PEAKS) == pytest.approx(100)
    row = roofline([raced("mnist-8", 40.0, pytorch=10.0)], PEAKS).splitlines()[-1]
    assert row == "| mnist, micro-batch 8 | 8 | 1,000 | 8.0 | memory | 80 | 50% |"


def test_who_is_far_behind_is_not_raced_further():
    rates = {"podium": 9, "podium-2x1": 2, "pytorch": 1, "jax": 10, "lightning": 8, "accelerate": 7.6,
             "pytorch-tuned": 9, "pytorch-workers": 7.4}  # fmt: skip
    result = LaneResult(LANES["mnist-8"], WORK, first_rates=rates)
    assert result.still_racing() == ["podium", "podium-2x1", "pytorch", "jax", "lightning", "pytorch-tuned"]
    lucky = {"podium": 2, "pytorch": 9, "jax": 4, "lightning": 1}  # faster than Podium, whatever the plain loop made
    assert LaneResult(LANES["mnist-8"], WORK, first_rates=lucky).still_racing() == ["podium", "pytorch", "jax"]


@pytest.fixture
def heats(monkeypatch):
    """The heats that a race would have run; Accelerate fails, Lightning is slow."""
    found = []

    def run_heat(heat):
        found.append(heat)
        if heat.contender == "accelerate":
            raise HeatError("a trace\nSomeError: no")
        rate = 1.0 if heat.contender == "lightning" else 4.0
        return Result(samples_per_second=rate, seconds=1.0, threads=2, first_loss=2.5, loss=2.0)

    nothing = SimpleNamespace(source=lambda split: None)
    changed = {"run_heat": run_heat, "build_workload": lambda recipe: nothing, "count_work": lambda lane, recipe: WORK}
    for name, value in changed.items():
        monkeypatch.setattr(the_race, name, value)
    return found


def test_a_lane_says_how_long_its_stretches_and_its_comparison_are(tmp_path, heats):
    the_race.race("resnet50-8", ["podium", "pytorch"], 2, 4.0, tmp_path)
    compared = [heat.total_updates for heat in heats if heat.compare]
    timed = [heat.num_updates for heat in heats if not heat.compare]
    assert compared == [LANES["resnet50-8"].num_compared] * 2
    assert timed == [LANES["resnet50-8"].least_updates] * 4
    assert all(heat.num_updates < heat.total_updates for heat in heats)


def test_a_contender_that_fails_or_loses_early_leaves_the_race_to_the_others(tmp_path, heats):
    result = the_race.race("mnist-8", ["podium", "pytorch", "lightning", "accelerate"], 2, 4.0, tmp_path)
    assert result.failed == {"accelerate": "SomeError: no"}
    assert set(result.rates) == {"podium", "pytorch"}
    shown = table([result], 1.0)
    assert "| Lightning | 1 | raced no further | 4.00 |" in shown
    assert "Failed: Accelerate on mnist, micro-batch 8: SomeError: no" in shown
