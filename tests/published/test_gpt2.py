"""GPT-2 as published: the numbers of every recipe, the cosine schedule, AdamW, the network and its loss."""

import math

import numpy as np
import pytest
import torch

from podium.optim.optimisers import build_optimiser, step
from podium.recipe.loading import load_recipe
from podium.workloads.gpt2.model import Gpt2
from podium.workloads.gpt2.section import Gpt2Data, Gpt2Model
from podium.workloads.gpt2.workload import Workload
from tests.support.published import differences, rates_of

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = {
    "workload.model.context": 1024,
    "workload.model.vocabulary": 50_257,
    "workload.model.dropout": 0.1,
    "workload.model.tied": True,
    "batch.micro": 1,
    "batch.global": 8192,
    "optim.name": "adamw",
    "optim.lr": 1.5e-4,
    "optim.weight_decay": 0.0,
    "schedule.name": "cosine",
    "schedule.warmup": "0.01of",
    "parallel.recompute": True,
    "engine.updates_per_call": 8,
}
PUBLISHED = {
    "small": {
        **ALL,
        "workload.model.size": "small",
        "batch.accumulation": 2048,
        "batch.replicas": 4,
        "parallel.stages": [0, 4, 4, 4],
    },
    "medium": {
        **ALL,
        "workload.model.size": "medium",
        "batch.accumulation": 4096,
        "batch.replicas": 2,
        "parallel.stages": [0, 3, 3, 3, 3, 4, 4, 4],
    },
    "large": {
        **ALL,
        "workload.model.size": "large",
        "batch.accumulation": 8192,
        "batch.replicas": 1,
        "parallel.stages": [0, *[2] * 8, *[3] * 6, 2],
    },
    # published for inference only: no stages, and the batch is that of the others
    "xl": {**ALL, "workload.model.size": "xl", "batch.accumulation": 8192, "batch.replicas": 1},
}
#: layers, width, heads, parameters
SIZES = {
    "small": (12, 768, 12, 124_439_808),
    "medium": (24, 1024, 16, 354_823_168),
    "large": (36, 1280, 20, 774_030_080),
    "xl": (48, 1600, 25, 1_557_611_200),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_numbers(name):
    assert differences(f"gpt2/{name}", PUBLISHED[name]) == {}


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_published_sizes_and_a_vocabulary_padded_to_50272(name):
    """Two embeddings, blocks of 12 h² + 13 h numbers, the last norm; nothing for the head, which is tied."""
    layers, hidden, heads, parameters = SIZES[name]
    section = load_recipe(f"gpt2/{name}").workload.model
    assert section.shape == (layers, hidden, heads)
    with torch.device("meta"):
        model = Gpt2(section, section.vocabulary)
    assert model.embedding.tokens.weight.shape == (50_272, hidden)
    assert layers * (12 * hidden**2 + 13 * hidden) + (50_257 + 1024 + 2) * hidden == parameters
    assert sum(param.numel() for param in model.parameters()) == parameters + 15 * hidden


def test_stages_hold_all_layers():
    for name in ("small", "medium", "large"):
        assert sum(load_recipe(f"gpt2/{name}").parallel.stages) == SIZES[name][0]


def test_the_rate_follows_a_cosine_after_the_warm_up():
    """After k of n updates, w of them warm-up: peak · k / w, then peak · (1 + cos(π (k - w) / (n - w))) / 2."""
    rates = rates_of(load_recipe("gpt2/small"), updates_per_epoch=10)
    total, warmup = 10_000, 100
    assert len(rates) == total
    assert rates[:warmup] == pytest.approx([1.5e-4 * done / warmup for done in range(1, warmup + 1)])
    falling = [
        1.5e-4 * (1 + math.cos(math.pi * (done - warmup) / (total - warmup))) / 2 for done in range(warmup, total)
    ]
    assert rates[warmup:] == pytest.approx(falling, abs=1e-12)


def small_workload() -> Workload:
    model = Gpt2Model(size="custom", layers=2, hidden=12, heads=3, context=10, vocabulary=29, pad_vocabulary_to=8)
    return Workload(model, Gpt2Data(source="generated"))


def small_model() -> Gpt2:
    torch.manual_seed(5)
    model = small_workload().build_model().eval().double()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def test_adamw_takes_no_weight_decay():
    """weight ← weight - rate · mean / (1 - 0.9ᵏ) / (√(square / (1 - 0.999ᵏ)) + 1e-8), for every parameter."""
    optim, model = load_recipe("gpt2/small").optim, small_model()
    optimiser = build_optimiser(optim, model, small_workload().param_groups(model))
    named = dict(model.named_parameters())
    plain = {key: (param.detach().numpy().copy(), 0.0, 0.0) for key, param in named.items()}
    for update in (1, 2, 3):
        for key, param in named.items():
            gradient = np.random.default_rng([update, len(key), param.numel()]).normal(size=param.shape)
            param.grad = torch.from_numpy(gradient.copy())
            weight, mean, square = plain[key]
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            change = mean / (1 - 0.9**update) / (np.sqrt(square / (1 - 0.999**update)) + 1e-8)
            plain[key] = (weight - optim.lr * change, mean, square)
        step(optimiser, 1.0, optim.lr)
    for key, param in named.items():
        np.testing.assert_allclose(param.detach().numpy(), plain[key][0], rtol=1e-7, atol=1e-10, err_msg=key)


def normed(x, weights, prefix):
    mean = x.mean(-1, keepdim=True)
    spread = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (spread + 1e-5).sqrt() * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]


def dense(x, weights, prefix):
    return x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]


def gelu(x):
    """The approximation of the original network, with a hyperbolic tangent."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def written_out(weights, tokens):
    """The logits after each token: norms come first in blocks, every token sees itself and those before it."""
    size = len(tokens)
    x = weights["embedding.tokens.weight"][tokens] + weights["embedding.positions.weight"][:size]
    for layer in range(2):
        block = f"blocks.{layer}"
        inputs = normed(x, weights, f"{block}.attention_norm")
        query, key, value = dense(inputs, weights, f"{block}.attention.qkv").split(12, dim=-1)
        mixed = []
        for part in (slice(head * 4, head * 4 + 4) for head in range(3)):
            score = query[:, part] @ key[:, part].T / math.sqrt(4)
            score = score.masked_fill(torch.arange(size)[None] > torch.arange(size)[:, None], -math.inf)
            mixed.append(torch.softmax(score, dim=-1) @ value[:, part])
        x = x + dense(torch.cat(mixed, dim=-1), weights, f"{block}.attention.out")
        inner = gelu(dense(normed(x, weights, f"{block}.feed_forward_norm"), weights, f"{block}.feed_forward.wide"))
        x = x + dense(inner, weights, f"{block}.feed_forward.out")
    return normed(x, weights, "head.norm") @ weights["embedding.tokens.weight"].T


def test_the_network_and_its_loss_are_those_of_the_description():
    """The loss is the mean over all tokens of -log of what the token got; padding of the vocabulary gets nothing."""
    workload, model = small_workload(), small_model()
    tokens = torch.randint(29, (3, 11), generator=torch.Generator().manual_seed(0))
    logits = torch.stack([written_out(model.state_dict(), row[:-1]) for row in tokens])
    assert logits.shape == (3, 10, 32)
    logits = logits[..., :29]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :-1]), logits, rtol=1e-9, atol=1e-9)
        loss = workload.loss(model, {"tokens": tokens.int()})
    losses = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert loss.count == 30
    assert float(loss.sum) / loss.count == pytest.approx(float(losses.mean()), rel=1e-5)
