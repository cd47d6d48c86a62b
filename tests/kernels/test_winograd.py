"""3 × 3 convolutions by tiles, against float64 and against the plain way."""

import pytest
import torch
from torch import nn

from podium.kernels.conv.winograd import WinogradConvolution, convolved
from podium.kernels.conv.winograd_products import PANEL, apart
from podium.kernels.conv.winograd_tiles import Geometry, tiling_of
from podium.kernels.conv.winograd_transforms import matrix
from podium.kernels.conv.winograd_weights import gradient, transformed
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


def _without_panels(u, num_rows, num_columns):
    """(products, rows, columns) of a matrix in panels, with a gap between the products."""
    panels = u[:, : num_rows * num_columns].split(
        [num_rows * min(PANEL, num_columns - at) for at in range(0, num_columns, PANEL)], 1
    )
    return torch.cat([panel.reshape(len(u), num_rows, -1) for panel in panels], 2)


@pytest.mark.parametrize("side", [2, 4])
@pytest.mark.parametrize(("o", "c"), [(64, 32), (WIDTH, 5 * WIDTH)])
def test_kernels_are_transformed_as_by_a_matrix(threads, o, c, side):
    torch.manual_seed(0)
    kernel = torch.randn(o, c, 3, 3).contiguous(memory_format=torch.channels_last)
    turned = kernel.flip(2, 3).transpose(0, 1)
    for backwards, of in ((False, kernel), (True, turned)):
        rows, columns = of.shape[1], of.shape[0]
        found = _without_panels(transformed(kernel, side, backwards), rows, columns)
        expected = matrix(side).double() @ of.double().permute(2, 3, 1, 0).reshape(9, c * o)
        assert _off(found, expected.view(found.shape)) < 3e-7


@pytest.mark.parametrize("side", [2, 4])
@pytest.mark.parametrize("num_sums", [1, 3])
def test_sums_become_a_gradient_as_by_a_matrix(threads, side, num_sums):
    torch.manual_seed(0)
    o, c = 3 * WIDTH, 2 * WIDTH
    sums = torch.randn(num_sums, (side + 2) ** 2, apart(c * o))
    expected = matrix(side).double().t() @ sums[:, :, : c * o].double().sum(0)
    assert _off(gradient(sums, o, c, side), expected.view(3, 3, c, o).permute(3, 0, 1, 2)) < 3e-7


@pytest.mark.parametrize("num", [1, 2, 5, 33])
@pytest.mark.parametrize("output", [(3, 1), (5, 5), (8, 8), (14, 14), (56, 56)])
@pytest.mark.parametrize("channels", [16, 256])
def test_every_row_of_tiles_is_in_one_block(num, output, channels):
    high, wide = output
    tiling = tiling_of(Geometry((high, wide, channels), (high, wide, channels), (1, 1)), num)
    assert tiling.tiles[0] * tiling.side >= high
    assert tiling.tiles[1] * tiling.side >= wide
    rows = num * tiling.tiles[0]
    assert (tiling.num_blocks(num) - 1) * tiling.rows < rows <= tiling.num_blocks(num) * tiling.rows


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("size", [(8, 8), (9, 6), (11, 13), (12, 15)])
def test_results_are_those_of_float64_for_every_way_tiles_stick_out(threads, size, padding):
    image, kernel, bias = _drawn(5, 32, 16, *size)
    tensors = [tensor.requires_grad_() for tensor in (image, kernel, bias)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found, expected = WinogradConvolution.apply(*tensors, padding), torch.conv2d(*exact, padding=padding)
    grad = torch.randn(found.shape)
    assert _off(found, expected) < 4e-6
    of_all = torch.autograd.grad(found, tensors, grad), torch.autograd.grad(expected, exact, grad.double())
    assert all(_off(own, other) < 4e-6 for own, other in zip(*of_all, strict=True))


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
