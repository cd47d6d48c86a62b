"""3 × 3 convolutions by tiles, against float64 and against the plain way."""

import pytest
import torch
from torch import nn

from podium.kernels.conv.winograd import Geometry, WinogradConvolution, convolved
from podium.kernels.conv.winograd_weights import matrix, transformed
from podium.kernels.install import apply_layout
from podium.kernels.jit.llvm import WIDTH


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _drawn(n, c, o, height, width):
    torch.manual_seed(0)
    image = torch.randn(n, c, height, width).contiguous(memory_format=torch.channels_last)
    return image, torch.randn(o, c, 3, 3), torch.randn(o)


def _off(found, expected):
    """The largest difference, against the size of the values."""
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("o", "c"), [(64, 32), (WIDTH, 5 * WIDTH)])
def test_kernels_are_transformed_as_by_a_matrix(threads, o, c):
    torch.manual_seed(0)
    kernel = torch.randn(o, c, 3, 3).contiguous(memory_format=torch.channels_last)
    turned = kernel.flip(2, 3).transpose(0, 1)
    for found, of in ((transformed(kernel), kernel), (transformed(kernel, backwards=True), turned)):
        expected = (matrix().double() @ of.double().permute(2, 3, 1, 0).reshape(9, c * o)).view(found.shape)
        assert _off(found, expected) < 2e-7


def test_again_gives_the_same_bits(threads):
    image, kernel, bias = _drawn(7, 32, 32, 15, 10)
    kernel.requires_grad_()

    def once():
        output = WinogradConvolution.apply(image, kernel, bias, (1, 1))
        return output, *torch.autograd.grad(output, [kernel], torch.ones_like(output))

    first, again = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_image_gradient_does_not_depend_on_threads():
    image, kernel, bias = _drawn(3, 16, 16, 12, 12)
    image.requires_grad_()
    found = []
    before = torch.get_num_threads()
    for num in (1, 2, 3):
        torch.set_num_threads(num)
        output = WinogradConvolution.apply(image, kernel, bias, (1, 1))
        found.append((output.detach(), *torch.autograd.grad(output, [image], output.detach())))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_outputs_that_nobody_needs_are_left_out():
    image, kernel, bias = _drawn(2, 32, 64, 13, 13)
    rows = image.permute(0, 2, 3, 1)
    whole = convolved(rows, kernel, bias, Geometry((13, 13, 32), (11, 11, 64), (0, 0)))
    part = convolved(rows, kernel, bias, Geometry((13, 13, 32), (10, 10, 64), (0, 0)))
    assert part.shape == (2, 10, 10, 64)
    torch.testing.assert_close(part, whole[:, :10, :10], rtol=1e-5, atol=1e-5)


def test_an_image_too_small_for_the_kernel_is_told_by_torch():
    model = nn.Sequential(nn.Conv2d(16, 16, 3))
    apply_layout(model, "channels_last")
    with pytest.raises(RuntimeError, match="Kernel size"):
        model(torch.randn(1, 16, 2, 2))


def test_what_follows_may_write_into_the_output():
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3), nn.MaxPool2d(2))
    model.append(nn.Dropout(0.5, inplace=True))
    apply_layout(model, "channels_last")
    model(torch.randn(2, 16, 12, 12)).sum().backward()
    assert model[0].weight.grad.isfinite().all()
