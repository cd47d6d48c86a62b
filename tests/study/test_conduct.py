"""A study from its start to its end, with runs that take no time: nobody's speed matters, crashes are told."""

import itertools
import time
from types import SimpleNamespace

import pytest

from podium.errors import UserError
from podium.study.folder import StudyFolder
from tests.support.studies import PretendedRuns, conducted, read_records

GRID = {"values": {"optim.lr": [1e-3, 2e-3, 4e-3], "batch.replicas": [1, 2]}}
TPE = {
    "method": "tpe",
    "values": {"optim.lr": {"from": 1e-4, "to": 1e-2, "log": True}, "batch.micro": [4, 8]},
    "budget": {"runs": 16},
    "generation": 4,
    "startup": 4,
}
HALVING = {"halving": {"first": "1ep", "factor": 3}}


@pytest.mark.parametrize(
    "keys",
    [GRID, {**GRID, "seeds": 2}, {**GRID, **HALVING}, {**TPE, "method": "random"}, TPE, {**TPE, **HALVING}],
    ids=["grid", "seeds", "halving", "random", "tpe", "tpe-halving"],
)
@pytest.mark.slow
def test_the_table_is_the_same_to_the_bit_however_many_run_at_once_and_whoever_is_faster(keys, tmp_path):
    alone, _ = conducted(tmp_path / "alone", PretendedRuns(1), **keys)
    for chance in range(2):
        several = PretendedRuns(3, chance)
        together, _ = conducted(tmp_path / str(chance), several, **keys)
        assert several.most_at_once > 1
        assert together.table_file.read_bytes() == alone.table_file.read_bytes()


def test_halving_gives_long_trainings_to_the_better_part_only(tmp_path):
    folder, _ = conducted(
        tmp_path / "study", PretendedRuns(2), values={"optim.lr": [1e-3, 2e-3, 4e-3, 8e-3]}, **HALVING
    )
    records = read_records(folder)
    assert [record.state for record in records.values()] == ["pruned", "finished", "pruned", "pruned"]
    assert [record.updates for record in records.values()] == [10, 90, 10, 10]
    assert records[1].rungs == sorted(records[1].rungs, reverse=True)


def test_a_target_ends_the_study_after_its_generation(tmp_path):
    keys = {"values": {"optim.lr": [4e-3, 2e-3, 1e-3, 8e-3]}, "generation": 2, "target": 0.11}
    folder, end = conducted(tmp_path / "study", PretendedRuns(4), **keys)
    assert end.steps.reached == 1
    assert len(read_records(folder)) == 2 or [one.state for one in read_records(folder).values()][2:] == ["waiting"] * 2


def test_a_run_over_a_constraint_is_not_the_best(tmp_path):
    from podium.study.steps import best_point

    limit = {"metric": "updates", "at_most": 80}
    folder, _ = conducted(
        tmp_path / "study",
        PretendedRuns(1),
        values={"train.length": ["8ep", "9ep"]},
        set={"optim.lr": 2e-3},
        constraints=[limit],
    )
    assert [record.feasible for record in read_records(folder).values()] == [True, False]
    assert best_point(folder.definition(), read_records(folder)) == 0


def test_a_crashed_run_is_tried_again_with_its_reason_kept_and_its_neighbours_left_alone(tmp_path):
    executor = PretendedRuns(2, codes=lambda run, start: -9 if run == 1 and start < 2 else 0)
    folder, _ = conducted(tmp_path / "study", executor, **GRID)
    records = read_records(folder)
    assert all(record.state == "finished" for record in records.values())
    assert records[1].attempts == 3
    assert records[1].crashes == ["killed by SIGKILL"] * 2
    assert [run for run, _ in executor.commands].count(0) == 1
    untroubled, _ = conducted(tmp_path / "untroubled", PretendedRuns(1), **GRID)
    assert untroubled.table_file.read_bytes() == folder.table_file.read_bytes()


def test_after_its_retries_a_run_has_failed_and_the_others_go_on(tmp_path):
    executor = PretendedRuns(2, codes=lambda run, start: 1 if run == 2 else 0)
    folder, _ = conducted(tmp_path / "study", executor, retries=1, **GRID)
    records = read_records(folder)
    assert (records[2].state, records[2].reason, records[2].attempts) == ("failed", "it was not to be", 2)
    assert [record.state for record in records.values()].count("finished") == 5


def test_a_failure_that_would_repeat_itself_is_not_tried_again(tmp_path):
    executor = PretendedRuns(1, codes=lambda run, start: 3 if run == 1 else 0)
    folder, _ = conducted(tmp_path / "study", executor, **GRID)
    assert read_records(folder)[1].state == "failed"
    assert [run for run, _ in executor.commands].count(1) == 1


def test_a_mistake_in_the_first_run_ends_the_study(tmp_path):
    executor = PretendedRuns(1, codes=lambda run, start: 2)
    with pytest.raises(UserError, match="run 0: it was not to be"):
        conducted(tmp_path / "study", executor, **GRID)


def test_a_metric_that_is_not_recorded_is_told_with_those_that_are(tmp_path):
    with pytest.raises(UserError, match=r"valid/mse is not recorded by these runs: choose one of valid/loss"):
        conducted(tmp_path / "study", PretendedRuns(1), metric="valid/mse", mode="min", **GRID)


def test_the_time_of_a_study_is_kept_whenever_a_run_has_ended_as_a_kill_may_follow(tmp_path, monkeypatch):
    clock = itertools.count(time.monotonic() + 60, 0.05)
    monkeypatch.setattr("podium.study.conduct.time", SimpleNamespace(monotonic=lambda: next(clock)))
    folder, kept = StudyFolder(tmp_path / "study"), []

    class Watching(PretendedRuns):
        def start(self, number, words, log):
            kept.append(folder.facts().seconds)
            super().start(number, words, log)

    conducted(folder.path, Watching(1), **GRID)
    assert kept[0] == 0 < kept[1] < kept[2] < 15


def test_a_finished_study_takes_more_values_and_seeds_and_keeps_what_it_has(tmp_path):
    conducted(tmp_path / "study", PretendedRuns(2), values={"optim.lr": [1e-3, 2e-3]})
    executor = PretendedRuns(2)
    folder, _ = conducted(tmp_path / "study", executor, values={"optim.lr": [5e-4, 1e-3, 2e-3]}, seeds=2)
    assert sorted(run for run, _ in executor.commands) == [2, 3, 4, 5]
    found = [(record.values["optim.lr"], record.seed) for record in read_records(folder).values()]
    assert found[:2] == [(1e-3, 1), (2e-3, 1)]
    assert sorted(found) == [(rate, seed) for rate in (5e-4, 1e-3, 2e-3) for seed in (1, 2)]


def test_runs_grow_from_what_they_were_and_the_shorter_ones_stay(tmp_path):
    keys = {"values": {"optim.lr": [1e-3, 2e-3]}}
    conducted(tmp_path / "study", PretendedRuns(1), set={"train.length": "4ep"}, **keys)
    executor = PretendedRuns(1)
    folder, _ = conducted(tmp_path / "study", executor, set={"train.length": "8ep"}, **keys)
    assert [words[0] for _, words in executor.commands] == ["extend", "extend"]
    assert all("--only-exact" in words and "train.length=8ep" in words for _, words in executor.commands)
    assert {path.name for path in folder.earlier.iterdir()} == {"0000-4ep", "0001-4ep"}
    assert [record.updates for record in read_records(folder).values()] == [80, 80]


def test_a_run_that_cannot_grow_exactly_is_trained_from_the_start(tmp_path):
    keys = {"values": {"optim.lr": [1e-3, 2e-3]}}
    conducted(tmp_path / "study", PretendedRuns(1), set={"train.length": "4ep"}, **keys)
    executor = PretendedRuns(1, codes=lambda run, start: 2 if run == 1 and start == 0 else 0)
    folder, _ = conducted(tmp_path / "study", executor, set={"train.length": "8ep"}, **keys)
    assert [words[0] for run, words in executor.commands if run == 1] == ["extend", "train"]
    assert read_records(folder)[1].state == "finished"
