"""Convolutions that halve volumes, and transposed ones that double them: torch's results, by matrix products."""

import pytest
import torch
from torch import Tensor, nn

from podium.kernels.conv import conv3d_stride2
from podium.kernels.install import apply_layout

#: (channels of the fine volume, of the coarse one, size of the fine one)
CASES = {
    "single position": (16, 24, (2, 2, 2)),
    "few channels": (4, 16, (8, 6, 4)),
    "odd": (5, 6, (9, 8, 7)),
    "tiles": (32, 32, (16, 16, 16)),
    "odd tiles": (48, 32, (16, 17, 18)),
}
Results = list[Tensor]


def build(case: str, kind: str) -> tuple[nn.Module, Tensor]:
    """A module of torch and an image for it."""
    torch.manual_seed(0)
    c, o, size = CASES[case]
    if kind == "halving":
        return nn.Conv3d(c, o, 4, 2, 1), torch.randn(2, c, *size)
    more = tuple(axis % 2 for axis in size)
    module = nn.ConvTranspose3d(o, c, 4, 2, 1, output_padding=more)
    return module, torch.randn(2, o, *(axis // 2 for axis in size))


def run(module: nn.Module, image: Tensor) -> Results:
    """Output, and the gradients of image, weight and bias."""
    image = image.clone().requires_grad_()
    module.zero_grad()
    output = module(image)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    (output * weights).sum().backward()
    assert image.grad is not None
    return [output.detach(), image.grad, *(param.grad.clone() for param in module.parameters())]


def errors(found: Results, exact: Results) -> list[float]:
    return [((a - b).square().mean() / b.square().mean()).sqrt().item() for a, b in zip(found, exact, strict=True)]


def faster(module: nn.Module) -> nn.Module:
    model = nn.ModuleList([module])
    apply_layout(model, "channels_last")
    return model[0]


def test_patches_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("halving", "doubling"):
        module, image = build("odd", kind)
        whole = run(faster(module), image)
        monkeypatch.setattr(conv3d_stride2, "PATCH_BYTES", 1)
        assert max(errors(run(module, image), whole)) < 1e-6
        monkeypatch.undo()


def test_tiles_are_for_large_volumes_of_many_channels() -> None:
    used = {
        case: conv3d_stride2.by_tiles(c, o, tuple(axis // 2 for axis in size)) for case, (c, o, size) in CASES.items()
    }
    assert [case for case, by_tiles in used.items() if by_tiles] == ["tiles", "odd tiles"]


def test_weights_keep_names_shapes_and_values() -> None:
    module, _ = build("tiles", "halving")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    after = faster(module).state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_gradients_lie_in_memory_as_their_weights_do() -> None:
    for kind in ("halving", "doubling"):
        for case in CASES:
            module, image = build(case, kind)
            module = faster(module)
            module(image).sum().backward()
            assert module.weight.grad.stride() == module.weight.stride()


def test_activations_may_write_over_a_result() -> None:
    module, image = build("few channels", "halving")
    plain = nn.Sequential(module, nn.LeakyReLU(0.2))
    expected = run(plain, image)
    written = nn.Sequential(faster(module), nn.LeakyReLU(0.2, inplace=True))
    assert max(errors(run(written, image), expected)) < 1e-6


def test_no_gradient_of_an_image_that_needs_none() -> None:
    module, image = build("few channels", "halving")
    module = faster(module)
    module(image).sum().backward()
    assert image.grad is None
    assert module.weight.grad is not None


def test_samples_that_torch_refuses_are_refused() -> None:
    module, _ = build("few channels", "halving")
    with pytest.raises(RuntimeError, match="channels"):
        faster(module)(torch.randn(2, 3, 8, 8, 8))
