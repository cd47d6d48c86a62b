"""BERT as published: the numbers of every recipe, the linear schedule, LAMB, the network and its two losses."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from podium.optim.optimisers import build_optimiser, step
from podium.recipe.loading import load_recipe
from podium.workloads.bert.model import Bert
from podium.workloads.bert.section import BertData, BertModel
from podium.workloads.bert.workload import Workload, row_layout
from tests.support.published import differences, rates_of

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = {
    "workload.model.norm_eps": 1e-3,
    "workload.model.attention_dropout": 0.0,
    "optim.name": "lamb",
    "optim.weight_decay": 0.01,
    "schedule.name": "linear",
    "precision.mode": "16.16",
    "engine.updates_per_call": 1,
}
BASE = {"workload.model.size": "base", "optim.bias_correction": False, "parallel.stages": [0, 4, 4, 4]}
LARGE = {"workload.model.size": "large", "optim.bias_correction": True, "parallel.stages": [3, 7, 7, 7]}
FIRST = {"workload.data.length": 128, "train.length": "7038up", "optim.lr": 0.006, "schedule.warmup": "0.28of"}
SECOND = {"workload.data.length": 512, "train.length": "2137up", "optim.lr": 0.002828, "schedule.warmup": "0.128of"}
PACKED = {"workload.data.packed": True, "workload.data.max_sequences": 3}


def sizes(micro, accumulation, replicas):
    """Return the sizes; the loss scale is not the published one, which belongs to a mean: ours would overflow."""
    return {
        "batch.micro": micro,
        "batch.accumulation": accumulation,
        "batch.replicas": replicas,
        "batch.global": micro * accumulation * replicas,
        "precision.loss_scale": "auto",
    }


PUBLISHED = {
    "pretrain_base_128": {**ALL, **BASE, **FIRST, **sizes(32, 512, 4)},
    "pretrain_base_128_pod4": {**ALL, **BASE, **FIRST, **sizes(32, 2048, 1)},
    "pretrain_base_512": {**ALL, **BASE, **SECOND, **sizes(8, 512, 4)},
    "pretrain_base_512_pod4": {**ALL, **BASE, **SECOND, **sizes(8, 2048, 1)},
    "pretrain_large_128": {**ALL, **LARGE, **FIRST, **sizes(8, 2048, 4)},
    "pretrain_large_128_pod4": {**ALL, **LARGE, **FIRST, **sizes(8, 8192, 1)},
    "pretrain_large_128_pod64": {**ALL, **LARGE, **FIRST, **sizes(8, 512, 16)},
    "pretrain_large_512": {**ALL, **LARGE, **SECOND, **sizes(2, 2048, 4)},
    "pretrain_large_512_pod4": {**ALL, **LARGE, **SECOND, **sizes(2, 8192, 1)},
    "pretrain_large_512_pod64": {**ALL, **LARGE, **SECOND, **sizes(2, 512, 16)},
    # packed: the accumulation divided by 1.17 at 128 tokens and by 2 at 512, rounded up
    "pretrain_base_128_packed": {**ALL, **BASE, **FIRST, **PACKED, **sizes(32, math.ceil(512 / 1.17), 4)},
    "pretrain_base_512_packed": {**ALL, **BASE, **SECOND, **PACKED, **sizes(8, 256, 4)},
    "pretrain_large_128_packed": {**ALL, **LARGE, **FIRST, **PACKED, **sizes(8, math.ceil(2048 / 1.17), 4)},
    "pretrain_large_512_packed": {**ALL, **LARGE, **SECOND, **PACKED, **sizes(2, 1024, 4)},
    "demo_tiny_128": {
        "workload.model.layers": 3,
        "workload.model.hidden": 64,
        "workload.model.heads": 8,
        "workload.data.length": 128,
        "batch.micro": 1,
        "batch.accumulation": 16,
        "batch.replicas": 1,
        "train.length": "150up",
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.0,
        "schedule.name": "constant",
        "schedule.warmup": "0up",
        "parallel.stages": [0, 1, 1, 1],
        "engine.updates_per_call": 1,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_numbers(name):
    assert differences(f"bert/{name}", PUBLISHED[name]) == {}


@pytest.mark.parametrize(("length", "masked"), [(128, 20), (512, 76)])
def test_rows_have_the_published_number_of_masked_tokens(length, masked):
    data = load_recipe(f"bert/pretrain_base_{length}").workload.data
    assert row_layout(data).num_slots == masked


@pytest.mark.parametrize(("name", "warmup"), [("pretrain_base_128", 1971), ("pretrain_large_512", 274)])
def test_the_rate_rises_and_falls_in_straight_lines(name, warmup):
    """After k updates, of w in the warm-up and n in all: peak · k / w, then peak · (n - k) / (n - w)."""
    recipe = load_recipe(f"bert/{name}")
    peak, rates = recipe.optim.lr, rates_of(recipe, updates_per_epoch=10)
    total = len(rates)
    assert rates[:warmup] == pytest.approx([peak * done / warmup for done in range(1, warmup + 1)])
    falling = [peak * (total - done) / (total - warmup) for done in range(warmup, total)]
    assert rates[warmup:] == pytest.approx(falling)


# --- LAMB -------------------------------------------------------------------------------------------------------------


def lamb_step(weight, mean, square, gradient, update, *, lr, decay, adapt, correct):
    """One step in plain numbers: eps 1e-6, betas 0.9 and 0.999; returns the weight and both running means."""
    mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
    first, second = (mean / (1 - 0.9**update), square / (1 - 0.999**update)) if correct else (mean, square)
    change = first / (np.sqrt(second) + 1e-6) + decay * weight
    ratio = 1.0
    if adapt and np.linalg.norm(weight) > 0 and np.linalg.norm(change) > 0:
        ratio = np.linalg.norm(weight) / np.linalg.norm(change)
    return weight - lr * ratio * change, mean, square


@pytest.mark.parametrize("name", ["pretrain_base_128", "pretrain_large_128"])
def test_lamb_corrects_its_means_in_large_and_leaves_biases_and_norms_as_published(name):
    """Biases take no weight decay and no trust ratio, one-dimensional weights of norms no weight decay."""
    optim = load_recipe(f"bert/{name}").optim
    model = small_model().double()
    optimiser = build_optimiser(optim, model, small_workload().param_groups(model))
    named = dict(model.named_parameters())
    plain = {key: (param.detach().numpy().copy(), 0.0, 0.0) for key, param in named.items()}
    for update in (1, 2, 3):
        for key, param in named.items():
            gradient = np.random.default_rng([update, len(key), param.numel()]).normal(size=param.shape)
            param.grad = torch.from_numpy(gradient.copy())
            bias = key.endswith("bias")
            plain[key] = lamb_step(
                *plain[key],
                gradient,
                update,
                lr=optim.lr,
                decay=0.0 if bias or param.dim() == 1 else 0.01,
                adapt=not bias,
                correct=name == "pretrain_large_128",
            )
        step(optimiser, 1.0, optim.lr)
    for key, param in named.items():
        np.testing.assert_allclose(param.detach().numpy(), plain[key][0], rtol=1e-6, atol=1e-9, err_msg=key)


# --- the network ------------------------------------------------------------------------------------------------------


def small_workload() -> Workload:
    model = BertModel(size="custom", layers=2, hidden=16, heads=4, vocabulary=60, max_positions=32, norm_eps=1e-3)
    return Workload(model, BertData(source="generated", length=24, samples=20))


def small_model() -> Bert:
    torch.manual_seed(3)
    model = small_workload().build_model().eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


@pytest.mark.parametrize(("size", "layers", "hidden"), [("base", 12, 768), ("large", 24, 1024)])
def test_parameters_are_those_of_the_description(size, layers, hidden):
    """Embeddings and a norm; layers of 4 h² + 8 h² weights; pooler, dense layer and norm of the head; two heads."""
    vocabulary = 30_522
    embedding = (vocabulary + 512 + 2) * hidden + 2 * hidden
    attention = 4 * (hidden * hidden + hidden) + 2 * hidden
    feed_forward = 2 * 4 * hidden * hidden + 5 * hidden + 2 * hidden
    heads = 2 * (hidden * hidden + hidden) + 2 * hidden + vocabulary + 2 * hidden + 2
    with torch.device("meta"):
        model = Bert(BertModel(size=size), vocabulary)
    assert sum(param.numel() for param in model.parameters()) == embedding + layers * (attention + feed_forward) + heads


def normed(x, weights, prefix):
    mean = x.mean(-1, keepdim=True)
    spread = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (spread + 1e-3).sqrt() * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]


def dense(x, weights, prefix):
    return x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def written_out(weights, row, heads=4):
    """The logits of one row of one sequence, without padding: post-norm blocks, tied words, a tanh pooler."""
    x = (
        weights["embedding.word.weight"][row["tokens"].long()]
        + weights["embedding.position.weight"][: len(row["tokens"])]
    )
    x = normed(x + weights["embedding.segment.weight"][row["segment"].long()], weights, "embedding.norm")
    for layer in range(2):
        block = f"encoders.{layer}"
        query, key, value = dense(x, weights, f"{block}.attention.qkv").split(16, dim=-1)
        mixed = []
        for part in (slice(head * 4, head * 4 + 4) for head in range(heads)):
            score = query[:, part] @ key[:, part].T / math.sqrt(4)
            mixed.append(torch.softmax(score, dim=-1) @ value[:, part])
        attended = dense(torch.cat(mixed, dim=-1), weights, f"{block}.attention.out")
        x = normed(x + attended, weights, f"{block}.attention_norm")
        inner = gelu(dense(x, weights, f"{block}.feed_forward.wide"))
        x = normed(x + dense(inner, weights, f"{block}.feed_forward.out"), weights, f"{block}.norm")
    pooled = torch.tanh(dense(x[0], weights, "pooler.dense"))
    word = normed(gelu(dense(x[row["masked"].long()], weights, "classifier.dense")), weights, "classifier.norm")
    words = word @ weights["embedding.word.weight"].T + weights["classifier.bias"]
    return words, dense(pooled, weights, "classifier.next")


def test_the_network_and_its_losses_are_those_of_the_description():
    """The loss is the mean over masked words plus the mean over pairs, where rows have equally many masked words."""
    workload, model = small_workload(), small_model().double()
    batch = workload.example(16)
    full = (batch["sequence"] > 0).all(1) & (batch["target"] >= 0).all(1)
    batch = {name: rows[full] for name, rows in batch.items()}
    count = len(batch["tokens"])
    assert count >= 4
    weights = model.state_dict()
    outputs = [written_out(weights, {name: rows[i] for name, rows in batch.items()}) for i in range(count)]
    with torch.no_grad():
        words, pairs = model(*workload.inputs(batch))
        loss = workload.loss(model, batch)
    torch.testing.assert_close(words, torch.stack([output[0] for output in outputs]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pairs[:, 0], torch.stack([output[1] for output in outputs]), rtol=1e-9, atol=1e-9)
    of_words = [F.cross_entropy(output[0], target) for output, target in zip(outputs, batch["target"], strict=True)]
    of_pairs = [
        -output[1].log_softmax(0)[int(follows)] for output, (follows,) in zip(outputs, batch["follows"], strict=True)
    ]
    expected = torch.stack(of_words).mean() + torch.stack(of_pairs).mean()
    assert float(loss.sum) / loss.count == pytest.approx(float(expected), rel=1e-5)
