"""Faster forms of modules give what the plain ones give, and leave no trace in a checkpoint."""

import copy
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from podium.kernels import registry
from podium.kernels.conv import conv_pool_grad_dense, conv_pool_loops
from podium.kernels.install import apply_layout, resolve_layout


def assert_alike(plain: nn.Module, fast: nn.Module, shape: tuple[int, ...], wants_input: bool) -> None:
    """Values and gradients of `fast` are those of `plain` in float64."""
    torch.manual_seed(3)
    image = torch.randn(shape)
    grads = []
    for module in (copy.deepcopy(plain).double(), fast):
        x = image.to(next(module.parameters()).dtype).requires_grad_(wants_input)
        y = module(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        grads.append([y, *(p.grad for p in module.parameters()), *([x.grad] if wants_input else [])])
    for want, got in zip(*grads, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "pool", [nn.MaxPool1d(4), nn.MaxPool1d(3, stride=2, padding=1), nn.MaxPool1d(2, ceil_mode=True)]
)
def test_a_pool_and_its_gradient_are_those_of_torch_to_the_bit(pool):
    fast = copy.deepcopy(pool)
    apply_layout(fast, "channels_last")
    results = []
    for module in (pool, fast):
        x = torch.arange(3 * 5 * 21).remainder(17).float().view(3, 5, 21).requires_grad_()  # with ties
        y = module(x)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        results.append((y, x.grad))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_block_is_cut_into_as_many_pieces_as_there_are_threads(threads, monkeypatch):
    monkeypatch.setattr(
        "podium.kernels.conv.conv_pool.PIECE_BYTES", 6 * 6 * 5 * 4 * 2
    )  # two samples of the forward pass
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2), nn.ReLU())
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_alike(plain, fast, (7, 3, 8, 8), wants_input=True)
        bits = []
        for _ in range(5):
            image = torch.rand(torch.Size((7, 3, 8, 8)), generator=torch.Generator().manual_seed(5))
            fast.zero_grad()
            fast(image).square().sum().backward()
            bits.append(torch.cat([p.grad.flatten() for p in fast.parameters()]))
        assert all(torch.equal(bits[0], again) for again in bits)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("image", "kernel", "num_out", "window"),
    [((28, 28, 1), (3, 3), 32, (2, 2)), ((1, 50, 4), (1, 4), 30, (1, 4)), ((9, 8, 2), (2, 2), 16, (2, 3))],
)
def test_few_taps_give_the_bits_of_lists(threads, image, kernel, num_out, window):
    geometry = conv_pool_loops.geometry_of(image, kernel, num_out, window, True)
    assert conv_pool_grad_dense.fits(geometry)
    torch.manual_seed(0)
    images = torch.randn(5, *image)
    grad = torch.randn(5, *geometry.pooled, num_out)
    chosen = torch.randint(-1, geometry.window_area, grad.shape).remainder(256).to(torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        of_taps, of_bias = conv_pool_grad_dense.gradients(geometry, images, chosen, grad)
        _, *expected = conv_pool_loops.gradients(geometry, images, torch.zeros(of_taps.shape), chosen, grad, False)
    finally:
        torch.set_num_threads(before)
    assert of_taps.any()
    assert torch.equal(of_taps, expected[0])
    assert torch.equal(of_bias, expected[1])


@pytest.mark.parametrize("values", ["equal", "negative", "not a number"])
def test_a_block_chooses_as_torch_does(values):
    """With equal values the first one of a window gets the gradient; what is not a number stays visible."""
    plain = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2), nn.ReLU())
    with torch.no_grad():
        plain[0].weight.fill_(1.0)
        plain[0].bias.zero_()
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    image = torch.arange(64).remainder(3).float().view(1, 1, 8, 8)
    if values == "negative":
        image = image - 1.5
    if values == "not a number":
        image[0, 0, 2, 3] = image[0, 0, 4, 4] = image[0, 0, 5, 4] = torch.nan
    results = []
    for module in (plain, fast):
        x = image.clone().requires_grad_()
        y = module(x)
        y.backward(torch.arange(16).view(1, 1, 4, 4) + 1.0)
        results.append((y, x.grad, module[0].bias.grad))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_layout_changes_neither_names_nor_shapes_nor_values():
    plain = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Conv2d(2, 5, 3), nn.Conv3d(1, 2, 2), nn.Linear(3, 2))
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    for (name, want), (fast_name, got) in zip(plain.state_dict().items(), fast.state_dict().items(), strict=True):
        assert name == fast_name
        assert torch.equal(want, got)
    fast.load_state_dict(plain.state_dict())
    assert [p.stride() for p in fast.parameters()] != [p.stride() for p in plain.parameters()]


def test_the_default_layout_leaves_a_model_alone():
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.MaxPool1d(2))
    apply_layout(model, "default")
    assert type(model[0]) is nn.Conv1d


def test_auto_depends_on_the_kind_of_device_and_of_arithmetic():
    for half in (False, True):
        assert resolve_layout("auto", torch.device("cpu"), half) == "channels_last"
        assert resolve_layout("auto", torch.device("cuda"), half) == ("channels_last" if half else "default")
        assert resolve_layout("auto", torch.device("xpu"), half) == "default"
        assert resolve_layout("default", torch.device("cpu"), half) == "default"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such settings")
@pytest.mark.slow
def test_freed_memory_stays_with_the_process():
    script = """
import resource, torch
from podium.machine.allocator import keep_memory
assert keep_memory()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(40 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)  # the heap finds its shape
print(faults(10))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1000  # 40 MB are 10,240 pages


@pytest.mark.parametrize(("num_threads", "samples", "taken"), [(1, 5, True), (1, 16, False), (2, 5, False)])
@pytest.mark.parametrize("bias", [True, False])
def test_small_convolutions_of_single_positions_are_products_on_one_thread(num_threads, samples, taken, bias):
    """Where torch leaves them to MKL instead of oneDNN."""
    before = torch.get_num_threads()
    registry.use(["products"])
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(48, 33, 1, bias=bias))
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    image = torch.randn(samples, 48, 19, 21)
    try:
        torch.set_num_threads(num_threads)
        output = fast(image.requires_grad_())
        assert (output.grad_fn.name() == "PointwiseConvolutionBackward") == taken
        output.square().sum().backward()
    finally:
        torch.set_num_threads(before)
        registry.use("auto")
    found = [output.detach(), image.grad, *(param.grad for param in fast.parameters())]
    exact, given = plain.double(), image.detach().double().requires_grad_()
    result = exact(given)
    result.square().sum().backward()
    for own, other in zip(
        found, [result.detach(), given.grad, *(param.grad for param in exact.parameters())], strict=True
    ):
        assert float((own - other).abs().max()) <= 4e-6 * float(other.abs().max())
