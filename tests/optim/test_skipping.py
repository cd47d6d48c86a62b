"""A step that is not to be made is left out on the device, by a number that the host does not read."""

import pytest
import torch
from torch import nn

from podium.contract import by_dimension
from podium.optim import optimisers, steps
from podium.optim.optimisers import Optimiser, build_optimiser, step
from podium.optim.state_tensors import state_tensors
from podium.optim.stochastic_rounding import StochasticRounding
from podium.recipe.sections.optim import KEYS, OptimSection

_OVERFLOWN, _FINE = torch.ones(()), torch.zeros(())


def trained(name: str, dtype: torch.dtype, *, found: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return copies of weights and state after a step for every entry of `found`; overflown gradients are not
    finite."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.Conv2d(2, 3, 3)).to(dtype)
    model[1].to(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0].weight[0, :3] = torch.tensor([0.0, -0.0, 6e-8])
    optimiser = build_optimiser(OptimSection(name=name, lr=0.1, weight_decay=0.01), model, by_dimension(model))
    rounding = StochasticRounding(7) if dtype != torch.float32 else None
    for update, found_inf in enumerate(found):
        generator = torch.Generator().manual_seed(update)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            if found_inf is _OVERFLOWN:
                param.grad[0] = torch.inf
        if rounding is not None:
            rounding.begin(update)
        step(optimiser, 3.0, None, rounding, found_inf)
    return {name: tensor.clone() for name, tensor in {**model.state_dict(), **state_tensors(optimiser)}.items()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else repr(tensor.item())
            for name, tensor in tensors.items()}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KEYS)
def test_an_overflow_leaves_weights_and_state_to_the_bit(name, dtype):
    for made in ([], [_FINE, _FINE]):
        assert bits(trained(name, dtype, found=[*made, _OVERFLOWN])) == bits(trained(name, dtype, found=made))


@pytest.mark.parametrize("name", KEYS)
def test_without_an_overflow_a_step_is_the_usual_one(name):
    assert bits(trained(name, torch.float32, found=[_FINE] * 3)) == bits(trained(name, torch.float32, found=[None] * 3))


def test_only_optimisers_of_lists_ask_the_host():
    model = nn.Linear(2, 2)
    asking = {
        name for name in KEYS
        if not Optimiser(OptimSection(name=name, lr=0.1), [], {}, set(dict(model.named_parameters()))).can_skip
    }  # fmt: skip
    assert asking == {"rmsprop", "rmsprop_tf"}


@pytest.mark.parametrize("name", KEYS)
def test_where_fused_kernels_ignore_the_divisor_gradients_are_divided_before(name, monkeypatch):
    """As on MPS, whose kernels take `grad_scale` and `found_inf` and do nothing with them."""
    usual = trained(name, torch.float32, found=[None] * 3)
    sgd, adamw, adam = torch._fused_sgd_, torch._fused_adamw_, torch._fused_adam_
    for kind, kernel in {"sgd": sgd, "adamw": adamw, "adam": adam}.items():

        def ignoring(*args, kernel=kernel, grad_scale=None, found_inf=None, **options):
            kernel(*args, **options)

        monkeypatch.setattr(torch, f"_fused_{kind}_", ignoring)
    for module in (steps, optimisers):
        monkeypatch.setattr(module, "IGNORING", ("cpu",))
    divided = trained(name, torch.float32, found=[None] * 3)
    for key, tensor in usual.items():
        torch.testing.assert_close(divided[key], tensor, rtol=1e-6, atol=1e-7)
    if name != "lars":  # which divides by itself
        assert bits(trained(name, torch.float32, found=[_FINE, _OVERFLOWN])) == bits(
            trained(name, torch.float32, found=[_FINE])
        )
