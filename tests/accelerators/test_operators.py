"""Whether torch has a deterministic form, on CUDA devices, of every operator that the workloads use, by what torch's
documentation of `use_deterministic_algorithms` names."""

import re

import pytest
import torch

from podium.check.operators import record_replica
from podium.recipe.loading import load_recipe
from tests.support.recipes import TINY, eight

#: operators that the documentation refuses there, by what it calls them
REFUSED = {
    "AvgPool3d": r"avg_pool3d_backward",
    "AdaptiveAvgPool2d": r"_adaptive_avg_pool2d_backward",
    "AdaptiveAvgPool3d": r"_adaptive_avg_pool3d_backward",
    "MaxPool3d": r"max_pool3d_with_indices_backward",
    "AdaptiveMaxPool2d": r"adaptive_max_pool2d_backward",
    "FractionalMaxPool2d": r"fractional_max_pool2d_backward",
    "FractionalMaxPool3d": r"fractional_max_pool3d_backward",
    "MaxUnpool": r"max_unpool",
    "interpolate": r"upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)\w*_backward",
    "ReflectionPad": r"reflection_pad\dd_backward",
    "ReplicationPad": r"replication_pad\dd_backward",
    "NLLLoss": r"nll_loss2d",
    "CTCLoss": r"ctc_loss",
    "EmbeddingBag": r"embedding_bag",
    "put_": r"put_$",
    "histc": r"histc",
    "bincount": r"bincount",
    "median": r"median\.dim",
    "grid_sample": r"grid_sampler_\dd_backward",
    "cumsum": r"cumsum",
}


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "MaxUnpool"])
def test_the_list_is_that_of_the_documentation(name):
    assert name in (torch.use_deterministic_algorithms.__doc__ or "")


@pytest.mark.slow
@pytest.mark.parametrize("workload", TINY)
def test_no_workload_uses_an_operator_without_one(workload):
    name, *overrides = eight(workload)
    plain = ["engine.kernels=off", "engine.layout=default", "workload.model.norm.span=1"]
    recipe = load_recipe(name, [*overrides, *(plain if workload == "cnn" else plain[:2])])
    (record,) = record_replica(recipe, after_others=False)
    used = {event.name.removeprefix("aten.") for event in record.events if event.kind == "operator"}
    assert len(used) > 10
    refused = {operator for operator in used for pattern in REFUSED.values() if re.match(pattern, operator)}
    assert not refused
