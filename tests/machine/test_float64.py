"""Devices without double precision: MPS, and some XPUs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from podium.errors import UserError
from podium.machine import device as devices
from podium.machine.device import has_float64
from podium.recipe.loading import load_recipe
from podium.training import build
from podium.training.build import build_training


def test_who_has_it(monkeypatch):
    assert has_float64(torch.device("cpu"))
    assert has_float64(torch.device("cuda", 1))
    assert not has_float64(torch.device("mps"))
    for has in (True, False):
        monkeypatch.setattr(devices, "_properties", lambda device, has=has: SimpleNamespace(has_fp64=has))
        assert has_float64(torch.device("xpu", 0)) == has


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("span", "norm.span = 2 needs numbers in double precision"),
        ("weights", "weight of the model needs numbers in double precision"),
        ("samples", "the samples' image needs numbers in double precision"),
    ],
)
def test_what_needs_it_is_refused_in_one_sentence(change, sentence, monkeypatch):
    monkeypatch.setattr(build, "has_float64", lambda device: False)
    few = ["workload.data.source=generated", "workload.data.samples=64", "batch.replicas=2", "batch.micro=2"]
    recipe = load_recipe("cnn/quick", [*few, *(["workload.model.norm.span=2"] if change == "span" else [])])
    task = build.build_task(recipe)
    if change == "weights":
        monkeypatch.setattr(task.workload, "build_model", lambda: nn.Linear(2, 2).double())
        monkeypatch.setattr(task.workload, "stages", lambda model: [("all", model)])
    if change == "samples":
        fields = dict(task.train_source.fields)
        fields["image"] = replace(fields["image"], dtype=np.dtype(np.float64))
        monkeypatch.setattr(task.train_source, "fields", fields)
    with pytest.raises(UserError, match=sentence):
        build_training(recipe, data_of=task)


def test_a_recipe_without_it_trains(monkeypatch):
    monkeypatch.setattr(build, "has_float64", lambda device: False)
    build_training(load_recipe("mnist", ["workload.data.source=generated"]))
