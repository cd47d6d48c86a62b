"""Faster forms of modules give what the plain ones give, and leave no trace in a checkpoint."""

import copy
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from podium.engine import few_taps, pooled
from podium.engine.conv_pool import ConvPool
from podium.engine.operators import apply_layout, resolve_layout

# Weights of their own would differ from run to run, and once in a thousand two values of a window are so close that
# float32 and float64 choose differently.
torch.manual_seed(2)
CONVOLUTIONS = {
    "one channel": (nn.Conv2d(1, 8, 3), (5, 1, 12, 9)),
    "few channels": (nn.Conv2d(4, 6, (3, 2)), (3, 4, 8, 7)),
    "as a product": (nn.Conv2d(16, 24, 3), (4, 16, 9, 7)),
    "padded and strided": (nn.Conv2d(20, 8, 3, stride=2, padding=1), (2, 20, 11, 8)),
    "many channels, strided": (nn.Conv2d(128, 8, 3, stride=2, padding=1, bias=False), (2, 128, 7, 6)),
    "uneven": (nn.Conv2d(16, 8, (1, 5), stride=(1, 3), padding=(0, 2)), (2, 16, 4, 20)),
    "pointwise": (nn.Conv2d(32, 16, 1, bias=False), (2, 32, 6, 6)),
    "grouped": (nn.Conv2d(16, 16, 3, groups=4), (2, 16, 6, 6)),
    "dilated": (nn.Conv2d(16, 8, 3, dilation=2), (2, 16, 9, 9)),
    "same size": (nn.Conv2d(16, 8, 3, padding="same"), (2, 16, 6, 6)),
    "mirrored": (nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect"), (2, 16, 6, 6)),
    "one position": (nn.Conv2d(16, 8, 4), (3, 16, 4, 4)),
    "1-D": (nn.Conv1d(4, 30, 4), (3, 4, 50)),
    "1-D as a product": (nn.Conv1d(30, 9, 4, stride=2, padding=1), (3, 30, 21)),
    "1-D, one channel": (nn.Conv1d(1, 9, 4, bias=False), (3, 1, 21)),
}


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


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("wants_input", [True, False])
def test_a_convolution_and_its_gradients_are_those_of_torch(name, wants_input):
    plain, shape = CONVOLUTIONS[name]
    plain = copy.deepcopy(plain).double().float()
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    assert type(fast) is not type(plain)
    assert_alike(plain, fast, shape, wants_input)


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


#: modules, shape of what goes in, whether they run as one operator
BLOCKS = {
    "one channel": ([nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.ReLU()], (5, 1, 12, 9), True),
    "few channels": ([nn.Conv2d(3, 8, (3, 5)), nn.MaxPool2d((2, 3)), nn.ReLU()], (2, 3, 9, 14), True),
    "more channels": ([nn.Conv2d(20, 8, 3), nn.MaxPool2d(2), nn.ReLU()], (4, 20, 9, 7), True),
    "odd numbers": ([nn.Conv2d(9, 5, (2, 1)), nn.MaxPool2d((3, 2))], (3, 9, 11, 8), True),
    "more outputs than a vector": ([nn.Conv2d(2, 19, 3), nn.MaxPool2d(2), nn.ReLU()], (3, 2, 8, 8), True),
    "more taps than registers": ([nn.Conv2d(24, 4, 5), nn.MaxPool2d(2), nn.ReLU()], (2, 24, 9, 10), True),
    "large windows": ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(8), nn.ReLU()], (2, 2, 18, 19), True),
    "no bias": ([nn.Conv2d(12, 6, 3, bias=False), nn.MaxPool2d(2), nn.ReLU()], (3, 12, 8, 8), True),
    "no ReLU": ([nn.Conv2d(1, 6, 3, bias=False), nn.MaxPool2d(3)], (3, 1, 11, 8), True),
    "one sample": ([nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.ReLU()], (1, 1, 8, 8), True),
    "two blocks": (
        [nn.Conv2d(1, 12, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(12, 9, 3), nn.MaxPool2d(2), nn.ReLU()],
        (4, 1, 14, 15),
        True,
    ),
    "1-D": ([nn.Conv1d(4, 30, 4), nn.MaxPool1d(4), nn.ReLU()], (3, 4, 50), True),
    "1-D, two blocks": (
        [nn.Conv1d(4, 30, 4), nn.MaxPool1d(4), nn.ReLU(), nn.Conv1d(30, 7, 5, bias=False), nn.MaxPool1d(2)],
        (3, 4, 90),
        True,
    ),
    "another in between": ([nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2)], (2, 2, 8, 8), False),
    "strided": ([nn.Conv2d(2, 4, 3, stride=2), nn.MaxPool2d(2), nn.ReLU()], (2, 2, 11, 11), False),
    "padded": ([nn.Conv2d(16, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()], (2, 16, 8, 8), False),
    "1-D, padded": ([nn.Conv1d(4, 6, 3, padding=1), nn.MaxPool1d(2), nn.ReLU()], (2, 4, 20), False),
    "overlapping windows": ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, stride=2), nn.ReLU()], (2, 2, 11, 11), False),
    "rounded up": ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()], (2, 2, 7, 7), False),
    "no pool to speak of": ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(1), nn.ReLU()], (2, 2, 7, 7), False),
    "huge windows": ([nn.Conv2d(2, 4, 3), nn.MaxPool2d(9), nn.ReLU()], (2, 2, 20, 20), False),
    "heavy weights": ([nn.Conv2d(300, 200, 3), nn.MaxPool2d(2), nn.ReLU()], (1, 300, 4, 4), False),
}


@pytest.fixture
def num_fused(monkeypatch) -> list[None]:
    calls: list[None] = []
    apply = ConvPool.apply
    monkeypatch.setattr(ConvPool, "apply", lambda *args: calls.append(None) or apply(*args))
    return calls


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("wants_input", [True, False])
def test_a_block_and_its_gradients_are_those_of_torch(name, wants_input, num_fused):
    modules, shape, fits = BLOCKS[name]
    plain = nn.Sequential(*copy.deepcopy(modules))
    fast = copy.deepcopy(plain)
    apply_layout(fast, "channels_last")
    assert_alike(plain, fast, shape, wants_input)
    assert bool(num_fused) == fits


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_block_is_cut_into_as_many_pieces_as_there_are_threads(threads, monkeypatch):
    monkeypatch.setattr("podium.engine.conv_pool._PIECE_BYTES", 6 * 6 * 5 * 4 * 2)  # two samples of the forward pass
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
    [((28, 28, 1), (3, 3), 32, (2, 2)), ((1, 50, 4), (1, 4), 30, (1, 4)), ((9, 8, 2), (2, 2), 8, (2, 3))],
)
def test_few_taps_give_the_bits_of_lists(threads, image, kernel, num_out, window):
    geometry = pooled.geometry_of(image, kernel, num_out, window, True)
    assert few_taps.fits(geometry)
    torch.manual_seed(0)
    images = torch.randn(5, *image)
    grad = torch.randn(5, *geometry.pooled, num_out)
    chosen = torch.randint(-1, geometry.window_area, grad.shape).remainder(256).to(torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        of_taps, of_bias = few_taps.gradients(geometry, images, chosen, grad)
        _, *expected = pooled.gradients(geometry, images, torch.zeros(of_taps.shape), chosen, grad, False)
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


def test_a_block_somebody_looks_into_runs_module_by_module(num_fused):
    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU())
    apply_layout(block, "channels_last")
    image = torch.rand(2, 1, 8, 8)
    assert block(image).shape == (2, 4, 3, 3)
    assert len(num_fused) == 1
    with torch.no_grad():  # validation: torch's own
        block(image)
    seen = []
    block[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    block(image)
    assert seen == [(2, 4, 3, 3)]
    assert len(num_fused) == 1


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


def test_auto_depends_on_the_kind_of_device_alone():
    assert resolve_layout("auto", torch.device("cpu")) == "channels_last"
    assert resolve_layout("auto", torch.device("cuda")) == "default"
    assert resolve_layout("default", torch.device("cpu")) == "default"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such settings")
def test_freed_memory_stays_with_the_process():
    script = """
import resource, torch
from podium.engine.allocator import keep_memory
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
