"""Weights go to Flax's layout and back, with features in the order in which Flax flattens them."""

import numpy as np
import pytest
import torch
from bench.race.contenders.jax_flax import weights_of
from bench.race.lanes import LANES
from torch import nn


def test_features_flattened_with_channels_last_meet_their_weights():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.BatchNorm1d(3 * 4 * 5), nn.Linear(3 * 4 * 5, 7))
    flattened = {"2": (3, 4, 5), "3": (3, 4, 5)}
    turned = {weight.name: weight.to_flax() for weight in weights_of(model, flattened)}
    features = torch.randn(2, 3, 4, 5)
    last = features.movedim(1, -1).flatten(1).numpy()
    np.testing.assert_allclose(
        last @ turned["3/kernel"] + turned["3/bias"], model[3](features.flatten(1)).detach(), rtol=1e-4, atol=1e-5
    )
    assert turned["0/kernel"].shape == (2, 2, 1, 3)
    assert {"2/scale", "2/bias", "2/mean", "2/var"} <= turned.keys()


@pytest.mark.parametrize("lane", ["mnist-8", "resnet20-128", "gpt2-8"])
def test_weights_come_back_as_they_went(lane, tmp_path):
    from bench.race.lane import build_model, build_workload

    recipe = LANES[lane].load(tmp_path)
    model = build_model(recipe, build_workload(recipe))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for weight in weights_of(model, LANES[lane].flattened):
        there = weight.to_flax().copy()
        with torch.no_grad():
            weight.tensor.zero_()
        weight.from_flax(there)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
