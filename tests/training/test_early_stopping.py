"""Early stopping and the best checkpoint by any metric: the same on any number of instances and after a resume."""

import pytest

from podium.checkpoints.reading import checkpoint_paths, go_back
from podium.engine.state import Progress
from podium.recipe.sections.metric import BestSection, StopSection
from podium.runs.folder import Run
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

#: a learning rate that soon makes it worse, validated after every second update
RECIPE = [*TINY["mnist"], "batch.replicas=2", "train.length=60up", "valid.every=2up", "checkpoint.every=3up",
          "optim.lr=0.05", "train.stop={metric: valid/loss, patience: 3, min_delta: 0.001}",
          "checkpoint.best={metric: valid/accuracy, mode: max}"]  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    done = podium_here("train", *RECIPE, "--out", folder)
    assert done.returncode == 0, done.stderr
    return Run(folder)


def values(run: Run, name: str) -> list[tuple[int, float]]:
    return [(record["update"], record[name]) for record in run.records() if name in record]


def test_training_stops_after_so_many_validations_without_improvement(stopped):
    summary = stopped.summary()
    assert (summary["state"], summary["stopped_early"]) == ("done", True)
    losses = values(stopped, "valid/loss")
    assert losses[-1][0] == summary["updates"] < 60
    best, missed, expected_end = None, 0, None
    for update, loss in losses:
        best, missed = (loss, 0) if best is None or loss < best - 0.001 else (best, missed + 1)
        if missed == 3:
            expected_end = update
            break
    assert summary["updates"] == expected_end


def test_the_best_checkpoint_is_that_of_the_metric(stopped):
    accuracies = values(stopped, "valid/accuracy")
    first_best = next(update for update, value in accuracies if value == max(value for _, value in accuracies))
    assert stopped.summary()["valid"]["best"]["update"] == first_best
    assert first_best in [int(path.name.removeprefix("update-")) for path in checkpoint_paths(stopped.checkpoints)]


@pytest.mark.slow
def test_it_stops_at_the_same_update_with_the_same_bits_on_two_instances(stopped, podium, tmp_path):
    assert podium("train", *RECIPE, "--out", "two", "--instances", 2).returncode == 0
    two, one = Run(tmp_path / "two").summary(), stopped.summary()
    assert [two[key] for key in ("weights_sha256", "updates", "valid")] == [
        one[key] for key in ("weights_sha256", "updates", "valid")
    ]


def test_patience_goes_on_where_it_was_after_a_resume(stopped, tmp_path):
    done = podium_here("train", *RECIPE, "checkpoint.keep=99", "--out", tmp_path / "run")
    assert done.returncode == 0
    assert "stopped early after update" in done.stderr + done.stdout
    run = Run(tmp_path / "run")
    # In the middle of the validations that did not improve.
    go_back(run.checkpoints, max(u for u in range(0, stopped.summary()["updates"], 3) if u < run.summary()["updates"]))
    assert podium_here("resume", run.path).returncode == 0
    assert run.summary()["weights_sha256"] == stopped.summary()["weights_sha256"]
    assert run.summary()["updates"] == stopped.summary()["updates"]
    assert_user_error(podium_here("resume", run.path), "is complete")


def test_stopping_without_validations_on_the_way_is_refused(tmp_path):
    keys = ["train.stop={patience: 1}", "valid.every=0"]
    assert_user_error(podium_here("train", *TINY["mnist"], *keys, "--out", tmp_path / "run"), "train.stop needs valid")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("train.stop={metric: valid/f1, patience: 1}", "train.stop.metric = valid/f1: the validation of this workload"),
        ("checkpoint.best={metric: valid/f1}", "checkpoint.best.metric = valid/f1: the validation of this workload"),
        ("train.stop={metric: train/loss, patience: 1}", "expected a metric of the validation"),
        ("train.stop={metric: valid/loss}", "train.stop.patience"),
    ],
)
def test_metrics_that_do_not_exist_are_told_before_anything_is_written(key, told, tmp_path):
    assert_user_error(podium_here("train", *TINY["mnist"], key, "--out", tmp_path / "run"), told)
    assert not (tmp_path / "run").exists()


def test_improvements_are_counted_in_both_directions_and_never_by_nan():
    least, most = BestSection(), BestSection(metric="valid/accuracy", mode="max")
    assert least.better(1.0, None)
    assert not least.better(float("nan"), None)
    assert not least.better(float("nan"), 1.0)
    assert not least.better(0.95, 1.0, by=0.1)
    assert least.better(0.85, 1.0, by=0.1)
    assert most.better(1.2, 1.0, by=0.1)
    assert not most.better(1.05, 1.0, by=0.1)
    progress = Progress()
    stop = StopSection(metric="valid/accuracy", mode="max", patience=2)
    for value, ends in ((0.5, False), (0.5, False), (0.6, False), (0.1, False), (0.6, True)):
        progress.take_valid({"loss": 1.0, "accuracy": value}, least, stop)
        assert progress.stopped_early == ends


def test_checkpoints_from_before_there_was_a_choice_keep_their_best():
    state = Progress(update=4, valid_best={"loss": 0.5}, best_update=4).state()
    for key in ("best_value", "stop_value", "num_missed", "stopped_early"):
        del state[key]
    progress = Progress.from_state(state)
    assert not progress.take_valid({"loss": 0.6}, BestSection())
    assert progress.best_update == 4
