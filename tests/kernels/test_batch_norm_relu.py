"""Batch norm, sum and ReLU as one operator: what torch's three give, to rounding."""

import pytest
import torch
from torch import nn

from podium.kernels.install import apply_layout
from podium.kernels.norm.batch_norm_relu import NormRelu, fits
from podium.layers.residual import ResidualBlock


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


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


def test_a_norm_that_is_not_trained_is_left_to_torch():
    assert fits(nn.BatchNorm2d(16), torch.empty(64, 16, 16, 16))
    assert not fits(nn.BatchNorm2d(16).eval(), torch.empty(64, 16, 16, 16))
