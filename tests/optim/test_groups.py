"""`optim.freeze` and `optim.groups`: which weights move and how fast, the same on any number of instances."""

import pytest
import torch
from torch import nn

from podium.checkpoints.reading import go_back, load_latest
from podium.contract import by_dimension
from podium.errors import UserError
from podium.optim.optimisers import build_optimiser, freeze, step
from podium.recipe.sections.optim import OptimSection
from podium.runs.folder import Run
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

RECIPE = [*TINY["mnist"], "batch.replicas=2", "train.length=6up", "checkpoint.every=3up", "optim.name=adamw",
          "optim.lr=0.01", 'optim.freeze=["conv1.*"]', "checkpoint.keep=9",
          'optim.groups=[{params: "*.bias", lr: 0.001, weight_decay: 0.3}, {params: ["conv*"], lr_scale: 0.5}]',
          ]  # fmt: skip


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))


def stepped(section: OptimSection, lr: float, frozen: list[str] | None = None) -> dict[str, torch.Tensor]:
    """How far each parameter went in one step of plain gradient descent on a gradient of ones."""
    net = model()
    freeze(net, frozen or [])
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    optimiser = build_optimiser(section, net, by_dimension(net))
    for param in net.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    step(optimiser, 1.0, lr)
    return {name: before[name] - param.detach() for name, param in net.named_parameters()}


def test_rates_and_decay_are_those_of_the_first_group_that_matches():
    groups = [{"params": "0.*", "lr": 0.02}, {"params": ["*.bias"], "lr_scale": 3.0, "weight_decay": 0.5}]
    section = OptimSection.model_validate({"name": "sgd", "lr": 0.2, "weight_decay": 0.1, "groups": groups})
    weights = {name: param.detach() for name, param in model().named_parameters()}
    went = stepped(section, 0.1)  # the schedule is at half of the rate, and so are the groups
    torch.testing.assert_close(went["0.weight"], 0.01 * (1 + 0.1 * weights["0.weight"]))
    torch.testing.assert_close(went["0.bias"], torch.full((4,), 0.01))
    torch.testing.assert_close(went["1.weight"], 0.1 * (1 + 0.1 * weights["1.weight"]))
    torch.testing.assert_close(went["1.bias"], 0.3 * (1 + 0.5 * weights["1.bias"]))


def test_frozen_parameters_stay_as_they_are_and_need_no_state():
    section = OptimSection(name="adam", lr=0.1)
    went = stepped(section, 0.1, ["0.*", "1.bias"])
    assert [name for name, distance in went.items() if not distance.any()] == ["0.weight", "0.bias", "1.bias"]
    net = model()
    freeze(net, ["0.*"])
    assert len(build_optimiser(section, net, by_dimension(net)).state) == 4


def test_patterns_must_match_and_leave_something_to_train():
    with pytest.raises(UserError, match=r"optim.freeze: 'encoder\.\*' matches no parameter; the first one is"):
        freeze(model(), ["encoder.*"])
    with pytest.raises(UserError, match="no parameter is left to train"):
        freeze(model(), ["0.*", "*"])
    section = OptimSection.model_validate({"name": "sgd", "lr": 1, "groups": [{"params": "x", "lr": 1}]})
    with pytest.raises(UserError, match=r"optim.groups: 'x' matches no parameter"):
        build_optimiser(section, model(), by_dimension(model()))


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("{params: a, lr: 1, lr_scale: 2}", "lr and lr_scale contradict each other"),
        ("{params: a}", "has neither lr, lr_scale nor weight_decay"),
        ("{params: a, rate: 1}", "unknown key optim.groups"),
        ("{lr: 1}", "optim.groups"),
    ],
)
def test_groups_that_make_no_sense_are_told(group, told, tmp_path):
    assert_user_error(podium_here("train", *TINY["mnist"], f"optim.groups=[{group}]", "--out", tmp_path / "run"), told)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("groups") / "run"
    done = podium_here("train", *RECIPE, "--out", folder)
    assert done.returncode == 0, done.stderr
    return Run(folder)


def test_frozen_weights_are_those_of_the_start_and_a_resume_gives_the_same_bits(alone, tmp_path):
    done = podium_here("train", *RECIPE, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    first, last = (load_latest(folder.checkpoints, pytest.fail) for folder in (run, alone))
    go_back(run.checkpoints, 3)
    first = load_latest(run.checkpoints, pytest.fail)
    moved = {name for name in last.weights if not torch.equal(first.weights[name], last.weights[name])}
    assert not any(name.startswith("conv1.") for name in moved)
    assert moved == {name for name in last.weights if not name.startswith("conv1.")}
    assert podium_here("resume", run.path).returncode == 0
    assert run.summary()["weights_sha256"] == alone.summary()["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["parallel.shard=optimiser"]], ids=["replicated", "sharded"])
def test_two_instances_give_the_same_bits(form, alone, podium, tmp_path):
    done = podium("train", *RECIPE, *form, "--out", "two", "--instances", 2)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "two").summary()["weights_sha256"] == alone.summary()["weights_sha256"]
