"""Number formats, rounding, the scale of the loss, the trap, recompute."""

import copy

import pytest
import torch
from torch import nn

from podium.contract import by_dimension
from podium.engine.loss_scale import LossScale
from podium.errors import TrainingFailed
from podium.optim.averaging import WeightAverage, averaged
from podium.optim.optimisers import build_optimiser, step
from podium.optim.stochastic_rounding import StochasticRounding, rounded
from podium.recipe.loading import load_recipe
from podium.recipe.sections.optim import OptimSection
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.nan_trap import apply_trap
from podium.transforms.precision import apply_precision, half_type
from podium.transforms.recompute import apply_recompute
from podium.transforms.seeding import MicroBatch, enter_micro_batch

HALVES = [torch.bfloat16, torch.float16]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 4)
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average(dtype):
    torch.manual_seed(0)
    values = torch.cat([torch.randn(50), torch.randn(30) * 1e-6, torch.tensor([3e-8, -3e-8, 0.0, 1.0, -1.0])])
    many = values.repeat(20_000, 1)
    got = rounded(many, dtype, torch.Generator().manual_seed(1)).double()
    nearest = values.to(dtype)
    # spread of the mean: a step of the format between neighbours, a 20,000th of the variance
    up = torch.nextafter(nearest, torch.full_like(nearest, torch.inf)).double()
    down = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)).double()
    gap = torch.maximum(up - nearest.double(), nearest.double() - down)
    assert bool(((got - values.double()).abs() <= gap).all())
    error = (got.mean(0) - values.double()).abs()
    assert bool((error <= 5 * gap / (2 * 20_000**0.5)).all())
    for column in range(len(values)):
        assert len(got[:, column].unique()) <= 2


@pytest.mark.parametrize("dtype", HALVES)
def test_what_the_format_holds_exactly_stays(dtype):
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-14, 2.0**-24 if dtype == torch.float16 else 2.0**-130])
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(rounded(exact, dtype, generator).float(), exact)
        got = rounded(odd, dtype, generator)
        assert got[0] == torch.inf
        assert got[1] == -torch.inf
        assert got[2].isnan()
    large = rounded(torch.tensor([65504.0, 65510.0]), torch.float16, torch.Generator().manual_seed(0))
    assert bool(large.isfinite().all())


def test_draws_depend_on_update_and_name_alone():
    """Not on what was rounded before: instances may hold different tensors."""
    first, second = StochasticRounding(7), StochasticRounding(7)
    value = torch.randn(1000)

    def into(rounding: StochasticRounding, update: int, name: str) -> torch.Tensor:
        target = torch.empty(1000, dtype=torch.bfloat16)
        rounding.begin(update)
        rounding.into(target, value, name)
        return target

    alone = into(first, 5, "a")
    others = [into(second, 4, "a"), into(second, 5, "b")]
    assert torch.equal(alone, into(second, 5, "a"))
    assert not any(torch.equal(alone, other) for other in others)


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop"])
def test_updates_too_small_for_half_precision_add_up(name):
    """A weight of 1 and steps of a thousandth of its spacing: rounded to the nearest it never moves."""
    moved = {}
    for kind, rounding in (("chance", StochasticRounding(1)), ("nearest", None), ("single", None)):
        dtype = torch.float32 if kind == "single" else torch.bfloat16
        model = nn.Linear(400, 1, bias=False)
        model.weight.data = torch.ones(1, 400, dtype=dtype)
        optimiser = build_optimiser(OptimSection(name=name, lr=1e-5), model, by_dimension(model))
        for update in range(300):
            model.weight.grad = torch.full((1, 400), 0.5, dtype=dtype)
            if rounding is not None:
                rounding.begin(update)
            step(optimiser, 1.0, 1e-5, rounding)
        moved[kind] = 1 - float(model.weight.detach().double().mean())
    assert moved["nearest"] == 0
    assert moved["chance"] == pytest.approx(moved["single"], rel=0.1)


def test_recipes_may_say_the_mode_alone():
    tree = load_recipe("mnist", ["precision=16.16", "precision.half=fp16"]).precision
    assert (tree.mode, tree.half, tree.rounds_stochastically) == ("16.16", "fp16", True)
    assert load_recipe("mnist", ["precision.half=fp16", "precision=16.32"]).precision.half == "fp16"
    nearest = load_recipe("mnist", ["precision=16.16", "precision.stochastic_rounding=false"]).precision
    assert not nearest.rounds_stochastically
    assert load_recipe("mnist", ["precision.loss_scale=auto"]).precision.loss_scale == "auto"


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["16.32", "16.16"])
def test_models_take_and_give_single_precision_whatever_is_inside(mode, half):
    model, plain = small_model(), small_model()
    section = PrecisionSection(mode=mode, half=half)
    apply_precision(section, model)
    inside = []
    model[0].register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    image = torch.randn(6, 3, 4, 4)
    model.eval(), plain.eval()
    output = model(image)
    assert output.dtype == torch.float32
    assert inside == [half_type(section)]
    torch.testing.assert_close(output, plain(image), rtol=0.05, atol=0.05)
    model.train()
    model(image).sum().backward()
    expected = half_type(section) if mode == "16.16" else torch.float32
    assert {param.dtype for param in model.parameters()} == {expected}
    assert {param.grad.dtype for param in model.parameters()} == {expected}
    assert model[1].running_mean.dtype == torch.float32
    assert list(model.state_dict()) == list(plain.state_dict())


def test_an_automatic_scale_backs_off_at_an_overflow_and_grows_after_a_while():
    scale = LossScale("auto")
    good, bad = torch.ones(3), torch.tensor([1.0, torch.inf, 0.0])
    assert scale.value == 2.0**16
    assert scale.observe(bad) == 1
    assert (scale.value, scale.num_skipped) == (2.0**15, 1)
    for _ in range(1999):
        assert scale.observe(good) == 0
    assert scale.value == 2.0**15
    other = LossScale("auto")
    other.load(scale.state())
    for one in (scale, other):
        assert one.observe(good) == 0
        assert one.value == 2.0**16
    fixed = LossScale(128.0)
    assert (fixed.automatic, fixed.factor, fixed.value) == (False, 128.0, 128.0)


def test_the_trap_names_the_layer_in_which_the_first_odd_value_appears():
    model = small_model()
    apply_trap(model)
    enter_micro_batch(torch.device("cpu"), 0, MicroBatch(11, 3, 0))
    image = torch.randn(2, 3, 4, 4)
    model(image).sum().backward()
    model[5].weight.data[1, 2] = torch.nan
    with pytest.raises(
        TrainingFailed, match=r"the output of 5 \(Linear\) is NaN in update 12, replica 3, micro-batch 0"
    ):
        model(image)


def test_the_trap_sees_gradients_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    apply_trap(model)
    enter_micro_batch(torch.device("cpu"), 0, MicroBatch(0, 0, 0))
    output = model(torch.ones(1, 3))
    with pytest.raises(TrainingFailed, match=r"the gradient that reaches 1 \(Linear\) is infinite"):
        (output * torch.inf).nansum().backward()


@pytest.mark.parametrize("mode", ["32.32", "16.32", "16.16"])
def test_recomputed_blocks_have_the_same_bits(mode):
    results = []
    for recompute in (False, True):
        model = nn.Sequential(small_model()[:3], nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 4)))
        if recompute:
            apply_recompute(list(model))
        apply_precision(PrecisionSection(mode=mode), model)
        torch.manual_seed(3)
        model(torch.randn(6, 3, 4, 4)).square().sum().backward()
        results.append(([param.grad for param in model.parameters()], copy.deepcopy(model.state_dict())))
    for own, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(own, other)
    assert results[0][1].keys() == results[1][1].keys()
    for name, tensor in results[0][1].items():  # running statistics, counted once
        assert torch.equal(tensor, results[1][1][name]), name


def test_recompute_keeps_less():
    def kept(recompute: bool) -> int:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        model = nn.Sequential(*blocks)
        if recompute:
            apply_recompute(blocks)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            model(torch.randn(128, 64, requires_grad=True))
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


def test_averages_of_weights():
    sets = [{"w": torch.full((2,), float(value)), "n": torch.tensor(value)} for value in (1, 2, 6)]
    assert averaged(sets, "mean", 0.5)["w"].tolist() == [3.0, 3.0]
    assert averaged(sets, "exponential", 0.5)["w"].tolist() == [3.75, 3.75]
    assert averaged(sets, "mean", 0.5)["n"] == 6
    half = [{"w": one["w"].to(torch.bfloat16)} for one in sets]
    assert averaged(half, "mean", 0.5)["w"].dtype == torch.bfloat16


def test_a_model_has_the_average_only_for_a_while():
    model = nn.Linear(2, 2)
    average = WeightAverage("mean", 0.9)
    before = model.weight.detach().clone()
    average.take(model.state_dict())
    model.weight.data += 2
    average.take(model.state_dict())
    address = model.weight.data_ptr()
    with average.in_place_of(model):
        torch.testing.assert_close(model.weight.data, before + 1)
    torch.testing.assert_close(model.weight.data, before + 2)
    assert model.weight.data_ptr() == address
