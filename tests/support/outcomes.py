"""What a training ends with, to compare with that of the same recipe in one process, which is trained once."""

from collections.abc import Callable

import pytest
import torch

from podium.checkpoints import reading
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.train import train


def outcome(run: Run) -> tuple:
    """Everything that must not depend on the number of instances."""
    losses = [
        {key: value for key, value in record.items() if "loss" in key or key == "update" or key.startswith("weights/")}
        for record in run.records(digests=True)
    ]
    found = reading.load_latest(run.checkpoints, pytest.fail)
    kept = {**found.optimiser, **{f"average/{name}": tensor for name, tensor in found.average.items()}}
    optimiser = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in kept.items()}
    return run.summary()["weights_sha256"], losses, optimiser, run.summary()["valid"]


@pytest.fixture(scope="session")
def run_alone(tmp_path_factory) -> Callable[[list[str]], Run]:
    """The run of a recipe with its overrides, trained in this process and nowhere else."""
    known: dict[tuple[str, ...], Run] = {}

    def run(recipe: list[str]) -> Run:
        if tuple(recipe) not in known:
            name, *overrides = recipe
            known[tuple(recipe)] = train(load_recipe(name, overrides), tmp_path_factory.mktemp("alone") / "run")
        return known[tuple(recipe)]

    return run


@pytest.fixture(scope="session")
def outcome_alone(run_alone) -> Callable[[list[str]], tuple]:
    return lambda recipe: outcome(run_alone(recipe))


@pytest.fixture(scope="session")
def weights_alone(run_alone) -> Callable[[list[str]], str]:
    """Its weights_sha256."""
    return lambda recipe: run_alone(recipe).summary()["weights_sha256"]
