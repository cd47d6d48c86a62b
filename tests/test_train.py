"""What every workload is promised by a training run; parametrised over the table, so none can escape."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from podium.checkpoints import reading
from podium.data.sample_order import order
from podium.data.source import empty_buffers
from podium.distributed.digest import weights_sha256
from podium.engine.update import Engine
from podium.errors import Interrupted
from podium.recipe.loading import load_recipe
from podium.runs.folder import open_run
from podium.train import resume, train
from podium.training.build import build_training
from podium.training.feeding import build_engine
from podium.transforms.seeding import seed_torch
from podium.workloads.registry import WORKLOADS
from tests.support.recipes import TINY


def trained(tiny, out, *overrides):
    return train(load_recipe(tiny[0], [*tiny[1:], *overrides]), out)


def losses(run) -> list[tuple]:
    return [(r["update"], r["train/loss"], r.get("valid/loss")) for r in run.records()]


def test_an_instance_lost_after_the_last_update_is_no_reason_to_complain(tiny, tmp_path):
    """The launcher starts instances anew wherever one dies, also one that has only its goodbye left to say."""
    recipe = load_recipe(tiny[0], [*tiny[1:], "log.report=false"])
    run = train(recipe, tmp_path / "run")
    first = run.summary()
    assert train(recipe, run.path, again=True).summary()["weights_sha256"] == first["weights_sha256"]
    assert run.summary()["state"] == "done"
    assert run.summary()["valid"] == first["valid"]
    assert [record["update"] for record in run.records()] == sorted({record["update"] for record in run.records()})


def test_every_workload_of_the_table_has_a_tiny_recipe():
    assert TINY.keys() == WORKLOADS.keys()


def test_a_run_leaves_everything_the_design_names(tiny, tmp_path):
    run = trained(tiny, tmp_path / "run", "log.tensorboard=true", "log.report=true")
    names = {path.name for path in run.path.iterdir()}
    assert names >= {
        "recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "report.html",
        "checkpoints", "tensorboard", "log",
    }  # fmt: skip
    summary = run.summary()
    assert summary["state"] == "done"
    assert summary["updates"] == summary["total_updates"] > 0
    assert summary["epochs"] == 2
    assert summary["samples"] == summary["updates"] * run.recipe().batch.global_batch
    for split in ("train", "valid"):
        assert math.isfinite(summary[split]["last"]["loss"])
        assert summary[split]["best"]["loss"] <= summary[split]["last"]["loss"]
    assert summary["samples_per_second"] > 0
    assert {"compile", "train", "input_wait", "communication", "valid", "checkpoint"} <= summary["seconds"].keys()
    assert len(summary["weights_sha256"]) == len(summary["recipe_sha256"]) == 64
    assert summary["topology"] == {"hosts": 1, "instances": 1, "replicas": 1, "stages": 1}
    assert {(record["topology/hosts"], record["topology/instances"]) for record in run.records()} == {(1, 1)}
    assert list(run.tensorboard.glob("events.out.tfevents.*"))
    assert run.recipe() == load_recipe(tiny[0], [*tiny[1:], "log.tensorboard=true", "log.report=true"])


def test_report_is_one_self_contained_file_with_the_pictures(tiny, tmp_path):
    run = trained(tiny, tmp_path / "run", "log.report=true")
    html = run.report_file.read_text()
    pictures = list(run.pictures.glob("*.png"))
    assert pictures
    assert html.count("data:image/png;base64,") == len(pictures)
    # The names of a drawing's vocabularies look like addresses, but nothing is fetched from there.
    html = re.sub(
        r'<metadata>.*?</metadata>|xmlns(:\w+)?="[^"]*"|"http://www.w3.org/2000/svg"|/\*!.*?\*/',
        "",
        html,
        flags=re.DOTALL,
    )
    assert "http://" not in html
    assert "https://" not in html
    assert 'src="' not in html.replace('src="data:', "")


def test_time_split_sums_to_the_total(tiny, tmp_path):
    seconds = trained(tiny, tmp_path / "run").summary()["seconds"]
    parts = sum(value for name, value in seconds.items() if name != "total")
    assert parts == pytest.approx(seconds["total"], rel=0.02)


def test_same_recipe_gives_the_same_weights_and_losses(tiny, tmp_path):
    one, two = trained(tiny, tmp_path / "one"), trained(tiny, tmp_path / "two")
    assert one.summary()["weights_sha256"] == two.summary()["weights_sha256"]
    assert losses(one) == losses(two)


def test_another_seed_gives_other_weights(tiny, tmp_path):
    one, two = trained(tiny, tmp_path / "one"), trained(tiny, tmp_path / "two", "seed=2")
    assert one.summary()["weights_sha256"] != two.summary()["weights_sha256"]


@pytest.mark.parametrize("stop_at", [3, 20, 27])
def test_interrupted_and_resumed_equals_straight_to_the_bit(tiny, tmp_path, monkeypatch, stop_at):
    """Stopped in the middle of a record, on an epoch's end and in the second epoch."""
    straight = trained(tiny, tmp_path / "straight", "optim.clip_norm=0.5", "schedule.warmup=7up")

    seen = {"updates": 0}
    real = Engine.update

    def counted(self, update, samples, lr, stop=False):
        seen["updates"] = update + 1
        return real(self, update, samples, lr, stop or seen["updates"] == stop_at)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "update", counted)
        with pytest.raises(Interrupted):
            trained(tiny, tmp_path / "broken", "optim.clip_norm=0.5", "schedule.warmup=7up")
    broken = open_run(tmp_path / "broken")
    assert broken.summary()["state"] == "interrupted"
    assert broken.summary()["updates"] == stop_at
    resumed = resume(broken)
    assert resumed.summary()["state"] == "done"
    assert resumed.summary()["weights_sha256"] == straight.summary()["weights_sha256"]
    assert losses(resumed) == losses(straight)
    ours, theirs = (reading.load_latest(run.checkpoints, print) for run in (resumed, straight))
    assert all(torch.equal(ours.optimiser[name], theirs.optimiser[name]) for name in theirs.optimiser)


def test_plateau_schedule_survives_a_resume(tiny, tmp_path):
    """Dying right after a checkpoint, without any goodbye, then resuming: the same rates as straight."""
    overrides = ["schedule.name=plateau", "schedule.patience=0", "schedule.cooldown=0", "schedule.threshold=0.5"]
    overrides += ["schedule.warmup=0", "valid.every=5up", "checkpoint.every=5up", "checkpoint.keep=100"]
    straight = trained(tiny, tmp_path / "straight", *overrides)
    rates = [(r["update"], r["train/lr"]) for r in straight.records()]
    assert len({rate for _, rate in rates}) > 1
    torn = trained(tiny, tmp_path / "torn", *overrides)
    for path in reading.checkpoint_paths(torn.checkpoints)[2:]:
        shutil.rmtree(path)
    torn.write_summary({**torn.summary(), "state": "running"})
    resumed = resume(torn)
    assert [(r["update"], r["train/lr"]) for r in resumed.records()] == rates
    assert resumed.summary()["weights_sha256"] == straight.summary()["weights_sha256"]


def test_replicas_and_accumulation_count_every_sample_once(tiny, tmp_path):
    """The mean gradient of 4 samples is the same whether they come as 4, 2 × 2 or 2 replicas × 2 (no dropout)."""
    forms = [[4, 1, 1], [2, 2, 1], [2, 1, 2], [1, 2, 2]]
    weights = []
    for micro, accumulation, replicas in forms:
        sizes = [f"batch.micro={micro}", f"batch.accumulation={accumulation}", f"batch.replicas={replicas}"]
        extra = ["train.length=1up", "schedule.warmup=0", "optim.name=momentum", "optim.lr=0.1"]
        if not tiny[0].startswith("cosmology"):  # it has neither dropout nor norms
            extra.append("workload.model.dropout=0")
        if tiny[0].startswith("bert"):
            extra.append("workload.model.attention_dropout=0")
        elif tiny[0].startswith("gpt2"):
            extra.append("optim.betas=null")
        elif not tiny[0].startswith(("cosmology", "mnist")):
            extra.append("workload.model.norm.kind=none")
        if tiny[0].startswith("cnn"):
            extra += ["workload.data.augment.flip=false", "workload.data.augment.pad_crop=0", "optim.lr=0.01"]
        run = trained(tiny, tmp_path / f"{micro}{accumulation}{replicas}", *sizes, *extra)
        weights.append(reading.load_latest(run.checkpoints, print).weights)
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_dropout_differs_between_replicas_and_updates(tiny):
    draws = set()
    for place in [("micro-batch", 1, update, replica, 0) for update in range(3) for replica in range(3)]:
        seed_torch(torch.device("cpu"), *place)
        draws.add(tuple(torch.rand(4).tolist()))
    assert len(draws) == 9


def test_batch_norm_buffers_are_the_mean_over_replicas(tmp_path):
    tiny = [*TINY["neuron"], "train.length=1up", "schedule.warmup=0", "batch.replicas=4", "batch.micro=4"]
    run = trained(tiny, tmp_path / "four")
    together = reading.load_latest(run.checkpoints, print).weights
    name = next(name for name in together if name.endswith("running_mean"))
    training = build_training(run.recipe())
    samples = order(run.recipe().seed, 0, np.arange(16), len(training.task.train_source))
    buffers = empty_buffers(training.task.train_source.fields, 16)
    training.task.train_source.gather(samples, buffers)
    means = []
    for replica in range(4):
        alone = build_training(run.recipe())
        with torch.no_grad():
            alone.state.model(torch.from_numpy(buffers["frames"][replica * 4 : replica * 4 + 4]))
        means.append(alone.state.model.state_dict()[name])
    torch.testing.assert_close(together[name], torch.stack(means).mean(0), rtol=1e-5, atol=1e-6)
    assert together[name.replace("running_mean", "num_batches_tracked")] == 1


def test_metrics_file_holds_valid_json_with_places(tiny, tmp_path):
    run = trained(tiny, tmp_path / "run")
    for line in run.metrics_file.read_text().splitlines():
        record = json.loads(line)
        assert record.keys() >= {"update", "epoch", "samples", "train/loss", "train/lr", "time/input_wait_s"}


@pytest.mark.slow
def test_memory_does_not_grow_over_500_updates(tiny, tmp_path):
    """With validations, checkpoints and records as they come in a run; in a process that does nothing else.

    What is in use must not grow at all. What the process holds may, by some megabytes in the first thousand updates,
    where a heap meets its largest need late (cosmology's).
    """
    script = f"""
import gc
import psutil
from podium.engine.update import Engine
from podium.recipe.loading import load_recipe
from podium.train import train
from tests.support.heap import bytes_in_use
sizes, real = [], Engine.update
def update(self, number, *args, **kwargs):
    if number in (100, 599):
        gc.collect()
        sizes.extend((bytes_in_use(), psutil.Process().memory_info().rss))
    return real(self, number, *args, **kwargs)
Engine.update = update
often = ["train.length=600up", "valid.every=50up", "checkpoint.every=50up"]
train(load_recipe({tiny[0]!r}, {list(tiny[1:])!r} + often), __import__("pathlib").Path({str(tmp_path / "run")!r}))
print("sizes", *sizes)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    used, held, used_after, held_after = (int(size) / 2**20 for size in ended.stdout.splitlines()[-1].split()[1:])
    assert used > 8  # MB
    assert used_after - used < 1
    assert held_after - held < 24


@pytest.mark.slow
def test_half_precision_with_an_automatic_scale_and_an_average_resumes_to_the_bit(tmp_path):
    overrides = ["precision=16.16", "precision.loss_scale=auto", "average=exponential",
                 "average.every=3up", "schedule.warmup=0", "train.length=20up", "checkpoint.every=5up",
                 "checkpoint.keep=9", "engine.updates_per_call=1"]  # fmt: skip
    straight, torn = (trained(TINY["mnist"], tmp_path / name, *overrides) for name in ("straight", "torn"))
    for path in reading.checkpoint_paths(torn.checkpoints)[2:]:
        shutil.rmtree(path)
    torn.write_summary({**torn.summary(), "state": "running"})
    resumed = resume(torn)
    ends = [reading.load_latest(run.checkpoints, pytest.fail) for run in (straight, resumed)]
    assert ends[0].update == ends[1].update == 20
    assert ends[0].state["loss_scale"] == ends[1].state["loss_scale"]
    for kind in ("weights", "optimiser", "average"):
        ours, theirs = (getattr(end, kind) for end in ends)
        assert ours.keys() == theirs.keys()
        assert ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    records = straight.records()
    assert "train/loss_scale" in records[-1]
    assert "valid/average_loss" in records[-1]
    assert straight.summary()["average"]["weights"] == 6
    assert losses(resumed) == losses(straight)


def test_an_overflow_skips_the_update_and_nothing_else(tmp_path):
    recipe = load_recipe(TINY["cnn"][0], [*TINY["cnn"][1:], "precision=16.32", "precision.loss_scale=auto"])
    training = build_training(recipe)
    engine = build_engine(training)
    samples = {name: rows[None, None] for name, rows in training.task.workload.example(8).items()}
    engine.update(0, samples, 0.1)
    before = weights_sha256(training.state.model)
    training.state.loss_scale.value = 1e38
    engine.update(1, samples, 0.1)
    assert training.state.loss_scale.num_skipped == 1
    assert weights_sha256(training.state.model) == before  # running statistics too
    training.state.loss_scale.value = 1024.0
    engine.update(2, samples, 0.1)
    assert weights_sha256(training.state.model) != before
