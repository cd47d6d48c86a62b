"""CNNs as published: the numbers of every recipe, their schedules, LARS, label smoothing, the networks' shapes."""

import math

import numpy as np
import pytest
import torch

from podium.contract import by_dimension
from podium.layers.norm import build_norm
from podium.optim.optimisers import build_optimiser, step
from podium.recipe.loading import load_recipe
from podium.workloads.cnn.augment import Mixed, mixed_cross_entropy
from podium.workloads.cnn.model import build_network
from podium.workloads.cnn.section import CnnModel
from tests.support.published import differences, peak_rate, rates_of

pytestmark = pytest.mark.usefixtures("one_thread")


def sizes(micro, accumulation, replicas):
    return {
        "batch.micro": micro,
        "batch.accumulation": accumulation,
        "batch.replicas": replicas,
        "batch.global": micro * accumulation * replicas,
    }


RESNET_50 = {
    "workload.model.name": "resnet",
    "workload.model.size": 50,
    "workload.model.norm.kind": "batch",
    "workload.data.augment.label_smoothing": 0.1,
}
MLPERF = {
    **RESNET_50,
    "workload.model.norm.span": 2,
    "workload.model.norm.decay": 0.9,
    "precision.mode": "16.16",
    "precision.loss_scale": "auto",  # not the published one, which belongs to a mean: ours would overflow
}
LARS = {
    **MLPERF,
    "optim.name": "lars",
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-5,
    "optim.eeta": 0.001,
    "schedule.warmup": "2ep",
}
POLYNOMIAL = {"schedule.name": "polynomial", "schedule.power": 2}
SGD = {
    **RESNET_50,
    "workload.model.norm.span": 1,
    "optim.name": "momentum",
    "optim.momentum": 0.9,
    "optim.weight_decay": 1e-4,
    "schedule.name": "cosine",
    "schedule.warmup": "5ep",
    "train.length": "100ep",
    "precision.mode": "16.16",
    "precision.loss_scale": "auto",  # not the published one, which belongs to a mean: ours would overflow
}
PUBLISHED = {
    "resnet50_pod4": {**SGD, **sizes(18, 228, 4)},
    "resnet50_pod16": {**SGD, **sizes(18, 57, 16)},
    "resnet50_pod64": {**SGD, **sizes(18, 14, 64)},
    "mlperf_pod16_lars": {**LARS, **POLYNOMIAL, **sizes(22, 10, 16), "train.length": "38ep"},
    # accumulation 2 in the description, 3 in the configuration
    "mlperf_pod64_lars": {**LARS, **POLYNOMIAL, **sizes(20, 2, 64), "train.length": "38ep"},
    "mlperf_pod128_lars": {**LARS, **POLYNOMIAL, **sizes(20, 2, 128), "train.length": "41ep"},
    "mlperf_pod256_lars": {**LARS, **POLYNOMIAL, **sizes(20, 2, 256), "train.length": "45ep"},
    "mlperf_pod16_bs20": {
        **LARS,
        **sizes(20, 6, 16),
        "train.length": "40ep",
        "schedule.name": "exponential",
        "parallel.recompute": True,
    },
    "mlperf_pod16_bs20_sgd": {
        **MLPERF,
        **POLYNOMIAL,
        **sizes(20, 6, 16),
        "train.length": "40ep",
        "optim.name": "momentum",
        "optim.momentum": 0.9,
        "optim.weight_decay": 2.5e-5,
        "schedule.warmup": "5ep",
        "parallel.recompute": True,
    },
    "cifar_resnet8": {
        **sizes(25, 5, 16),
        "workload.model.size": 8,
        "train.length": "70ep",
        "optim.name": "sgd",
        "optim.weight_decay": 1e-4,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "precision.mode": "16.16",
        "precision.stochastic_rounding": True,
    },
    "efficientnet_b0": {
        "workload.model.norm.kind": "group",
        "workload.model.norm.groups": 4,
        "workload.data.augment.mixup": 0.1,
        "workload.data.augment.label_smoothing": 0.1,
        "train.length": "350ep",
        "optim.name": "rmsprop_tf",
        "optim.lr_exponent": -14,
        "optim.momentum": 0.9,
        "optim.decay": 0.953125,
        "optim.eps": 1e-3,
        "optim.weight_decay": 1e-5,
        "schedule.name": "exponential",
        "schedule.rate": 0.97,
        "schedule.every": "2.397ep",  # 350 epochs / 146 drops
        "schedule.staircase": True,
        "average.method": "exponential",
        "average.decay": 0.97,
    },
    "efficientnet_b4": {"workload.model.size": "B4", "workload.data.augment.mixup": 0.2, "optim.lr_exponent": -14},
}
#: the full rate at the global batch of the recipe, and the one to which it falls
RATES = {
    "resnet50_pod4": (2.0, 0.0),
    "resnet50_pod16": (2.0, 0.0),
    "mlperf_pod16_lars": (10.72, 1e-4),
    "mlperf_pod128_lars": (12.1, 1e-4),
    "mlperf_pod256_lars": (20.2, 1e-4),
    "mlperf_pod16_bs20_sgd": (3.824, 1e-4),
    "cifar_resnet8": (0.244, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_numbers(name):
    assert differences(f"cnn/{name}", PUBLISHED[name]) == {}


@pytest.mark.parametrize("name", RATES)
def test_rates_are_the_published_ones(name):
    recipe = load_recipe(f"cnn/{name}")
    peak, end = RATES[name]
    assert peak_rate(recipe) == pytest.approx(peak)
    assert peak * recipe.schedule.value("final") == pytest.approx(end, rel=1e-3)


def test_the_configuration_of_64_devices_is_one_key_away():
    recipe = load_recipe("cnn/mlperf_pod64_lars", ["batch.accumulation=3"])
    assert recipe.batch.global_batch == 3840
    assert peak_rate(recipe) == pytest.approx(12.15)
    assert peak_rate(load_recipe("cnn/mlperf_pod64_lars")) == pytest.approx(8.1)


def test_a_base_rate_exponent_counts_for_each_sample():
    """2^-14 · 4,096 = 0.25, and 2^-14 · 768 gives the decay 1 - 768 / 2^14 of the mean squares."""
    recipe = load_recipe("cnn/efficientnet_b0", ["batch.micro=16", "batch.replicas=256"])
    assert peak_rate(recipe) == 0.25
    assert recipe.optim.value("decay") == 1 - 768 / 2**14


@pytest.mark.parametrize("name", ["mlperf_pod16_lars", "mlperf_pod16_bs20_sgd"])
def test_the_polynomial_rate_falls_to_its_end(name):
    """After k of n updates, w of them warm-up: peak · k / w, then (peak - end) · (1 - (k - w) / (n - w))² + end."""
    recipe = load_recipe(f"cnn/{name}")
    per_epoch = 20
    rates, (peak, end) = rates_of(recipe, per_epoch), RATES[name]
    total, warmup = len(rates), (2 if "lars" in name else 5) * per_epoch
    assert rates[:warmup] == pytest.approx([peak * done / warmup for done in range(1, warmup + 1)])
    falling = [(peak - end) * (1 - (done - warmup) / (total - warmup)) ** 2 + end for done in range(warmup, total)]
    assert rates[warmup:] == pytest.approx(falling, rel=1e-3)


def test_the_cosine_rate_falls_over_the_epochs_after_the_warm_up():
    rates = rates_of(load_recipe("cnn/cifar_resnet8"), updates_per_epoch=25)
    falling = [0.244 * (1 + math.cos(math.pi * done / (65 * 25))) / 2 for done in range(65 * 25)]
    assert rates[125:] == pytest.approx(falling, abs=1e-12)


def test_the_exponential_rate_is_multiplied_every_epoch():
    rates = rates_of(load_recipe("cnn/mlperf_pod16_bs20"), updates_per_epoch=10)
    peak = 10.72 * 1920 / 3520
    assert rates[20:] == pytest.approx([peak * 0.85 ** (done / 10) for done in range(38 * 10)])


def test_lars_is_that_of_the_description():
    """trust = 0.001 · ‖w‖ / (‖g‖ + decay · ‖w‖); then momentum. Biases and norms: the plain rate."""
    optim = load_recipe("cnn/mlperf_pod16_lars").optim
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(5, 6)).double()
    optimiser = build_optimiser(optim, model, by_dimension(model))
    named = dict(model.named_parameters())
    plain = {key: (param.detach().numpy().copy(), 0.0) for key, param in named.items()}
    for update, rate in enumerate((5.0, 10.72, 8.0)):
        for key, param in named.items():
            gradient = np.random.default_rng([update, param.numel()]).normal(size=param.shape)
            param.grad = torch.from_numpy(gradient.copy())
            weight, momentum = plain[key]
            change = rate * gradient
            if param.dim() > 1:
                norm = np.linalg.norm(weight)
                trust = 0.001 * norm / (np.linalg.norm(gradient) + 5e-5 * norm)
                change = rate * trust * (gradient + 5e-5 * weight)
            momentum = 0.9 * momentum + change
            plain[key] = (weight - momentum, momentum)
        step(optimiser, 1.0, rate)
    for key, param in named.items():
        np.testing.assert_allclose(param.detach().numpy(), plain[key][0], rtol=1e-6, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("classes", [10, 1000])
def test_label_smoothing_here_and_in_the_program_differ_by_a_known_factor(classes):
    """There the true class gets 1 - s, the others s / (classes - 1); here s is spread over all of them."""
    smoothing = 0.1
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(0)) * 3
    label = torch.tensor([0, 3, 7, 9])
    target = torch.full((4, classes), smoothing / (classes - 1), dtype=torch.float64)
    target[range(4), label] = 1 - smoothing
    published = -(target * logits.double().log_softmax(1)).sum()
    ours = mixed_cross_entropy(logits, Mixed(torch.empty(0), label), smoothing * classes / (classes - 1))
    assert float(ours) == pytest.approx(float(published), rel=1e-5)


def test_the_decay_of_running_statistics_is_a_key():
    """running ← decay · running + (1 - decay) · new, the variance unbiased."""
    section = CnnModel(norm={"decay": 0.97}).norm
    norm = build_norm(section, 2, 2, momentum=0.01)
    x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0)) + 4
    norm(x)
    values = x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean, 0.03 * values.mean(1))
    torch.testing.assert_close(norm.running_var, 0.97 + 0.03 * values.var(1))
    assert build_norm(load_recipe("cnn/mlperf_pod16_lars").workload.model.norm, 2, 2).momentum == 0.1
    assert build_norm(CnnModel().norm, 2, 2).momentum == 0.1


def test_resnet_50_is_that_of_the_description():
    """7×7 stem, stages of 3, 4, 6 and 3 blocks of 1×1, 3×3, 1×1 that widen fourfold, 1×1 shortcuts."""
    with torch.device("meta"):
        network = build_network(CnnModel(size=50), 1000)
        images = torch.zeros(1, 3, 224, 224)
    count = 3 * 64 * 49 + 2 * 64
    channels, shapes = 64, [(64, 56)]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            count += channels * width + 9 * width * width + 4 * width * width + 2 * (width + width + 4 * width)
            if block == 0:
                count += channels * 4 * width + 2 * 4 * width
            channels = 4 * width
            shapes.append((channels, 56 // 2**stage))
    count += channels * 1000 + 1000
    assert count == 25_557_032
    assert sum(param.numel() for param in network.parameters()) == count
    found, x = [], images
    for _, stage in network.stages():
        x = stage(x)
        if x.dim() == 4:
            found.append((x.shape[1], x.shape[2]))
    assert found == shapes
    assert x.shape == (1, 1000)


@pytest.mark.parametrize(("size", "blocks"), [(8, 1), (20, 3), (32, 5), (56, 9)])
def test_cifar_networks_are_those_of_the_paper(size, blocks):
    """6 n + 2 layers: a 3×3 convolution, three stages of n pairs at 16, 32, 64 channels, shortcuts without weights."""
    count, channels = 3 * 16 * 9 + 2 * 16, 16
    for width in (16, 32, 64):
        for _ in range(blocks):
            count += 9 * channels * width + 9 * width * width + 4 * width
            channels = width
    count += 64 * 10 + 10
    with torch.device("meta"):
        network = build_network(CnnModel(size=size), 10)
    assert sum(param.numel() for param in network.parameters()) == count
