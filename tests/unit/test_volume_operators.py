"""Convolutions that halve volumes, and transposed ones that double them: torch's results, by matrix products."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from podium.engine import volumes
from podium.engine.operators import apply_layout

#: (channels of the fine volume, of the coarse one, size of the fine one)
CASES = {
    "single position": (16, 24, (2, 2, 2)),
    "few channels": (4, 16, (8, 6, 4)),
    "odd": (5, 6, (9, 8, 7)),
    "tiles": (32, 32, (16, 16, 16)),
    "odd tiles": (40, 32, (16, 17, 18)),
}
Results = list[Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("kind", ["halving", "doubling"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case.endswith("tiles") else []) for case in CASES]
)
def test_results_are_as_exact_as_torchs(case: str, kind: str, threads: int) -> None:
    module, image = build(case, kind)
    of_torch = run(module, image)
    exact = run(module.double(), image.double())
    found = run(faster(module.float()), image)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in of_torch]
    # Which of the results torch is most exact in differs from library to library.
    assert max(errors(found, exact)) <= 2 * max(errors(of_torch, exact))


@pytest.mark.parametrize("kind", ["halving", "doubling"])
@pytest.mark.parametrize("case", ["few channels", "tiles"])
def test_the_same_bits_every_time(case: str, kind: str, threads: int) -> None:
    module, image = build(case, kind)
    module = faster(module)
    first, second = run(module, image), run(module, image)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_patches_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("halving", "doubling"):
        module, image = build("odd", kind)
        whole = run(faster(module), image)
        monkeypatch.setattr(volumes, "_PATCH_BYTES", 1)
        assert max(errors(run(module, image), whole)) < 1e-6
        monkeypatch.undo()


def test_tiles_are_for_large_volumes_of_many_channels() -> None:
    used = {case: volumes.by_tiles(c, o, tuple(axis // 2 for axis in size)) for case, (c, o, size) in CASES.items()}
    assert [case for case, by_tiles in used.items() if by_tiles] == ["tiles", "odd tiles"]


def test_whatever_lies_around_a_result_stays(threads: int) -> None:
    """Tiles and patches at the border reach beyond the volume: nothing is read from there, or written to it."""
    for case, kind in itertools.product(("odd", "odd tiles"), ("halving", "doubling")):
        c, o, size = CASES[case]
        coarse_size = tuple(axis // 2 for axis in size)
        fine, coarse = torch.full((4, *size, c), torch.nan), torch.full((4, *coarse_size, o), torch.nan)
        source, result = (fine, coarse) if kind == "halving" else (coarse, fine)
        source[1:3] = 1.0
        kernel = torch.ones(*volumes.KERNEL, c, o)
        points = volumes.points_of(kernel) if volumes.by_tiles(c, o, coarse_size) else None
        (volumes.halved if kind == "halving" else volumes.doubled)(source[1:3], kernel, points, None, result[1:3])
        assert result[1:3].isfinite().all()
        assert result[0].isnan().all()
        assert result[3].isnan().all()


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


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv3d(4, 4, 3, 2, 1),
        nn.Conv3d(4, 4, 4, 2, 1, groups=2),
        nn.Conv3d(4, 4, 4, 2, 1, padding_mode="circular"),
        nn.Conv3d(4, 4, 4, 2, 1, dilation=2),
        nn.ConvTranspose3d(4, 4, 4, 4, 1),
    ],
    ids=["kernel", "groups", "padding", "dilation", "stride"],
)
def test_other_convolutions_are_left_to_torch(other: nn.Module) -> None:
    image = torch.randn(2, 4, 8, 8, 8)
    expected = run(other, image)
    assert all(torch.equal(a, b) for a, b in zip(run(faster(other), image), expected, strict=True))


def test_other_numbers_are_left_to_torch() -> None:
    module, image = build("few channels", "halving")
    exact = run(module.double(), image.double())
    assert max(errors(run(faster(module), image.double()), exact)) < 1e-14
    with torch.autocast("cpu", torch.bfloat16):
        assert module.float()(image).dtype == torch.bfloat16


def test_samples_that_torch_refuses_are_refused() -> None:
    module, _ = build("few channels", "halving")
    with pytest.raises(RuntimeError, match="channels"):
        faster(module)(torch.randn(2, 3, 8, 8, 8))
