"""What `podium check` says where an update depends on what ran before it, and where losses are not sums."""

import numpy as np
import pytest
import torch

from podium.check.operators import first_difference, record_replica
from podium.check.tails import tail_problem
from podium.contract import Loss
from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from podium.workloads.mnist.workload import Workload
from tests.support.recipes import TINY


def recipe_of(workload):
    name, *overrides = TINY[workload]
    return load_recipe(name, [*overrides, "batch.replicas=4", "batch.micro=2"])


def compared():
    recipe = recipe_of("mnist")
    alone, again = record_replica(recipe, after_others=False, times=2)
    (after,) = record_replica(recipe, after_others=True)
    return first_difference(alone, again), first_difference(alone, after), again


def spoilt(monkeypatch, spoil):
    plain = Workload.loss

    def loss(self, model, batch):
        return spoil(plain, self, model, batch)

    monkeypatch.setattr(Workload, "loss", loss)


@pytest.mark.slow
def test_every_workload_repeats_and_its_replicas_are_independent(one_thread):
    for workload in TINY:
        recipe = recipe_of(workload)
        alone, again = record_replica(recipe, after_others=False, times=2)
        (after,) = record_replica(recipe, after_others=True)
        assert len(alone.events) > 20
        assert {event.kind for event in alone.events} == {"samples", "operator", "module", "gradient"}
        assert first_difference(alone, again) is None, workload
        assert first_difference(alone, after) is None, workload


def test_random_numbers_of_numpy_are_found(monkeypatch, one_thread):
    def noisy(plain, self, model, batch):
        noise = torch.from_numpy(np.random.default_rng().normal(size=batch["image"].shape).astype(np.float32))
        return plain(self, model, {**batch, "image": batch["image"] + noise})

    spoilt(monkeypatch, noisy)
    repeats, independent, _ = compared()
    for difference in (repeats, independent):
        assert difference.event.name == "aten.add.Tensor"
        assert not difference.is_cause
        assert "aten.add.Tensor takes other values" in difference.sentence()
        assert "from outside torch's operators" in difference.sentence()
        assert "conv1" in difference.sentence()


def test_state_kept_between_passes_is_found(monkeypatch, one_thread):
    calls = []

    def counting(plain, self, model, batch):
        calls.append(1)
        found = plain(self, model, batch)
        return Loss(found.sum * len(calls), found.count, found.metrics)

    spoilt(monkeypatch, counting)
    repeats, _, _ = compared()
    assert repeats.event.name == "aten.mul.Tensor"


def test_a_wait_for_a_value_is_named_with_its_line(monkeypatch, one_thread):
    def reading(plain, self, model, batch):
        found = plain(self, model, batch)
        return Loss(found.sum * (2.0 if found.sum.item() > 1e9 else 1.0), found.count)

    spoilt(monkeypatch, reading)
    repeats, independent, record = compared()
    assert repeats is None
    assert independent is None
    (line,) = set(record.host_waits)
    assert line.startswith("test_operators.py:")
    assert "found.sum.item()" in line


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: found, ""),
        (lambda found: Loss(found.sum / found.count, found.count), "is it a mean where a sum is expected?"),
        (lambda found: Loss(found.sum, 1), "loss: 1 counted together, 1 + 1 + 1 in parts"),
        (lambda found: Loss(found.sum * float("nan"), found.count), "loss is nan"),
        (
            lambda found: Loss(found.sum, found.count, {"accuracy": (found.sum / found.count, found.count)}),
            "metric accuracy",
        ),
    ],
    ids=["sums", "mean", "count", "nan", "metric"],
)
def test_losses_that_do_not_add_up_are_told(spoil, said, monkeypatch, one_thread):
    spoilt(monkeypatch, lambda plain, self, model, batch: spoil(plain(self, model, batch)))
    problem = tail_problem(build_training(recipe_of("mnist")))
    assert (said in problem) if said else not problem, problem
