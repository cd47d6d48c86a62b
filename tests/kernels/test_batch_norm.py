"""Our batch norm, beyond what `test_registry.py` shows of all kernels: statistics, bits, and what it runs with."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from podium.contract import Loss
from podium.engine.replay import Recorded
from podium.kernels import registry
from podium.kernels.install import apply_layout
from podium.kernels.jit.llvm import WIDTH
from podium.kernels.norm.batch_norm import BatchNorm, BatchNorm2d, fits
from podium.layers.residual import ResidualBlock
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.precision import apply_precision
from podium.transforms.recompute import apply_recompute


@pytest.fixture(autouse=True)
def _as_installed() -> Iterator[None]:
    registry.use("auto")
    yield
    registry.use("auto")


def images(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def installed(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    apply_layout(norm, "channels_last")
    assert type(norm) is BatchNorm2d
    return norm


@pytest.mark.parametrize("momentum", [0.1, 0.01, 1.0, 0.0])
def test_running_statistics_are_those_of_torch(momentum):
    torch.manual_seed(0)
    plain, fast = (nn.BatchNorm2d(32, momentum=momentum) for _ in range(2))
    installed(fast)
    for _ in range(3):
        x = images(12, 32, 20, 20) * 3 + 2
        plain(x)
        fast(x)
    assert int(fast.num_batches_tracked) == int(plain.num_batches_tracked) == 3
    torch.testing.assert_close(fast.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    x, added, grad = (images(16, 2 * WIDTH, 24, 25) for _ in range(3))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norm = nn.BatchNorm2d(2 * WIDTH)
            inputs = [part.clone().requires_grad_() for part in (x, added)]
            y = BatchNorm.apply(inputs[0], norm.weight, norm.bias, inputs[1], norm, True)
            y.backward(grad)
            results.append([y, inputs[0].grad, inputs[1].grad, norm.weight.grad, norm.bias.grad, norm.running_var])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_values_far_from_the_others_cost_about_as_much_precision_as_with_torch():
    torch.manual_seed(0)
    x = images(12, WIDTH, 40, 41)
    x[0, :, 0, :8] = 1000.0
    exact = nn.BatchNorm2d(WIDTH).double()(x.double())
    errors = [
        float((norm(x).double() - exact).detach().abs().max())
        for norm in (installed(nn.BatchNorm2d(WIDTH)), nn.BatchNorm2d(WIDTH))
    ]
    assert errors[0] <= 2 * errors[1], errors


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


@pytest.mark.parametrize("batch", [32, 1])  # the smaller one is left to torch
def test_networks_give_the_same_with_and_without(batch, monkeypatch):
    plain, fast = blocks(), blocks()
    apply_layout(fast, "channels_last")
    image = torch.randn(batch, 3, 24, 24)
    calls: list[None] = []
    run = BatchNorm.apply
    monkeypatch.setattr(BatchNorm, "apply", lambda *args: calls.append(None) or run(*args))
    for model in (plain, fast):
        model(image).square().mean().backward()
    assert len(calls) == (5 if batch > 1 else 0)
    for (name, own), other in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-3, atol=1e-5, msg=name)
    for own, other in zip(fast.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    for model in (plain, fast):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(image), plain(image), rtol=1e-4, atol=1e-4)


def test_a_frozen_norm_passes_gradients_on():
    torch.manual_seed(0)
    plain, fast = nn.BatchNorm2d(32), installed(nn.BatchNorm2d(32))
    x, grad = images(12, 32, 20, 20), images(12, 32, 20, 20)
    found = []
    for norm in (plain, fast):
        norm.requires_grad_(False)
        given = x.clone().requires_grad_()
        norm(given).backward(grad)
        found.append(given.grad)
        assert norm.weight.grad is None
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_what_it_is_not_for_is_left_to_torch():
    x = images(64, 16, 16, 16)
    assert fits(installed(nn.BatchNorm2d(16)), x)
    assert not fits(installed(nn.BatchNorm2d(16)).eval(), x)
    assert not fits(nn.BatchNorm2d(16), x)
    with pytest.raises(ValueError, match="more than 1 value"):
        installed(nn.BatchNorm2d(1 << 16))(images(1, 1 << 16, 1, 1))


def test_half_precision_weights_keep_statistics_in_single_precision():
    norm = nn.Sequential(nn.BatchNorm2d(32))
    apply_layout(norm, "channels_last")
    apply_precision(PrecisionSection(mode="16.16"), norm)
    out = norm(images(12, 32, 20, 20))
    assert out.dtype == norm[0].running_mean.dtype == torch.float32
    assert norm[0].weight.dtype != torch.float32


def test_recorded_passes_are_replayed_with_the_same_bits():
    """Statistics move in a replayed pass, too."""
    torch.manual_seed(0)
    models = [installed_network() for _ in range(2)]
    batches = [{"x": images(32, 16, 18, 18)} for _ in range(4)]

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        return Loss(model(batch["x"]).square().sum(), 1)

    recorded = Recorded(batches[0], list(models[0].parameters()))
    recorded.record_backward(recorded.record_forward(lambda batch: loss(models[0], batch)).sum.backward)
    assert recorded.is_whole
    for number, batch in enumerate(batches):
        if number:
            recorded.forward(batch)
            recorded.backward()
        models[1].zero_grad()
        loss(models[1], batch).sum.backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other)


def test_activations_computed_again_change_no_bit():
    torch.manual_seed(0)
    x = images(32, 16, 18, 18)
    plain, again = installed_network(), installed_network()
    apply_recompute([again[0]])
    for model in (plain, again):
        model(x.clone().requires_grad_()).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other)


def test_modules_give_the_same_bits_one_by_one():
    """A hook on any of them leaves the sum and ReLU to torch."""
    torch.manual_seed(0)
    x = images(32, 16, 18, 18)
    together, single = installed_network(), installed_network()
    for module in single.modules():
        module.register_forward_hook(lambda _module, _inputs, _output: None)
    found = []
    for model in (together, single):
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(param.grad for param in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def installed_network() -> nn.Sequential:
    torch.manual_seed(0)
    branch = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.BatchNorm2d(16))
    model = nn.Sequential(ResidualBlock(branch, nn.Identity()), nn.BatchNorm2d(16))
    apply_layout(model, "channels_last")
    return model
