"""Faster layers of transformers: what the plain ones give, to rounding, and dropout that is drawn fairly."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from podium.kernels import registry
from podium.kernels.install import apply_layout
from podium.kernels.transformer import attention, cross_entropy, dropout_gelu, vocabulary
from podium.kernels.transformer.attention import Attention
from podium.layers.loss import cross_entropy_sum
from podium.layers.transformer import FewRows
from podium.workloads.bert.section import BertData, BertModel
from podium.workloads.bert.workload import Workload as Bert
from podium.workloads.gpt2.section import Gpt2Data, Gpt2Model
from podium.workloads.gpt2.workload import Workload as Gpt2


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    """What is left to torch for being small is not, here."""
    registry.use("auto")
    monkeypatch.setattr(attention, "LEAST_SCORES", 1)
    monkeypatch.setattr(dropout_gelu, "LEAST_VALUES", 1)
    monkeypatch.setattr(cross_entropy, "LEAST_VALUES", 1)
    monkeypatch.setattr(vocabulary, "LEAST_VALUES", 1)
    monkeypatch.setattr(vocabulary, "LEAST_WORDS", 100)


def _off(found, expected):
    """The largest difference, against the size of the values."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


def _plain(qkv, mask, heads, causal, weights=None):
    """Attention as its formula says; `weights` multiplies those of the softmax."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    found = scores.softmax(-1)
    return ((found if weights is None else found * weights) @ value).transpose(1, 2).flatten(2)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_drops_weights_fairly_and_the_same_ones_in_backward(causal):
    """Values that are a unit matrix bring the weights to light."""
    torch.manual_seed(1)
    num_rows, size, heads, share = 16, 32, 4, 0.25
    qkv = torch.randn(num_rows, size, 3, heads, size)
    qkv[:, :, 2] = torch.eye(size)[:, None]
    qkv = qkv.flatten(2).requires_grad_()
    output = Attention.apply(qkv, None, heads, causal, share)
    weights = output.detach().unflatten(-1, (heads, size)).transpose(1, 2)
    allowed = torch.ones(size, size, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    stayed = (weights > 0).double()[..., allowed]
    num = stayed.numel()
    assert abs(float(stayed.mean()) - (1 - share)) < 5 * (share * (1 - share) / num) ** 0.5
    stays = (weights > 0).double() / (1 - share)
    double = qkv.detach().double().requires_grad_()
    expected = _plain(double, None, heads, causal, stays)
    assert _off(output, expected) < 1e-6
    grad = torch.randn(expected.shape)
    output.backward(grad)
    expected.backward(grad.double())
    assert _off(qkv.grad, double.grad) < 2e-6


def test_attention_gives_zeros_where_nothing_may_be_looked_at_and_hides_no_nan():
    qkv = torch.randn(1, 32, 3 * 16).requires_grad_()
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    mask[0, 0, 3] = False
    output = Attention.apply(qkv, mask, 1, False, 0.0)
    output.sum().backward()
    assert bool((output[0, 3] == 0).all())
    assert bool(qkv.grad.isfinite().all())
    broken = qkv.detach().clone()
    broken[0, 5, 0] = float("nan")
    assert bool(Attention.apply(broken, mask, 1, False, 0.0)[0, 5].isnan().all())


# --- dropout and GELU -------------------------------------------------------------------------------------------------


def _fast(module):
    module = copy.deepcopy(module)
    apply_layout(module, "channels_last")
    return module


def test_dropout_keeps_its_share_and_passes_the_same_gradients():
    torch.manual_seed(2)
    x = torch.ones(40, 1000, requires_grad=True)
    y = _fast(nn.Dropout(0.1))(x)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.9))}
    share = float((y == 0).double().mean())
    assert abs(share - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(x.grad, 2 * y.detach())


def test_chances_do_not_hang_together():
    """Neighbours, lines, seeds: who stays tells nothing about the others."""
    x = torch.ones(256, 4096)
    torch.manual_seed(4)
    draws = [(_fast(nn.Dropout(0.5))(x.requires_grad_()) > 0).double() * 2 - 1 for _ in range(3)]
    bound = 5 / x.numel() ** 0.5
    first = draws[0]
    for shift in (1, 2, 7, 8, 16, 64):
        assert abs(float((first * first.roll(shift, 1)).mean())) < bound, shift
        assert abs(float((first * first.roll(shift, 0)).mean())) < bound, shift
    for other in draws[1:]:
        assert abs(float((first * other).mean())) < bound
    # by columns and by lines: no place is luckier than others
    assert float(first.mean(0).abs().max()) < 6 / 256**0.5
    assert float(first.mean(1).abs().max()) < 6 / 4096**0.5


def test_dropout_follows_the_default_generator_and_no_number_of_threads():
    layer, x, found = _fast(nn.Dropout(0.3)), torch.randn(64, 512, requires_grad=True), []
    before = torch.get_num_threads()
    try:
        for threads, seed in ((1, 5), (2, 5), (3, 5), (1, 6)):
            torch.set_num_threads(threads)
            torch.manual_seed(seed)
            found.append(layer(x).detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_gelu_and_its_gradient_are_those_of_float64():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4096) * 4, torch.tensor([-40.0, 40, 0, -0.0, 1e-20, -9, 9, 100] * 2)]).requires_grad_()
    double = x.detach().double().requires_grad_()
    y, expected = _fast(nn.GELU(approximate="tanh"))(x), F.gelu(double, approximate="tanh")
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=1e-7)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=2e-6, atol=5e-7)


# --- cross-entropy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [64, 100, 1003])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_cross_entropy_is_that_of_float64(num_classes, factor):
    torch.manual_seed(0)
    logits = torch.randn(37, num_classes) * 5 + 100
    target = torch.randint(0, num_classes, (37,))
    target[[0, 11]] = -1
    target[1] = num_classes - 1
    double = logits.double().requires_grad_()
    expected = F.cross_entropy(double, target, ignore_index=-1, reduction="sum")
    leaf = logits.clone().requires_grad_()
    found = cross_entropy_sum(leaf * 1, target, -1, keeps=False)
    assert type(found.grad_fn).__name__ == "CrossEntropyBackward"
    assert _off(found, expected) < 3e-7
    (found * factor).backward()
    (expected * factor).backward()
    # 100 is far from zero: logits themselves are known to 4e-6 only
    assert _off(leaf.grad, double.grad) < 2e-6


def test_cross_entropy_keeps_logits_on_request_hides_no_nan_and_refuses_targets_outside():
    logits = torch.randn(4, 128, requires_grad=True)
    given = logits * 1
    before = given.detach().clone()
    cross_entropy_sum(given, torch.zeros(4, dtype=torch.long), keeps=True).backward()
    assert torch.equal(given, before)
    broken = logits.detach().clone()
    broken[2, 100] = float("nan")
    assert bool(cross_entropy_sum(broken.requires_grad_() * 1, torch.zeros(4, dtype=torch.long), keeps=False).isnan())
    with pytest.raises(IndexError, match="128 classes"):
        cross_entropy_sum(logits * 1, torch.full((4,), 128), keeps=False)


# --- tables of words --------------------------------------------------------------------------------------------------


def _used(table, tokens, weight, *, times=1, plain=False, passes=1):
    """The gradient of a table that is looked up and is the last layer, in one backward pass or two."""
    table.grad = None
    look_up = (lambda: F.embedding(tokens, table)) if plain else (lambda: vocabulary.LookUp.apply(table, tokens))
    last = (lambda x: F.linear(x, table)) if plain else (lambda x: vocabulary.Linear.apply(x, table, None))
    x = look_up()
    if passes == 2:
        inner = x.detach().requires_grad_()
        (last(inner) * weight).sum().backward()
        x.backward(inner.grad)
        return table.grad
    total = sum((last(x) * weight).sum() for _ in range(times))
    (total + (table * 0.5).sum() if times > 1 else total).backward()
    return table.grad


@pytest.mark.parametrize("setting", [{}, {"times": 2}, {"passes": 2}])
def test_gradients_of_a_table_used_twice_are_summed(setting):
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(300, 16))
    tokens, weight = torch.randint(0, 40, (2, 30), dtype=torch.int32), torch.randn(300)
    expected = _used(table, tokens, weight, plain=True, **setting)
    for _ in range(2):
        found = _used(table, tokens, weight, **setting)
        assert found.layout == torch.strided
        assert _off(found, expected) < 1e-6


def test_a_table_that_is_only_looked_up_gets_all_of_its_gradient():
    table, tokens = nn.Parameter(torch.randn(300, 16)), torch.randint(0, 300, (2, 30))
    vocabulary.LookUp.apply(table, tokens).sum().backward()
    assert float(table.grad.sum()) == 2 * 30 * 16


# --- whole models -----------------------------------------------------------------------------------------------------


def _bert(**model):
    section = BertModel(size="custom", layers=2, hidden=64, heads=2, vocabulary=203, **model)
    return Bert(section, BertData(source="generated", length=32, samples=20, packed=True, seed=1))


def _gpt2(**model):
    section = Gpt2Model(layers=2, hidden=64, heads=2, context=32, vocabulary=203, **model)
    return Gpt2(section, Gpt2Data(source="generated", samples=20))


NO_DROPOUT = {"bert": {"dropout": 0.0, "attention_dropout": 0.0}, "gpt2": {"dropout": 0.0}}
MAKERS = {"bert": _bert, "gpt2": _gpt2}


def _batch(workload, num_samples=4):
    batch = workload.example(num_samples)
    if "tokens" in batch and batch["tokens"].shape[1] == 33:
        batch["tokens"] = torch.randint(0, 203, batch["tokens"].shape, dtype=torch.int32)
    return batch


def _gradients(workload, model, batch):
    loss = workload.loss(model, batch)
    loss.sum.backward()
    return loss.sum.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_model_learns_what_the_plain_one_learns(name, tied):
    torch.manual_seed(0)
    workload = MAKERS[name](tied=tied, **NO_DROPOUT[name])
    plain = workload.build_model().train()
    fast = _fast(plain)
    assert name != "bert" or [m.only_needed for m in fast.modules() if isinstance(m, FewRows)] == [True]
    batch = _batch(workload)
    exact, expected = _gradients(workload, plain, batch)
    found, grads = _gradients(workload, fast, batch)
    assert _off(found, exact) < 1e-6
    assert grads.keys() == expected.keys()
    for key, grad in grads.items():
        if key.endswith("qkv.bias"):  # that of keys has no influence: rounding is all there is
            grad, expected[key] = grad[:64], expected[key][:64]
        assert _off(grad, expected[key]) < 2e-5, key
    # Evaluation: the same numbers for whoever asks, with metrics.
    plain.eval()
    fast.eval()
    with torch.inference_mode():
        ours, theirs = workload.loss(fast, batch), workload.loss(plain, batch)
    assert _off(ours.sum, theirs.sum) < 1e-6
    assert ours.metrics.keys() == theirs.metrics.keys()
