"""The published MNIST exercise: its numbers, its network with a softmax before the cross-entropy, a step of SGD."""

import math

import numpy as np
import pytest
import torch

from podium.data.source import empty_buffers
from podium.optim.optimisers import build_optimiser, step
from podium.recipe.loading import load_recipe
from podium.workloads.mnist.workload import Workload
from tests.support.published import differences, rates_of

pytestmark = pytest.mark.usefixtures("one_thread")

PUBLISHED = {
    "workload.model.filters": [32, 64],
    "workload.model.hidden": 128,
    "workload.model.dropout": 0.5,
    "workload.model.output": "softmax",
    "workload.data.valid_samples": 0,
    "batch.micro": 8,
    "batch.global": 8,
    "train.length": "10ep",
    "optim.name": "sgd",
    "optim.lr": 0.03,
    "optim.weight_decay": None,
    "schedule.name": "constant",
    "schedule.warmup": "0up",
    "engine.updates_per_call": 50,
    "valid.micro": 80,
}


def test_the_exercise_has_the_published_numbers():
    assert differences("mnist/exercise", PUBLISHED) == {}
    assert set(rates_of(load_recipe("mnist/exercise"), updates_per_epoch=7)) == {0.03}


def exercise() -> Workload:
    section = load_recipe("mnist/exercise", ["workload.data.source=generated"]).workload
    return Workload(section.model, section.data)


def written_out(weights, images):
    """conv 3×3, max-pool 2, ReLU, twice; linear, ReLU; linear; softmax. (n, 1, 28, 28) to (n, 10) probabilities."""
    x = images
    for block, channels in (("conv1", 32), ("conv2", 64)):
        side = x.shape[-1] - 2
        patches = x.unfold(2, 3, 1).unfold(3, 3, 1)  # (n, channels, side, side, 3, 3)
        x = torch.einsum("nchwij,ocij->nohw", patches, weights[f"{block}.0.weight"])
        x = x + weights[f"{block}.0.bias"][None, :, None, None]
        half = side // 2
        pooled = x[:, :, : 2 * half, : 2 * half].reshape(len(x), channels, half, 2, half, 2)
        x = pooled.amax(dim=(3, 5)).clamp(min=0)
    x = x.reshape(len(x), -1)
    assert x.shape[1] == 1600
    x = (x @ weights["hidden.1.weight"].T + weights["hidden.1.bias"]).clamp(min=0)
    x = x @ weights["output.0.weight"].T + weights["output.0.bias"]
    return x.exp() / x.exp().sum(dim=1, keepdim=True)


def test_the_network_and_its_loss_are_those_of_the_description():
    """The cross-entropy takes probabilities as if they were logits: it cannot fall below ln(e + 9) - 1 = 1.461."""
    workload = exercise()
    torch.manual_seed(2)
    model = workload.build_model().eval().double()
    assert sum(param.numel() for param in model.parameters()) == 225_034
    images, label = torch.randn(5, 1, 28, 28, dtype=torch.float64), torch.tensor([3, 1, 4, 1, 5])
    probabilities = written_out(model.state_dict(), images)
    with torch.no_grad():
        torch.testing.assert_close(model(images), probabilities, rtol=1e-9, atol=1e-12)
        loss = workload.loss(model, {"image": images, "label": label})
    expected = [
        math.log(sum(math.exp(p) for p in row)) - row[int(i)] for row, i in zip(probabilities, label, strict=True)
    ]
    assert float(loss.sum) / loss.count == pytest.approx(float(np.mean([float(value) for value in expected])), rel=1e-6)
    certain = torch.eye(10, dtype=torch.float64)[label]
    least = torch.nn.functional.cross_entropy(certain, label)
    assert float(least) == pytest.approx(math.log(math.e + 9) - 1)


def test_a_step_is_the_rate_times_the_mean_gradient():
    workload, optim = exercise(), load_recipe("mnist/exercise").optim
    torch.manual_seed(2)
    model = workload.build_model().eval()
    batch = {"image": torch.randn(8, 1, 28, 28), "label": torch.arange(8)}
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimiser = build_optimiser(optim, model, workload.param_groups(model))
    loss = workload.loss(model, batch)
    loss.sum.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    step(optimiser, float(loss.count), 0.03)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), before[name] - 0.03 * gradients[name] / 8)


def test_images_are_normalised_by_the_published_mean_and_deviation():
    from podium.workloads.mnist.data import array_source

    bytes_ = np.arange(28 * 28, dtype=np.uint8).reshape(1, 28, 28)
    source = array_source(bytes_, np.array([7]))
    out = empty_buffers(source.fields, 1)
    source.gather(np.array([0]), out)
    expected = (bytes_.astype(np.float64) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(out["image"][:, 0], expected, rtol=1e-5, atol=1e-5)
