"""Batch norm over a span is batch norm over one big batch; group norm and its errors."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from podium.distributed.lockstep import check_span, largest_span, run_in_lockstep, twin
from podium.errors import UserError
from podium.layers.norm import SpanBatchNorm, build_norm
from podium.layers.section import NormSection
from podium.recipe.loading import load_recipe

BATCH_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(layers, inputs, grads):
    """Each layer's output and gradients (dx, dweight, dbias) for its part, replicas side by side."""

    def task(layer, x, dy):
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x)
        y.backward(dy)
        return y.detach(), x.grad, layer.weight.grad, layer.bias.grad

    parts = zip(layers, inputs, grads, strict=True)
    return run_in_lockstep([lambda part=part: task(*part) for part in parts])


def with_random_parameters(layer, seed=1):
    with torch.no_grad():
        layer.weight.copy_(drawn(len(layer.weight), seed=seed))
        layer.bias.copy_(drawn(len(layer.bias), seed=seed + 1))
    return layer


@settings(deadline=None, max_examples=40)
@given(
    num_replicas=st.sampled_from([2, 4, 8]),
    micro_batch=st.integers(1, 5),
    channels=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    offset=st.sampled_from([0.0, 1.0, -30.0]),
    seed=st.integers(0, 999),
)
def test_equals_one_big_batch(num_replicas, micro_batch, channels, sizes, offset, seed):
    shape = (num_replicas * micro_batch, channels, *sizes)
    x, dy = drawn(*shape, seed=seed) + offset, drawn(*shape, seed=seed + 1)
    if math.prod(sizes) > 1 and len(sizes) == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    big = with_random_parameters(BATCH_NORM[len(sizes)](channels, dtype=torch.float64))
    span = SpanBatchNorm(channels, num_replicas).double()
    span.load_state_dict(big.state_dict())
    replicas = [twin(span) for _ in range(num_replicas)]
    got = through(replicas, x.chunk(num_replicas), dy.chunk(num_replicas))

    given_x = x.clone().requires_grad_()
    y = big(given_x)
    y.backward(dy)
    # The variance of few values far from zero is known to fewer digits.
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    tolerance = 1e-12 * max(1.0, (mean.square() / (var + big.eps)).max().item() / 100)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.cat([part[0] for part in got]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([part[1] for part in got]), given_x.grad, **close)
    torch.testing.assert_close(sum(part[2] for part in got), big.weight.grad, **close)
    torch.testing.assert_close(sum(part[3] for part in got), big.bias.grad, **close)
    for replica in replicas:
        for name, buffer in big.named_buffers():
            torch.testing.assert_close(replica.get_buffer(name), buffer, **close)
            assert torch.equal(replica.get_buffer(name), replicas[0].get_buffer(name))


def test_gradients_equal_numerical_ones():
    """The loss of a replica depends on the inputs of the others: gradcheck over the whole span."""
    layer = with_random_parameters(SpanBatchNorm(3, 2).double())
    weights = drawn(2, 4, 3, 2, seed=9)

    def total(x):
        losses = run_in_lockstep([lambda i=i: (twin(layer)(x[i]).sin() * weights[i]).sum() for i in (0, 1)])
        return torch.stack(losses).sum().detach()

    x = drawn(2, 4, 3, 2, seed=5)
    inputs = [part.clone().requires_grad_() for part in x]
    run_in_lockstep([lambda i=i: (twin(layer)(inputs[i]).sin() * weights[i]).sum().backward() for i in (0, 1)])
    step = 1e-6
    for place in [(0, 0, 0, 0), (1, 3, 2, 1), (0, 2, 1, 1)]:
        up, down = x.clone(), x.clone()
        up[place] += step
        down[place] -= step
        numerical = (total(up) - total(down)) / (2 * step)
        torch.testing.assert_close(inputs[place[0]].grad[place[1:]], numerical, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters_too", [False, True])
def test_lower_precisions_stay_near_float64(dtype, parameters_too):
    x, dy = drawn(8, 5, 6, seed=1) * 2 + 3, drawn(8, 5, 6, seed=2)
    exact = with_random_parameters(SpanBatchNorm(5, 2).double())
    low = copy.deepcopy(exact).float()
    if parameters_too:
        low.to(dtype)
    reference = through([twin(exact), twin(exact)], x.chunk(2), dy.chunk(2))
    got = through([twin(low), twin(low)], x.to(dtype).chunk(2), dy.to(dtype).chunk(2))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    for ours, theirs in zip(got, reference, strict=True):
        assert ours[0].dtype == ours[1].dtype == dtype
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * 3)


def test_mean_far_from_zero_keeps_the_variance():
    """In float32, sums of squares would have no digit left of a spread 10,000 times smaller than the mean."""
    x = (drawn(64, 2, seed=3) + 1e4).float()
    layer = SpanBatchNorm(2, 4)
    (y, *_), *_ = through([twin(layer) for _ in range(4)], x.chunk(4), torch.ones_like(x).chunk(4))
    expected = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    torch.testing.assert_close(y.double(), expected[:16], rtol=2e-2, atol=2e-2)


def test_channels_last_stays_channels_last():
    layer = SpanBatchNorm(4, 2)
    x = drawn(4, 4, 3, 3, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    for y, dx, *_ in through([twin(layer), twin(layer)], x.chunk(2), x.chunk(2)):
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert dx.is_contiguous(memory_format=torch.channels_last)


def test_evaluation_is_plain_batch_norm_to_the_bit():
    plain, span = nn.BatchNorm2d(3), SpanBatchNorm(3, 4)
    plain(drawn(4, 3, 2, 2, dtype=torch.float32))
    span.load_state_dict(plain.state_dict())
    x = drawn(4, 3, 2, 2, seed=4, dtype=torch.float32)
    assert torch.equal(span.eval()(x), plain.eval()(x))


def test_training_outside_the_lockstep_is_an_error():
    with pytest.raises(AssertionError, match="span of 2 replicas trains only inside the engine's lockstep"):
        SpanBatchNorm(3, 2)(drawn(4, 3))


@pytest.mark.parametrize(("dims", "plain"), [(1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d)])
def test_span_1_is_plain_batch_norm(dims, plain):
    assert type(build_norm(NormSection(), 8, dims)) is plain
    assert largest_span(build_norm(NormSection(), 8, dims)) == 1


def test_checkpoints_of_a_span_fit_plain_batch_norm():
    span = build_norm(NormSection(span=2), 8, 1)
    assert isinstance(span, SpanBatchNorm)
    assert list(span.state_dict()) == list(nn.BatchNorm1d(8).state_dict())


def test_largest_span_looks_at_every_layer():
    assert largest_span(nn.Sequential(nn.Linear(1, 1), SpanBatchNorm(1, 2), nn.Sequential(SpanBatchNorm(1, 8)))) == 8


def test_group_norm():
    layer = build_norm(NormSection(kind="group", groups=4), 8, 2)
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (4, 8)
    with pytest.raises(UserError, match=r"norm\.groups = 32: expected a divisor of the 48 channels"):
        build_norm(NormSection(kind="group"), 48, 1)


def test_none_normalises_nothing():
    assert isinstance(build_norm(NormSection(kind="none"), 8, 1), nn.Identity)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"span": 3}, r"norm\.span = 3: expected a power of two"),
        ({"kind": "group", "span": 2}, "expected 1 with norm.kind = group"),
        ({"span": 0}, "greater than 0"),
        ({"kind": "layer"}, "'batch', 'group' or 'none'"),
    ],
)
def test_section_says_what_is_wrong(keys, part):
    with pytest.raises(ValidationError, match=part):
        NormSection(**keys)


@pytest.mark.parametrize(
    ("span", "replicas", "instances", "part"),
    [
        (2, 3, 1, r"span = 2 does not divide batch\.replicas = 3"),
        (8, 4, 1, r"span = 8 does not divide batch\.replicas = 4"),
        (6, 12, 1, "not a power of two"),
        (2, 6, 2, r"cannot lie in 2 instances of 6 replicas: .* \(possible: 1, 3, 5, 6\)"),
    ],
)
def test_check_span_says_what_is_wrong(span, replicas, instances, part):
    with pytest.raises(UserError, match=part):
        check_span(span, replicas, instances)


@pytest.mark.parametrize(
    ("span", "replicas", "instances"), [(1, 3, 1), (2, 6, 1), (4, 8, 1), (4, 8, 8), (2, 12, 2), (4, 8, 7)]
)
def test_check_span_accepts_what_works(span, replicas, instances):
    check_span(span, replicas, instances)


def test_twin_shares_weights_and_nothing_else():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[2].weight.requires_grad_(False)
    tied = nn.ModuleList([model, model[0]])
    other = twin(tied)
    assert other[1] is other[0][0]
    x = drawn(5, 3, dtype=torch.float32)
    other[0](x).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert model[1].num_batches_tracked == 0
    assert other[0][2].weight.grad is None
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    assert (other[0][0].weight == 7.0).all()


def test_twin_of_an_lstm_computes_with_its_own_parameters():
    model = nn.LSTM(2, 3, batch_first=True)
    other = twin(model)
    x = drawn(2, 4, 2, dtype=torch.float32)
    other(x)[0].sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is not None for param in other.parameters())
    assert torch.equal(model(x)[0], other(x)[0])


def test_the_decay_of_running_statistics_belongs_to_batch_norm(tmp_path):
    with pytest.raises(ValidationError, match=r"decay does not apply to norm.kind = group"):
        NormSection(kind="group", decay=0.9)
    for span in (1, 2):
        assert build_norm(NormSection(span=span, decay=0.9), 4, 2).momentum == 0.1
    # a recipe that inherits batch norm's keys may turn to group norm
    (tmp_path / "mine.yaml").write_text("base: cnn/mlperf_pod16_lars\nworkload: {model: {norm: {kind: group}}}\n")
    norm = load_recipe(str(tmp_path / "mine.yaml")).workload.model.norm
    assert (norm.kind, norm.span, norm.decay) == ("group", 1, None)
