"""Optimisers do what their formulas and torch say, from summed gradients, and their state survives a checkpoint."""

import itertools
import math

import numpy as np
import pytest
import torch
from bench.optimisers import PAPERS
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor, nn

from podium.contract import ParamGroup, by_dimension
from podium.errors import UserError
from podium.optim.optimisers import Optimiser, build_optimiser, clip_divisor, step
from podium.optim.state_tensors import load_state_tensors, state_tensors
from podium.optim.steps import norms_of
from podium.recipe.sections.optim import OptimSection

COUNT = 24.0

#: recipe keys -> torch's optimiser of the same meaning
CASES = {
    "sgd": ({}, lambda groups: torch.optim.SGD(groups)),
    "momentum": ({"momentum": 0.8}, lambda groups: torch.optim.SGD(groups, momentum=0.8)),
    "nesterov": ({}, lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True)),
    "rmsprop": (
        {"momentum": 0.7, "decay": 0.95, "eps": 1e-3},
        lambda groups: torch.optim.RMSprop(groups, momentum=0.7, alpha=0.95, eps=1e-3),
    ),
    "adam": ({"betas": (0.8, 0.99)}, lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.99))),
    "adamw": ({"eps": 1e-6}, lambda groups: torch.optim.AdamW(groups, eps=1e-6)),
}
#: the others, with keys of their own
MORE_KEYS = {
    "rmsprop_tf": {"decay": 0.953125},
    "lars": {"eeta": 0.02, "eps": 0.0, "momentum": 0.7},
    "lamb": {"betas": (0.8, 0.99), "bias_correction": False},
}
NAMES = [*CASES, *MORE_KEYS]


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 7)).to(dtype)


def optimiser_of(model: nn.Module, name: str, **keys) -> Optimiser:
    return build_optimiser(OptimSection(name=name, **{"lr": 0.01, **keys}), model, by_dimension(model))


def set_gradients(model: nn.Module, update: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(update)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * factor


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_steps_from_summed_gradients_equal_torch_on_the_mean(name, weight_decay):
    keys, make = CASES[name]
    model, reference = small_model(), small_model()
    ours = optimiser_of(model, name, weight_decay=weight_decay, **keys)
    theirs = make(
        [
            {"params": [p for p in reference.parameters() if p.dim() > 1], "lr": 0.01, "weight_decay": weight_decay},
            {"params": [p for p in reference.parameters() if p.dim() == 1], "lr": 0.01, "weight_decay": 0.0},
        ]
    )
    for update in range(6):
        set_gradients(model, update, factor=COUNT)
        set_gradients(reference, update)
        step(ours, torch.tensor(COUNT))
        theirs.step()
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_tf_follows_its_formula(momentum):
    model = small_model()
    decay, eps, lr, weight_decay = 0.953125, 1e-3, 0.02, 0.01
    ours = optimiser_of(model, "rmsprop_tf", momentum=momentum, decay=decay, eps=eps, weight_decay=weight_decay)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    squares = {name: torch.ones_like(param) for name, param in params.items()}
    buffers = {name: torch.zeros_like(param) for name, param in params.items()}
    for update in range(5):
        set_gradients(model, update, factor=COUNT)
        for name, param in params.items():
            grad = model.get_parameter(name).grad / COUNT + (weight_decay * param if param.dim() > 1 else 0)
            squares[name] = squares[name] + (1 - decay) * (grad**2 - squares[name])
            buffers[name] = momentum * buffers[name] + lr * grad / torch.sqrt(squares[name] + eps)
            params[name] = param - buffers[name]
        step(ours, torch.tensor(COUNT), lr=lr)
        for name, param in params.items():
            torch.testing.assert_close(model.get_parameter(name).detach(), param, rtol=1e-12, atol=1e-13)


WEIGHTS = frozenset({"0.weight", "3.weight"})
PAPER_CASES = [
    *(("lars", {"momentum": m, "weight_decay": d}) for m in (0.0, 0.9) for d in (0.0, 0.1)),
    ("lars", {"eeta": 0.5, "weight_decay": 0.2, "eps": 0.1}),
    *(("lamb", {"bias_correction": b, "weight_decay": d}) for b in (True, False) for d in (0.0, 0.1)),
    ("lamb", {"betas": (0.8, 0.97), "eps": 1e-3}),
]


def assert_follows_the_paper(model: nn.Module, name: str, keys: dict, adapted=WEIGHTS, change=None) -> None:
    """Six updates with changing rates; after each, every parameter is the formula's within 1e-6 of its size (float64:
    1e-12). `adapted` parameters take decay and trust ratio; `change(model)` comes after the gradients were set."""
    ours = optimiser_of(model, name, **keys)
    formula, num_arrays = PAPERS[name]
    options = {key: value for key, value in keys.items() if key not in ("decay_all", "no_decay")}
    values = {key: param.detach().double().numpy().copy() for key, param in model.named_parameters()}
    state = {key: [np.zeros_like(value)] * num_arrays for key, value in values.items()}
    for update in range(6):
        lr = 0.1 / (update + 1)
        set_gradients(model, update, factor=COUNT)
        if change is not None:
            change(model)
        for key, param in model.named_parameters():
            grad = param.grad.double().numpy() / COUNT
            values[key], state[key] = formula(
                values[key], grad, state[key], update + 1, lr=lr, adapt=key in adapted, **options
            )
        step(ours, torch.tensor(COUNT), lr=lr)
        for key, param in model.named_parameters():
            rtol = 1e-12 if param.dtype == torch.float64 else 1e-6
            np.testing.assert_allclose(
                param.detach().double().numpy(), values[key], rtol=0, atol=rtol * np.abs(values[key]).max(), err_msg=key
            )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "keys"), PAPER_CASES, ids=str)
def test_lars_and_lamb_follow_their_papers(name, keys, dtype, layout):
    """`set_gradients` makes contiguous ones, whatever the weight's layout."""
    assert_follows_the_paper(small_model(dtype).to(memory_format=layout), name, keys)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize(
    ("keys", "adapted"),
    [
        ({"no_decay": ["3.*"]}, {"0.weight"}),
        ({"decay_all": True}, {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}),
        ({"decay_all": True, "no_decay": ["*.bias"]}, {"0.weight", "1.weight", "3.weight"}),
    ],
    ids=["no_decay", "decay_all", "both"],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_parameters_without_weight_decay_take_no_trust_ratio_either(name, keys, adapted, weight_decay):
    """With weight_decay 0, all others do."""
    assert_follows_the_paper(small_model(), name, {"weight_decay": weight_decay, **keys}, adapted)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_trust_ratio_is_one_where_weights_or_gradients_are_zero(name, weight_decay, dtype):
    model = small_model(dtype)
    nn.init.zeros_(model[3].weight)
    before = model[0].weight.detach().clone()
    keys = {"weight_decay": weight_decay}
    assert_follows_the_paper(model, name, keys, change=lambda model: model[0].weight.grad.zero_())
    assert torch.equal(model[0].weight, before) == (weight_decay == 0)
    assert weights(model).isfinite().all()
    nn.init.zeros_(model[0].weight)
    assert_follows_the_paper(model, name, keys, change=lambda model: model[0].weight.grad.zero_())
    assert not model[0].weight.any()


@pytest.mark.parametrize("name", PAPERS)
def test_a_gradient_that_is_not_finite_is_not_hidden_by_the_trust_ratio(name):
    for bad in (float("nan"), float("inf")):
        model = small_model(torch.float32)
        ours = optimiser_of(model, name)
        set_gradients(model, 0)
        model[0].weight.grad[0, 0, 0, 0] = bad
        step(ours, COUNT)
        assert not model[0].weight.isfinite().all()


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("decay_all", [True, False])
def test_the_trust_ratio_makes_no_host_wait_for_a_value(name, decay_all, monkeypatch):
    """On a device whose tensors have no values, so that asking for one is an error."""
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **keys: None)  # torch has none for this device
    model = small_model().to("meta")
    ours = optimiser_of(model, name, weight_decay=0.1, decay_all=decay_all)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    step(ours, torch.empty((), device="meta"))


@pytest.mark.parametrize("name", PAPERS)
def test_half_precision_steps_are_near_those_of_single_precision(name):
    models = [small_model(torch.float32).bfloat16(), small_model(torch.float32).bfloat16().float()]
    before = weights(models[1])
    for model in models:
        ours = optimiser_of(model, name, lr=0.5, **({"eeta": 0.5} if name == "lars" else {}))
        set_gradients(model, 0)
        step(ours, COUNT)
    moved = (weights(models[1]) - before).norm()
    assert (weights(models[0]).float() - weights(models[1])).norm() < 0.02 * moved


@pytest.mark.parametrize("name", NAMES)
def test_float32_steps_repeat_to_the_bit_for_a_number_or_a_tensor(name):
    results = []
    for divisor in (COUNT, COUNT, torch.tensor(COUNT)):
        model = small_model(torch.float32)
        ours = optimiser_of(model, name)
        for update in range(5):
            set_gradients(model, update, factor=COUNT)
            step(ours, divisor, lr=0.01 / (update + 1))
        results.append(weights(model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
def test_dividing_in_the_kernel_is_dividing_first_within_rounding(name):
    inside, before = small_model(torch.float32), small_model(torch.float32)
    ours, reference = optimiser_of(inside, name), optimiser_of(before, name)
    for update in range(5):
        set_gradients(inside, update, factor=COUNT)
        set_gradients(before, update, factor=COUNT)
        for param in before.parameters():
            param.grad /= COUNT
        step(ours, torch.tensor(COUNT))
        step(reference, 1.0)
    torch.testing.assert_close(weights(inside), weights(before), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_another_memory_layout_give_the_same_step(name):
    """A channels-last weight whose gradient is a view of a flat buffer; torch's fused CPU kernels mix these up."""
    plain, last = small_model(), small_model().to(memory_format=torch.channels_last)
    assert last[0].weight.stride() != plain[0].weight.stride()
    both = [optimiser_of(plain, name), optimiser_of(last, name)]
    for update in range(3):
        for model, ours in zip((plain, last), both, strict=True):
            set_gradients(model, update)
            step(ours, 2.0)
    for one, other in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-13, atol=1e-14)
    state = state_tensors(both[1])
    for key, tensor in state_tensors(both[0]).items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_a_gradient_stay_as_they_are(name):
    model = small_model()
    ours = optimiser_of(model, name, weight_decay=0.1)
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    set_gradients(model, 0)
    model[3].weight.grad = None
    step(ours, 1.0)
    for key, param in model.named_parameters():
        assert torch.equal(param, before[key]) == (key == "3.weight")
    model.zero_grad(set_to_none=True)
    step(ours, 1.0)


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].weight.requires_grad_(False)
    ours = optimiser_of(model, "adamw")
    assert "exp_avg/0.weight" not in state_tensors(ours)
    assert sum(len(group["params"]) for group in ours.param_groups) == 5


def decay_by_name(model: nn.Module, **keys) -> dict[str, float]:
    ours = optimiser_of(model, "sgd", weight_decay=0.1, **keys)
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: group["weight_decay"] for group in ours.param_groups for param in group["params"]}


def test_weight_decay_exclusions():
    model = small_model()
    weight_names = {"0.weight", "3.weight"}
    assert {name for name, decay in decay_by_name(model).items() if decay} == weight_names
    assert set(decay_by_name(model, decay_all=True).values()) == {0.1}
    assert {name for name, decay in decay_by_name(model, no_decay=["3.*"]).items() if decay} == {"0.weight"}
    kept = {name for name, decay in decay_by_name(model, decay_all=True, no_decay=["*.bias"]).items() if decay}
    assert kept == {"0.weight", "1.weight", "3.weight"}
    with pytest.raises(UserError, match="'head' matches no parameter"):
        decay_by_name(model, no_decay=["head"])


def test_a_group_without_weight_decay_may_have_a_trust_ratio():
    model = small_model()
    groups = by_dimension(model)
    groups[1] = ParamGroup("norms", groups[1].params, weight_decay=False, trust_ratio=True)
    optimiser = build_optimiser(OptimSection(name="lamb", lr=0.1), model, groups)
    assert sorted((group["weight_decay"], group["adapt"]) for group in optimiser.param_groups) == [
        (0.0, True),
        (0.01, True),
    ]


def test_parameters_treated_alike_are_one_group():
    assert len(optimiser_of(small_model(), "sgd").param_groups) == 1
    assert len(optimiser_of(small_model(), "adamw").param_groups) == 2
    assert len(optimiser_of(small_model(), "lars", weight_decay=0.0).param_groups) == 2
    assert len(optimiser_of(small_model(), "lars", weight_decay=0.0, decay_all=True).param_groups) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_state_saved_and_loaded_continues_to_the_bit(name, num_before):
    straight, resumed = small_model(torch.float32), small_model(torch.float32, seed=5)
    keys = {"momentum": 0.9} if name.startswith("rmsprop") else {}
    first, second = optimiser_of(straight, name, **keys), optimiser_of(resumed, name, **keys)
    for update in range(num_before):
        set_gradients(straight, update)
        step(first, COUNT)
    for update in range(100, 102):  # whatever was there must not matter
        set_gradients(resumed, update)
        step(second, COUNT)
    saved = save({key: tensor.contiguous() for key, tensor in state_tensors(first).items()})
    resumed.load_state_dict(straight.state_dict())
    load_state_tensors(second, load(saved))
    for update in range(num_before, num_before + 3):
        for model, ours in ((straight, first), (resumed, second)):
            set_gradients(model, update)
            step(ours, COUNT)
    assert torch.equal(weights(straight), weights(resumed))
    ends = [state_tensors(first), state_tensors(second)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_state_names_and_step_counter():
    model = small_model()
    ours = optimiser_of(model, "adamw")
    names = [name for name, _ in model.named_parameters()]
    expected = {f"{slot}/{name}" for slot, name in itertools.product(["exp_avg", "exp_avg_sq"], names)} | {"step"}
    assert set(state_tensors(ours)) == expected
    for update in range(3):
        set_gradients(model, update)
        step(ours, 1.0)
    assert state_tensors(ours)["step"].item() == 3
    assert set(state_tensors(optimiser_of(model, "lamb"))) == expected
    assert set(state_tensors(optimiser_of(model, "lars"))) == {f"momentum_buffer/{name}" for name in names}
    assert state_tensors(optimiser_of(model, "lars", momentum=0.0)) == {}
    assert state_tensors(optimiser_of(model, "sgd")) == {}
    assert set(state_tensors(optimiser_of(model, "momentum"))) == {f"momentum_buffer/{name}" for name in names}


def test_state_of_another_optimiser_or_model_is_refused_and_changes_nothing():
    model = small_model()
    adam, momentum = optimiser_of(model, "adam"), optimiser_of(model, "momentum")
    with pytest.raises(UserError, match="does not belong to adam"):
        load_state_tensors(adam, state_tensors(momentum))
    wrong = {key: torch.ones_like(tensor) for key, tensor in state_tensors(adam).items()}
    wrong["exp_avg/3.weight"] = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(UserError, match=r"exp_avg/3\.weight is .* \[2, 2\], expected"):
        load_state_tensors(adam, wrong)
    assert not any(tensor.any() for tensor in state_tensors(adam).values())


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 100), st.integers(1, 1000), st.floats(0.01, 100), st.integers(0, 100))
def test_clipped_mean_gradients_stay_within_the_norm(size, count, max_norm, seed):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) * size * count for shape in ((7, 3), (5,))]
    divisor, norm = clip_divisor(norms_of(grads), count, max_norm)
    exact = torch.cat([grad.flatten() for grad in grads]).norm() / count
    torch.testing.assert_close(norm, exact)
    assert divisor.dtype == torch.float32
    assert divisor.item() == pytest.approx(count / min(1.0, max_norm / (exact.item() + 1e-6)), rel=1e-6)
    clipped = torch.cat([(grad / divisor).flatten() for grad in grads]).norm()
    assert clipped <= max_norm * (1 + 1e-6)
    if exact + 1e-6 < max_norm:
        assert divisor.item() == count


def test_clipping_agrees_with_torch_and_takes_a_count_on_the_device():
    model, reference = small_model(), small_model()
    set_gradients(model, 0, factor=COUNT)
    set_gradients(reference, 0)
    norms = norms_of([param.grad for param in model.parameters()])
    divisor, norm = clip_divisor(norms, torch.tensor(COUNT), 1.5)
    assert torch.equal(divisor, clip_divisor(norms, 24, 1.5)[0])
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.5)
    torch.testing.assert_close(norm, expected)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad / divisor, other.grad, rtol=1e-6, atol=1e-9)


def test_gradients_in_half_precision_are_clipped_though_their_norm_is_beyond_its_range():
    grads = [torch.full((1000,), 3000.0, dtype=torch.float16), torch.ones(3, dtype=torch.float16)]
    divisor, norm = clip_divisor(norms_of(grads), 4, 1.0)
    assert norm.item() == pytest.approx(3000 * math.sqrt(1000) / 4, rel=1e-6)
    clipped = torch.cat([grad.float() / divisor for grad in grads]).norm()
    assert clipped.item() == pytest.approx(1.0, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_not_hidden_by_clipping():
    for bad in (float("nan"), float("inf")):
        divisor, norm = clip_divisor(norms_of([torch.tensor([1.0, bad])]), 4, 1.0)
        assert not torch.isfinite(norm)
        assert not torch.isfinite(divisor)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "sgd", "lr": 0.1, "betas": (0.9, 0.99)}, "betas does not apply to sgd"),
        (
            {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "does not apply to sgd: use optim.name=momentum or nesterov",
        ),
        ({"name": "adamw", "lr": 0.1, "decay": 0.9}, "decay does not apply to adamw"),
        ({"name": "momentum", "lr": 0.1, "eps": 1e-8}, "eps does not apply to momentum"),
        ({"name": "momentum", "lr": 0.1, "eeta": 0.001}, "eeta does not apply to momentum"),
        ({"name": "lamb", "lr": 0.1, "eeta": 0.001}, "eeta does not apply to lamb"),
        ({"name": "lamb", "lr": 0.1, "momentum": 0.9}, "momentum does not apply to lamb"),
        ({"name": "lars", "lr": 0.1, "betas": (0.9, 0.99)}, "betas does not apply to lars"),
        ({"name": "lars", "lr": 0.1, "bias_correction": True}, "bias_correction does not apply to lars"),
        ({"name": "adamw", "lr": 0.1, "bias_correction": False}, "bias_correction does not apply to adamw"),
        ({"name": "lars", "lr": 0.1, "eeta": 0}, "greater than 0"),
        ({"name": "lars", "lr": 0.1, "eps": -1e-9}, "greater than or equal to 0"),
        ({"name": "lamb", "lr": 0.1, "eps": 0}, "optim.eps = 0: expected a number greater than 0"),
        ({"name": "sgd"}, "optim.lr is missing"),
        ({"name": "sgd", "lr": 0.1, "lr_exponent": -7}, "contradict each other"),
        ({"name": "sgd", "lr": 0.1, "scale": "linear"}, "optim.base_batch is missing"),
        ({"name": "sgd", "lr": 0}, "greater than 0"),
        ({"name": "adam", "lr": 0.1, "betas": (0.9, 1.0)}, "less than 1"),
        ({"name": "adamw", "lr": 0.1, "clip_norm": 0}, "greater than 0"),
        ({"name": "adamm", "lr": 0.1}, "Input should be"),
    ],
)
def test_keys_that_make_no_sense_are_refused_with_a_sentence(keys, sentence):
    with pytest.raises(ValidationError, match=sentence):
        OptimSection(**keys)


@pytest.mark.parametrize("name", NAMES)
def test_written_and_reread_a_section_is_the_same(name):
    keys = CASES[name][0] if name in CASES else MORE_KEYS[name]
    section = OptimSection(name=name, lr=1e-3, no_decay=["*.bias"], **keys)
    assert OptimSection(**section.model_dump()) == section
    assert OptimSection.model_validate_json(section.model_dump_json()) == section


def test_without_a_rate_of_its_own_a_forgotten_one_shows():
    model = small_model()
    ours = optimiser_of(model, "sgd", lr=None, lr_exponent=-7)
    set_gradients(model, 0)
    step(ours, 1.0)
    assert weights(model).isnan().all()
