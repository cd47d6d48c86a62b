"""Time to a target: the first record that reached it, over seeds, with a reason for what is recommended."""

import json

import pytest

from podium.errors import UserError
from podium.report.page import compare
from podium.report.reading import find_runs, names_of, read_runs
from podium.report.scaling import scaling_of
from podium.report.solution import Target, groups_of, less_is_better, parse_target, recommendation, solve
from podium.report.stretches import run_stretches
from tests.support.made_runs import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds each: one replica is slow, two are fast and cheap, four are as fast and cost twice as much, and eight
    never get there."""
    folder = tmp_path_factory.mktemp("runs")
    good, bad = (1, 0.4, 0.1), (1, 0.9, 0.8)
    for replicas, seconds, losses in ((1, 30, good), (2, 12, good), (4, 12, good), (8, 3, bad)):
        rate = replicas * 1000 * 0.9 ** (replicas - 1)
        for seed in (1, 2):
            make_run(
                folder / f"r{replicas}s{seed}", [f"batch.replicas={replicas}", f"seed={seed}"], losses=losses,
                seconds_per_epoch=seconds + 0.2 * seed, instances=replicas, rate=rate,
                energy_j=600.0,
            )  # fmt: skip
    return read_runs(find_runs([folder]), pytest.fail)


def groups(runs, target):
    return groups_of([solve(facts, target) for facts in runs], compare(runs).keys)


def test_the_time_is_that_of_the_first_record_which_reached_the_target(runs):
    by_name = {facts.name: facts for facts in runs}
    found = solve(by_name["r1s1"], Target("valid/loss", 0.4))
    assert (found.update, found.samples, found.seconds) == (40, 2560, pytest.approx(60.4))
    assert found.device_hours == pytest.approx(60.4 / 3600)
    assert found.energy_j == pytest.approx(400)
    assert solve(by_name["r4s1"], Target("valid/loss", 0.4)).device_hours == pytest.approx(4 * 24.4 / 3600)
    never = solve(by_name["r8s1"], Target("valid/loss", 0.4))
    assert never.seconds is None
    assert never.best == 0.8


def test_of_choices_that_are_equally_fast_the_one_with_fewest_core_hours_is_recommended(runs):
    target = Target("valid/loss", 0.1)
    found = groups(runs, target)
    assert sorted((group.replicas, len(group.reached)) for group in found) == [(1, 2), (2, 2), (4, 2), (8, 0)]
    (two,) = [group for group in found if group.replicas == 2]
    assert two.spread("seconds") == pytest.approx((36.9, 36.6, 37.2))
    said = recommendation(found, target)
    assert said == (
        "2 replicas with a global batch of 128: valid/loss ≤ 0.1 in 37 s, 0.0205 core-hours. 4 replicas with 256 took "
        "37 s, which cannot be told apart from it, and 0.041 core-hours"
    )


def test_the_fastest_is_recommended_with_what_a_cheaper_one_would_save(runs):
    found = [group for group in groups(runs, Target("valid/loss", 0.1)) if group.replicas in (1, 2)]
    said = recommendation(found, Target("valid/loss", 0.1))
    assert "the fastest, 2.46 times as fast as the next" in said
    slow = [group for group in groups(runs, Target("valid/loss", 0.1)) if group.replicas in (1, 4)]
    assert "1 replica with 64 would save 38 % of the core-hours" in recommendation(slow, Target("valid/loss", 0.1))


def test_what_was_not_reached_is_said(runs):
    target = Target("valid/loss", 0.01)
    assert recommendation(groups(runs, target), target) == (
        "not reached: no run came to valid/loss ≤ 0.01; the closest had 0.1"
    )
    higher = Target("valid/loss", 2.0, less_is_better=False)
    assert "the closest had 1" in recommendation(groups(runs, higher), higher)


def test_energy_that_began_anew_is_unknown(runs, tmp_path):
    path = make_run(tmp_path / "run", energy_j=600.0)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[3]["system/energy_j"] = 1.0
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (facts,) = read_runs(find_runs([path]), pytest.fail)
    assert solve(facts, Target("valid/loss", 0.25)).energy_j is None


def test_targets_are_read_with_their_direction(runs):
    assert parse_target("valid/loss=0.05", runs) == Target("valid/loss", 0.05)
    assert parse_target(" valid/loss >= 0.05", runs) == Target("valid/loss", 0.05, less_is_better=False)
    assert less_is_better("valid/perplexity")
    assert not less_is_better("valid/top5")
    wrong = {
        "valid/loss": "expected a metric and a value",
        "loss=1": "do not record it; choose one of valid",
        "valid/loss=x": "expected a metric",
        "valid/loss=nan": "expected a metric",
    }
    for text, said in wrong.items():
        with pytest.raises(UserError, match=said):
            parse_target(text, runs)
    with pytest.raises(UserError, match="is less or more"):
        less_is_better("valid/strangeness")


def test_efficiency_is_against_the_fewest_devices(runs):
    (found,) = scaling_of(runs, compare(runs).keys)
    assert [row.devices for row in found.rows] == [1, 2, 4, 8]
    assert found.device_name == "core"
    assert [row.efficiency for row in found.rows] == pytest.approx([1, 0.9, 0.9**3, 0.9**7])
    assert scaling_of([facts for facts in runs if facts.num_devices == 2], []) == []


def test_a_topology_that_changed_gives_stretches(tmp_path):
    path = make_run(tmp_path / "run", extra={"topology/instances": 2.0})
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines[4:]:
        line["topology/instances"] = 4
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (facts,) = read_runs(find_runs([path]), pytest.fail)
    assert [(one.first, one.last, one.counts) for one in run_stretches(facts)] == [
        (1, 40, (1, 2, 1, 1)),
        (41, 60, (1, 4, 1, 1)),
    ]


def test_names_are_as_short_as_they_can_be(tmp_path):
    paths = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "b" / "y"]
    assert names_of(paths) == ["a/x", "b/x", "y"]


def test_damaged_runs_are_told_and_left_out(tmp_path):
    for name in ("good", "bad"):
        make_run(tmp_path / name)
    (tmp_path / "bad" / "metrics.jsonl").write_text("not a record\n")
    said: list[str] = []
    assert [facts.name for facts in read_runs(find_runs([tmp_path]), said.append)] == ["good"]
    assert len(said) == 1
    assert "line 1 is no record" in said[0]
    with pytest.raises(UserError, match="line 1 is no record"):
        read_runs(find_runs([tmp_path / "bad"]), said.append)
