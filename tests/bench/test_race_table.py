"""The README shows what was measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.race import __main__ as the_race
from bench.race.lanes import LANES
from bench.race.page import LaneResult, merged, show_table, table
from bench.race.process import Result

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


def test_one_lane_anew_leaves_the_others():
    head = "| lane | contender | rate |\n|---|---|---|\n"
    rows = ["| a | **Podium** | 1 |", "| a | other | 2 |", "| b | **Podium** | 3 |"]
    earlier = f"# The race\n\nlast week, a machine\n\n{head}" + "\n".join(rows) + "\n"
    page = f"# The race\n\ntoday\n\n{head}| b | **Podium** | 4 |\n"
    text = merged(earlier, page)
    found = [line for line in text.splitlines() if line.startswith("| ")]
    assert found[1:] == ["| b | **Podium** | 4 |", *rows[:2]]
    assert "today" in text
    assert "Raced before: a: last week, a machine" in text
    assert "Raced before" not in merged(text, earlier.replace("last week", "tomorrow"))


def test_every_lane_says_when_it_was_raced():
    head = "| lane | contender | rate |\n|---|---|---|\n"
    text = f"# The race\n\nlast week; a machine\n\n{head}| a, small | **Podium** | 1 |\n"
    for day, lane in (("yesterday", "b, small"), ("at noon", "a, large"), ("tonight", "b, small")):
        text = merged(text, f"# The race\n\n{day}; a machine\n\n{head}| {lane} | **Podium** | 4 |\n")
    before = [line for line in text.splitlines() if line.startswith("Raced before")]
    assert text.splitlines()[2] == "tonight; a machine"
    assert before == ["Raced before: a, large: at noon; a machine", "Raced before: a, small: last week; a machine"]


@pytest.mark.parametrize(("lane", "text"), [("resnet50-8", "| 2 after 25 |"), ("mnist-8", "| 2 |")])
def test_a_row_says_where_losses_were_compared_after_fewer_updates(lane, text):
    result = LaneResult(LANES[lane], 1.0, 2.5, losses={"pytorch": 2.0})
    assert text in table([result], 1.0)


def test_a_lane_says_how_long_its_stretches_and_its_comparison_are(tmp_path, monkeypatch):
    heats = []

    def run_heat(heat):
        heats.append(heat)
        return Result(samples_per_second=4.0, seconds=1.0, threads=2, first_loss=2.5, loss=2.0)

    nothing = SimpleNamespace(source=lambda split: None)
    for name, value in {"run_heat": run_heat, "build_workload": lambda recipe: nothing}.items():
        monkeypatch.setattr(the_race, name, value)
    monkeypatch.setattr(the_race, "flops_per_sample", lambda lane, recipe: 1.0)
    the_race.race("resnet50-8", ["podium", "pytorch"], 2, 6.0, tmp_path)
    compared = [heat.total_updates for heat in heats if heat.compare]
    timed = [heat.num_updates for heat in heats if not heat.compare]
    assert compared == [25, 25]
    assert timed[2:] == [15] * 4  # the first round only finds out how many make a stretch
    assert all(heat.num_updates < heat.total_updates for heat in heats)
