"""Batch norm, sum and ReLU as one operator: what torch's three give, to rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from podium.engine.norm_relu import NormRelu, fits
from podium.engine.operators import apply_layout
from podium.layers.residual import ResidualBlock

SHAPES = [(8, 64, 28, 28), (33, 16, 32, 32), (4, 8, 40, 41), (3, 48, 37, 20), (2, 1024, 7, 7)]


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def norm_of(num_channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(num_channels)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_gradients_and_statistics_are_those_of_float64(shape, adds):
    torch.manual_seed(1)
    x = channels_last(torch.randn(shape) * 2 + 5)
    added = channels_last(torch.randn(shape)) if adds else None
    grad = torch.randn(shape)
    ours = norm_of(shape[1])
    exact = norm_of(shape[1]).double()
    exact.load_state_dict(ours.state_dict())
    results = []
    for norm, dtype in ((ours, torch.float32), (exact, torch.float64)):
        inputs = [part.detach().to(dtype).requires_grad_() for part in (x, added) if part is not None]
        if dtype == torch.float32:
            y = NormRelu.apply(inputs[0], norm.weight, norm.bias, inputs[1] if adds else None, norm)
        else:
            y = F.relu(norm(inputs[0]) + (inputs[1] if adds else 0))
        y.backward(grad.to(dtype))
        found = [y, *(part.grad for part in inputs), norm.weight.grad, norm.bias.grad]
        results.append([*found, norm.running_mean, norm.running_var])
        assert norm.num_batches_tracked == 1
    near_zero = results[1][0].detach().abs() < 1e-4  # where rounding decides whether a gradient passes
    for own, other in zip(*results, strict=True):
        if own.shape == shape:
            own, other = own.masked_fill(near_zero, 0), other.masked_fill(near_zero, 0)
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=2e-5 * max(1.0, scale))


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    x, added, grad = (channels_last(torch.randn(16, 32, 24, 24)) for _ in range(3))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norm = nn.BatchNorm2d(32)
            inputs = [part.clone().requires_grad_() for part in (x, added)]
            y = NormRelu.apply(inputs[0], norm.weight, norm.bias, inputs[1], norm)
            y.backward(grad)
            results.append([y, inputs[0].grad, inputs[1].grad, norm.weight.grad, norm.running_var])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_is_not_a_number_stays_to_be_seen():
    x = channels_last(torch.randn(8, 16, 20, 20))
    x[1, 3, 2, 2] = torch.nan
    norm = nn.BatchNorm2d(16)
    y = NormRelu.apply(x, norm.weight, norm.bias, None, norm)
    assert bool(y[:, 3].isnan().all())
    assert not bool(y[:, 4].isnan().any())


def blocks() -> nn.Sequential:
    torch.manual_seed(0)

    def convolution(stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(16, 16, 3, stride, 1, bias=False)

    branch = [convolution(), nn.BatchNorm2d(16), nn.ReLU(inplace=True), convolution(), nn.BatchNorm2d(16)]
    shortcut = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        ResidualBlock(nn.Sequential(*branch), nn.Identity()),
        ResidualBlock(nn.Sequential(convolution(), nn.BatchNorm2d(16)), shortcut),
    )


@pytest.mark.parametrize("batch", [8, 1])  # the smaller one is left to torch
def test_networks_give_the_same_with_and_without(batch):
    plain, fast = blocks(), blocks()
    apply_layout(fast, "channels_last")
    image = torch.randn(batch, 3, 24, 24)
    for model in (plain, fast):
        model(image).square().mean().backward()
    for (name, own), other in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-3, atol=1e-5, msg=name)
    for own, other in zip(fast.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    for model in (plain, fast):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(image), plain(image), rtol=1e-4, atol=1e-4)


def test_whoever_looks_at_a_layer_sees_its_own_output():
    model = blocks()
    apply_layout(model, "channels_last")
    image = torch.randn(8, 3, 24, 24)
    expected = model(image)
    seen = []
    for place in (model[0][1], model[1].branch[4], model[1].branch[1]):
        place.register_forward_hook(lambda module, inputs, output: seen.append(bool((output < 0).any())))
    torch.testing.assert_close(model(image), expected, rtol=1e-3, atol=1e-4)
    assert seen == [True, True, True]


@pytest.mark.parametrize("change", ["eval", "odd channels", "no statistics", "small", "no parameters"])
def test_other_norms_are_left_to_torch(change):
    channels = 12 if change == "odd channels" else 16
    norm = nn.BatchNorm2d(
        channels, track_running_stats=change != "no statistics", affine=change != "no parameters"
    ).train(change != "eval")
    assert not fits(norm, torch.empty(2 if change == "small" else 64, channels, 16, 16))
