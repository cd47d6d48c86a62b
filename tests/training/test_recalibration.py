"""`valid.recalibrate`: what fresh statistics are, that training never sees them, and the same bits on any number."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from podium.data.sample_order import order
from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.training.build import Training, build_training
from podium.training.recalibration import recalibrated
from podium.training.validation import validate
from tests.support.outcomes import outcome
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY, eight

NUM = 5


def built(*overrides: str, workload: str = "neuron") -> Training:
    name, *keys = TINY[workload]
    return build_training(load_recipe(name, [*keys, f"valid.recalibrate={NUM}", *overrides]))


def micro_batches(training: Training, epoch: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The first of an epoch, gathered here."""
    source = training.task.train_source
    positions = np.arange(NUM * size)
    out = empty_buffers(source.fields, len(positions))
    start_gather(
        source, SampleRequest(order(training.recipe.seed, epoch, positions, len(source)), positions, epoch), out
    )()
    return [
        {name: torch.from_numpy(rows[first : first + size]) for name, rows in out.items()}
        for first in range(0, len(positions), size)
    ]


@pytest.mark.parametrize(("update", "epoch"), [(0, 0), (19, 0), (20, 1), (40, 2)])
def test_statistics_are_the_means_over_micro_batches_of_the_training_set(update, epoch, one_thread):
    training = built()
    model, norm = training.state.model, training.state.model.norm
    assert training.task.lengths.updates_per_epoch == 20
    features = torch.nn.Sequential(*[block for name, block in deepcopy(model).eval().named_children()][:4])
    with torch.no_grad():
        rows = [features(batch["frames"]).double() for batch in micro_batches(training, epoch, 8)]
    with recalibrated(training, model, update):
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
    torch.testing.assert_close(mean.double(), torch.stack([row.mean(0) for row in rows]).mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(var.double(), torch.stack([row.var(0) for row in rows]).mean(0), rtol=1e-5, atol=1e-6)


def test_training_keeps_its_own_statistics_and_modes(one_thread):
    training = built("average.method=mean", "average.every=1up")
    model = training.state.model
    training.state.take_average(model)
    with torch.no_grad():
        model.norm.running_mean.fill_(3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: (module.training, getattr(module, "momentum", None)) for name, module in model.named_modules()}
    validate(training)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert modes == {name: (m.training, getattr(m, "momentum", None)) for name, m in model.named_modules()}
    # The average has other running statistics than the weights, and the same fresh ones.
    assert training.state.progress.average_last == training.state.progress.valid_last


def test_statistics_that_lag_behind_do_not_reach_the_validation(one_thread):
    losses = {}
    for recalibrate in (0, NUM):
        training = built(f"valid.recalibrate={recalibrate}")
        fresh = []
        for shift in (0.0, 10.0):
            training.state.model.norm.running_mean.fill_(shift)
            validate(training)
            fresh.append(training.state.progress.valid_last["loss"])
        losses[recalibrate] = fresh
    assert losses[NUM][0] == losses[NUM][1]
    assert losses[0][0] != losses[0][1]


def test_more_than_an_epoch_is_an_epoch(one_thread):
    found = []
    for count in (20, 10_000):
        training = built(f"valid.recalibrate={count}")
        with recalibrated(training, training.state.model, 0):
            found.append(training.state.model.norm.running_var.clone())
    assert torch.equal(*found)


def test_a_model_without_batch_norm_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = podium_here("train", *TINY["mnist"], "valid.recalibrate=3", "--out", tmp_path / "run")
    assert_user_error(done, "valid.recalibrate = 3", "no batch norm")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------------- the real command

RECIPE = [*eight("neuron"), f"valid.recalibrate={NUM}"]


def valid_losses(result: tuple) -> list[float]:
    return [record["valid/loss"] for record in result[1] if "valid/loss" in record]


@pytest.mark.slow
def test_weights_stay_and_validations_are_the_same_on_two_instances(podium, tmp_path, outcome_alone):
    alone, plain = outcome_alone(RECIPE), outcome_alone(eight("neuron"))
    assert alone[0] == plain[0]
    assert len(valid_losses(alone)) == 2
    assert valid_losses(alone) != valid_losses(plain)
    done = podium("train", *RECIPE, "--instances", 2, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == alone


@pytest.mark.slow
def test_a_resumed_run_validates_as_if_it_had_never_stopped(podium, tmp_path, outcome_alone):
    done = podium("train", *RECIPE, "train.time_limit=0.01s", "--instances", 2, "--out", "run", timeout=300)
    assert done.returncode == 75, done.stderr
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("time_limit: 0.01", "time_limit: null"))
    done = podium("resume", "run", "--instances", 1, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(RECIPE)
    shown = podium("validate", "run", timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert f"{outcome_alone(RECIPE)[3]['last']['loss']:.6g}" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "keys", "instances"),
    [("cnn", [], 2), ("neuron", ["parallel.stages=2", "engine.threads=1"], 2)],
    ids=["statistics of two replicas, averaged weights", "stages"],
)
def test_shared_statistics_averages_and_stages_give_the_same_bits_too(
    workload, keys, instances, podium, tmp_path, outcome_alone
):
    recipe = [*eight(workload), f"valid.recalibrate={NUM}"]
    done = podium("train", *recipe, *keys, "--instances", instances, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    weights, losses, _, valid = outcome(Run(tmp_path / "run"))
    alone = outcome_alone(recipe)
    assert (weights, losses, valid) == (alone[0], alone[1], alone[3])
