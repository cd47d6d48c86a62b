"""Metric records: JSON lines, TensorBoard and W&B hold what was measured, also across a resume and a kill."""

import importlib.util
import json
import signal
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import podium
from podium.contract import Picture, Prediction
from podium.errors import UserError
from podium.recipe.sections.log import LogSection
from podium.runs.appended_file import AppendedFile
from podium.runs.folder import Run, open_run
from podium.runs.metrics import JsonLines, Telemetry
from podium.runs.tensorboard import TensorBoard, add_prediction
from podium.runs.trackers import kept_id
from podium.training.clock import Utilisation
from tests.support.processes import assert_user_error, podium_here, started
from tests.support.recipes import TINY

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the package wandb is not installed")


def record(update: int, loss: float = 0.5) -> dict[str, float]:
    return {"update": update, "epoch": update / 10, "samples": 8 * update, "train/loss": loss, "train/lr": 1e-3}


def board(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: (step, value) by name."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_json_lines_are_on_disk_as_soon_as_they_are_written(tmp_path):
    lines = JsonLines(Run(tmp_path), after=0)
    for update in (5, 10):
        lines.write(record(update))
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == record(update)
    lines.close()
    more = JsonLines(Run(tmp_path), after=10)
    more.write(record(15))
    more.close()
    assert [r["update"] for r in Run(tmp_path).records()] == [5, 10, 15]


def test_tensorboard_reads_the_values_at_their_updates(tmp_path):
    sink = TensorBoard(tmp_path / "tensorboard")
    sink.write(record(5, 0.75))
    assert board(tmp_path / "tensorboard")["train/loss"] == [(5, 0.75)]  # without waiting for the end
    sink.write(record(10, 0.5))
    sink.close()
    shown = board(tmp_path / "tensorboard")
    assert shown["train/loss"] == [(5, 0.75), (10, 0.5)]
    assert shown["train/lr"] == [(5, pytest.approx(1e-3)), (10, pytest.approx(1e-3))]
    assert shown.keys() == {"train/loss", "train/lr"}


def test_tensorboard_shows_updates_done_again_after_a_resume_once(tmp_path):
    for part in ([5, 10, 15, 20], [15, 20, 25]):
        sink = TensorBoard(tmp_path)
        for update in part:
            sink.write(record(update))
        sink.close()
    assert [step for step, _ in board(tmp_path)["train/loss"]] == [5, 10, 15, 20, 25]


def test_no_record_means_no_tensorboard_folder(tmp_path):
    TensorBoard(tmp_path / "tensorboard").close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/metrics\.jsonl cannot be written"):
        AppendedFile(tmp_path / "file" / "metrics.jsonl")


class Failing:
    """A sink that fails from its second record on, and again when it is closed."""

    def __init__(self) -> None:
        self.written: list = []

    def write(self, entry) -> None:
        if self.written:
            raise ConnectionError("the service\nis down")
        self.written.append(entry)

    def close(self, failed: bool = False) -> None:
        raise ConnectionError("still down")


def test_a_sink_that_fails_is_switched_off_with_one_warning_and_the_others_go_on(tmp_path, monkeypatch):
    sink, warnings = Failing(), []
    monkeypatch.setattr("podium.runs.metrics.TensorBoard", lambda folder: sink)
    run = Run(tmp_path)
    with Telemetry(LogSection(tensorboard=True), run, {}, 0, warnings.append) as telemetry:
        for update in (5, 10, 15):
            telemetry.write(record(update))
    assert [entry["update"] for entry in sink.written] == [5]
    assert warnings == ["ConnectionError: the service is down; the run goes on without records for TensorBoard"]
    assert [r["update"] for r in run.records()] == [5, 10, 15]


def test_a_sink_that_cannot_be_opened_is_switched_off(tmp_path):
    warnings = []
    (tmp_path / "metrics.jsonl").mkdir()
    with Telemetry(LogSection(tensorboard=True), Run(tmp_path), {}, 0, warnings.append) as telemetry:
        telemetry.write(record(5))
    (warning,) = warnings
    assert warning.endswith("the run goes on without records for metrics.jsonl")
    assert board(tmp_path / "tensorboard")["train/loss"] == [(5, 0.5)]


def test_a_run_shows_the_same_in_tensorboard_as_in_its_records(tiny, tmp_path):
    done = podium_here("train", *tiny, "log.tensorboard=true", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    shown = board(run.tensorboard)
    records = run.records()
    for name in ("train/loss", "train/lr", "valid/loss", "train/samples_per_second", "time/input_wait_s"):
        expected = [(r["update"], pytest.approx(r[name], rel=1e-6)) for r in records if name in r]
        assert shown[name] == expected
        assert expected
    for entry in records:
        assert entry["device/cpu_percent"] > 0
    assert 0 < run.summary()["cpu_percent"] <= 110


@pytest.mark.slow
def test_predict_shows_pictures_and_histograms_of_the_weights_in_tensorboard_once(tmp_path):
    run = Run(tmp_path / "run")
    done = podium_here("train", *TINY["mnist"], "log.tensorboard=true", "log.report=true", "--out", run.path)
    assert done.returncode == 0, done.stderr
    for command in (None, "predict"):
        assert command is None or podium_here(command, run.path).returncode == 0
        events = EventAccumulator(str(run.tensorboard), size_guidance={"images": 0, "histograms": 0, "scalars": 0})
        events.Reload()
        weights = checkpoint_weights(run)
        assert set(events.Tags()["histograms"]) == {f"weights/{name}" for name in weights}
        for name, tensor in weights.items():
            (shown,) = events.Histograms(f"weights/{name}")
            value = shown.histogram_value
            assert shown.step == run.summary()["updates"]
            assert (value.min, value.max) == (tensor.min().item(), tensor.max().item())
            assert value.num == sum(value.bucket) == tensor.numel()
            assert value.sum == pytest.approx(tensor.double().sum().item())
            assert value.bucket_limit[-1] >= value.max
        pictures = {path.stem: path for path in run.pictures.glob("*.png")}
        assert set(events.Tags()["images"]) == {f"predict/{stem}" for stem in pictures} != set()
        for stem, path in pictures.items():
            (shown,) = events.Images(f"predict/{stem}")
            assert shown.encoded_image_string == path.read_bytes()
        assert [e.step for e in events.Scalars("train/loss")] == [r["update"] for r in run.records()]


def checkpoint_weights(run: Run) -> dict:
    """The parameters of the last checkpoint; buffers are left out."""
    loaded = podium.load(run.path, checkpoint="last")
    return {name: param.detach() for name, param in loaded.model.named_parameters()}


def test_pictures_that_cannot_be_shown_are_only_warned_of(tmp_path, capsys):
    (tmp_path / "bad.png").write_text("not a picture")
    prediction = Prediction([Picture("Bad", tmp_path / "bad.png")], [])
    add_prediction(Run(tmp_path), LogSection(), 3, prediction, nn.Linear(2, 2))
    assert "TensorBoard shows no pictures and histograms" in " ".join(capsys.readouterr().err.split())
    add_prediction(Run(tmp_path), LogSection(tensorboard=False), 3, prediction, nn.Linear(2, 2))
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "tensorboard").exists()


def test_utilisation_is_of_all_cores(monkeypatch):
    wall, busy = iter([10.0, 12.0, 13.0, 14.0]), iter([5.0, 7.0, 7.5, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("time.process_time", lambda: next(busy))
    meter = Utilisation(num_cores=2)
    assert meter.percent() == 50  # one busy thread of two cores
    assert meter.percent() == 25
    assert meter.percent_since_start() == 75


def test_utilisation_sees_work_of_a_millisecond():
    meter = Utilisation(num_cores=2)
    for _ in range(20):
        sum(range(20_000))
        assert meter.percent() > 0
    assert meter.percent_since_start() > 0


# ------------------------------------------------------------------------------------------------- Weights & Biases


def test_missing_wandb_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    done = podium_here("train", *TINY["mnist"], "log.wandb=offline", "--out", tmp_path / "run")
    assert_user_error(done, "log.wandb = offline needs the package wandb", "pip install 'podium[wandb]'")
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_off_unless_asked_for():
    assert LogSection().wandb == "off"


@needs_wandb
@pytest.mark.slow
def test_wandb_offline_keeps_its_run_in_the_folder_and_goes_on_after_an_interrupt(tmp_path):
    args = [*TINY["mnist"], "log.wandb=offline", "train.length=2000up", "valid.every=0", "checkpoint.every=0"]
    run = Run(tmp_path / "run")
    with started("train", *args, "--out", "run", cwd=tmp_path) as training:
        training.until_records(run.path, 2)
        done = training.ended(by=signal.SIGINT)
    assert done.returncode == 75, done.stderr
    first = wandb_parts(run)
    assert len(first) == 1

    # Shortened, to see the end of it soon.
    update = run.summary()["updates"]
    text = run.recipe_file.read_text()
    assert "2000up" in text
    run.recipe_file.write_text(text.replace("2000up", f"{update + 5}up"))
    resumed = podium_here("resume", run.path, "--accept-changes")
    assert resumed.returncode == 0, resumed.stderr
    both = wandb_parts(run)
    assert len(both) == 2
    assert len({path.name.rpartition("-")[2] for path in both}) == 1, "one W&B run, in two parts"
    kept = b"".join(next(path.glob("run-*.wandb")).read_bytes() for path in both)
    for entry in run.records():
        assert json.dumps(entry["train/loss"]).encode() in kept


def wandb_parts(run: Run) -> list:
    return sorted((run.path / "wandb").glob("offline-run-*"))


def test_two_runs_of_the_same_folder_name_are_two_for_a_tracker(tmp_path):
    one, two = (kept_id(tmp_path / name / "run" / "wandb" / "id", "W&B") for name in "ab")
    assert one != two
    assert kept_id(tmp_path / "a" / "run" / "wandb" / "id", "W&B") == one
