"""Every kernel of the table, on every case: what is promised of all of them."""

import copy
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from podium.errors import UserError
from podium.kernels import registry
from podium.kernels.cases import Case, all_cases
from podium.kernels.install import apply_layout
from podium.machine import processor
from podium.recipe.loading import load_recipe
from podium.recipe.sections.engine import KernelName
from podium.runs.folder import differing_conditions

#: what a kernel is called by, in its module
OPERATORS = {
    "attention": ["Attention"],
    "batch_norm": ["BatchNorm"],
    "conv3d_stride2": ["Halving", "Doubling"],
    "conv3d_weight_copy": ["copy_kernel"],
    "conv_pool": ["ConvPool"],
    "cross_entropy": ["CrossEntropy"],
    "dropout_gelu": ["Dropout", "Gelu"],
    "mirror_normalise": ["mirrored_and_normalised"],
    "products": ["LinearLayer"],
    "vocabulary": ["LookUp", "Linear"],
    "winograd": ["WinogradConvolution"],
}
CASES = all_cases()
#: those of a size as in training are for the benchmark
SMALL = [case for case in CASES if not case.real]
TAKEN = [case for case in SMALL if case.taken]
#: the largest of them are for the whole suite only
LARGE = [case for case in TAKEN if case.kernel == "conv3d_stride2" and "tiles" in case.name]
TRIED = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] if case in LARGE else []) for case in TAKEN]
REFUSED = [case for case in SMALL if not case.taken]


@pytest.fixture(autouse=True)
def _as_installed() -> Iterator[None]:
    yield
    registry.use("auto")


@pytest.fixture
def calls(monkeypatch) -> Callable[[str], list[None]]:
    """One entry for every time that a kernel was called."""

    def watch(name: str) -> list[None]:
        found: list[None] = []
        module = registry.find(name)
        for operator in OPERATORS[name]:
            thing = getattr(module, operator)
            owner, attribute = (thing, "apply") if isinstance(thing, type) else (module, operator)
            run = getattr(owner, attribute)
            monkeypatch.setattr(owner, attribute, lambda *args, run=run: found.append(None) or run(*args))
        return found

    return watch


def plain(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and its inputs, the same at every call."""
    torch.manual_seed(2)
    return case.build(), case.inputs()


def put_on(case: Case, model: nn.Module) -> nn.Module:
    """The same module with the case's kernel, and no other."""
    registry.use([case.kernel])
    fast = copy.deepcopy(model)
    apply_layout(fast, "channels_last")
    return fast


def results(model: nn.Module, inputs: tuple[Tensor, ...], *, wants_input: bool = True) -> list[Tensor]:
    """Output, gradients of all that can have one, and buffers."""
    given = [
        tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if wants_input and tensor.is_floating_point()
        else tensor
        for tensor in inputs
    ]
    output = model(*given)
    found = [output.detach().clone()]
    if output.requires_grad:
        factor = (
            torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) if output.dim() else torch.ones(())
        )
        (output * factor.to(output.dtype)).sum().backward()
        found += [tensor.grad for tensor in given if tensor.grad is not None]
        found += [param.grad for param in model.parameters()]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def in_double(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return copy.deepcopy(model).double(), tuple(x.double() if x.is_floating_point() else x for x in inputs)


def test_the_recipe_knows_every_kernel_and_each_has_cases():
    assert registry.KERNELS.keys() == set(get_args(KernelName))
    assert OPERATORS.keys() == registry.KERNELS.keys() - {"few_rows", "jpeg_window"}  # see `podium/kernels/cases.py`
    for kernel in OPERATORS:
        assert any(case.real for case in CASES if case.kernel == kernel), kernel


@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize("case", TRIED)
def test_results_are_those_of_torch_in_float64_and_the_same_bits_every_time(case, wants_input, calls):
    kernel = registry.KERNELS[case.kernel]
    model, inputs = plain(case)
    fast, again = put_on(case, model), put_on(case, model)
    found_calls = calls(case.kernel)
    found = results(fast, inputs, wants_input=wants_input)
    # A loss whose logits need no gradient is left to torch.
    assert bool(found_calls) == (wants_input or case.kernel != "cross_entropy")
    second = results(again, inputs, wants_input=wants_input)
    registry.use("off")
    if kernel.bit_exact:
        expected = results(model, inputs, wants_input=wants_input)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    exact = results(*in_double(model, inputs), wants_input=wants_input)
    for own, same, other in zip(found, second, exact, strict=True):
        assert torch.equal(own, same)
        assert own.shape == other.shape
        size = float(other.double().abs().max())
        assert float((own.double() - other.double()).abs().max()) <= max(kernel.tolerance, 1e-6) * max(size, 1e-3)


@pytest.mark.parametrize("case", TRIED)
def test_nothing_is_read_or_written_beyond_the_tensors(case, monkeypatch):
    """Numbers that are none lie before and behind everything that goes in, comes out or is worked with."""
    model, inputs = plain(case)
    fast, guarded = put_on(case, model), Guarded()
    inputs = tuple(guarded.copy(tensor) for tensor in inputs)
    for param in fast.parameters():
        param.data = guarded.copy(param.data)
    guarded.take_over(monkeypatch)
    found = results(fast, inputs)
    monkeypatch.undo()
    assert all(bool(tensor.isfinite().all()) for tensor in found if tensor.is_floating_point())
    guarded.check()
    assert guarded.num_made


class Guarded:
    """Tensors with something before and behind them that has to stay as it is."""

    _AROUND = 1024

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self.num_made = 0

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        mark = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max if dtype != torch.bool else True
        held = torch.full((extent + 2 * self._AROUND,), mark, dtype=dtype)
        self._held.append(held)
        return held[self._AROUND : self._AROUND + extent].as_strided(shape, stride)

    def copy(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is allocated for results and for work has something around it, too."""
        plain_empty, plain_like = torch.empty, torch.empty_like

        def sizes(args: tuple) -> tuple[int, ...]:
            return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)

        def made(shape: tuple[int, ...], dtype: torch.dtype | None, stride: tuple[int, ...] | None = None) -> Tensor:
            self.num_made += 1
            stride = stride or plain_empty(shape, device="meta").stride()
            return self.empty(shape, stride, dtype or torch.float32)

        monkeypatch.setattr(torch, "empty", lambda *args, dtype=None, **_: made(sizes(args), dtype))
        monkeypatch.setattr(torch, "empty_strided", lambda shape, stride, **_: made(tuple(shape), None, tuple(stride)))
        monkeypatch.setattr(
            torch,
            "empty_like",
            lambda tensor, **_: made(tensor.shape, tensor.dtype, plain_like(tensor, device="meta").stride()),
        )
        monkeypatch.setattr(Tensor, "new_empty", lambda tensor, *args: made(sizes(args), tensor.dtype))

    def check(self) -> None:
        for held in self._held:
            for end in (held[: self._AROUND], held[-self._AROUND :]):
                mark = torch.nan if held.is_floating_point() else held[0]
                assert bool(end.isnan().all()) if held.is_floating_point() else bool((end == mark).all())


@pytest.mark.parametrize("case", [case for case in TAKEN if case.kernel != "mirror_normalise"], ids=str)
def test_what_is_not_a_number_stays_to_be_seen(case):
    """Wherever torch's result is none, so is ours."""
    model, inputs = plain(case)
    if not inputs[0].is_floating_point():  # of the table of words
        model.table.weight.data[int(inputs[0].flatten()[0]), 3] = torch.nan
    else:
        # The first row of logits is left out of the loss.
        inputs[0][(2 if case.kernel == "cross_entropy" else 0,) + (0,) * (inputs[0].dim() - 1)] = torch.nan
        inputs[0].requires_grad_()
    fast = put_on(case, model)
    found = fast(*inputs)
    registry.use("off")
    expected = model(*inputs)
    assert bool(expected.isnan().any())
    assert bool(found.isnan()[expected.isnan()].all())


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_does_not_fit_is_left_to_torch(case, calls):
    model, inputs = plain(case)
    fast = put_on(case, model)
    found_calls = calls(case.kernel)
    found = results(fast, inputs)
    assert not found_calls
    registry.use("off")
    without = copy.deepcopy(model)
    apply_layout(without, "channels_last")
    assert all(torch.equal(a, b) for a, b in zip(found, results(without, inputs), strict=True))


@pytest.mark.parametrize("setting", ["half precision", "validation", "double precision"])
@pytest.mark.parametrize("kernel", sorted(OPERATORS.keys() - {"mirror_normalise", "conv3d_weight_copy"}))
def test_what_is_not_training_in_single_precision_is_left_to_torch(kernel, setting, calls):
    case = next(case for case in TAKEN if case.kernel == kernel)
    model, inputs = plain(case)
    if setting == "double precision":
        model, inputs = in_double(model, inputs)
    fast = put_on(case, model)
    found_calls = calls(kernel)
    if setting == "validation":
        with torch.no_grad():
            fast.eval()(*inputs)
        # Products of volumes are faster forward, too.
        assert bool(found_calls) == (kernel == "conv3d_stride2")
        return
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "half precision"):
        fast(*inputs)
    assert not found_calls


@pytest.mark.parametrize("case", [case for case in TAKEN if case.kernel in ("conv_pool", "batch_norm")], ids=str)
def test_modules_that_somebody_looks_into_run_one_by_one(case, calls):
    model, inputs = plain(case)
    fast = put_on(case, model)
    found_calls = calls(case.kernel)
    seen: dict[str, list[Tensor]] = {"plain": [], "fast": []}
    for kind, one in (("plain", model), ("fast", fast)):
        for module in one.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(lambda _m, _i, output, kind=kind: seen[kind].append(output.clone()))
    fast(*inputs)
    assert not found_calls or case.kernel == "batch_norm"  # which runs one module, too
    registry.use("off")
    model(*inputs)
    for own, other in zip(seen["fast"], seen["plain"], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_run_that_continues_with_other_kernels_says_which():
    before = {"kernels": ["attention", "winograd"]}
    assert differing_conditions(before, {"kernels": ["attention"]}) == ["kernels without winograd"]
    assert differing_conditions(before, {"kernels": ["winograd", "x"]}) == ["kernels without attention and with x"]
    assert differing_conditions({}, before) == []  # from before they were recorded


@pytest.mark.parametrize(
    ("choice", "told"), [("[winogard]", "did you mean winograd"), ("winograd", r"auto, off or a list")]
)
def test_a_kernel_that_is_none_is_a_mistake_of_the_recipe(choice, told):
    with pytest.raises(UserError, match=rf"engine\.kernels.*{told}"):
        load_recipe("mnist", [f"engine.kernels={choice}"])


@pytest.mark.parametrize(
    ("instructions", "maker"), [("AVX2", "AuthenticAMD"), ("AVX512", "AuthenticAMD"), ("AVX512", "GenuineIntel")]
)
@pytest.mark.parametrize("choice", ["auto", "off", ["products", "winograd"]])
def test_a_choice_says_which_kernels_are_in_use(choice, instructions, maker, monkeypatch):
    """MKL leaves AVX-512 unused on processors of other makers, so only there are products of our own faster."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(processor, "maker", lambda: maker)
    monkeypatch.setattr(registry, "_fast_here", registry._fast_here.__wrapped__)
    registry.use(choice)
    fast = registry.KERNELS.keys() - (set() if (instructions, maker) == ("AVX512", "AuthenticAMD") else {"products"})
    expected = {"auto": sorted(fast), "off": []}.get(choice if isinstance(choice, str) else "", choice)
    assert registry.in_use() == expected
    for name in registry.KERNELS:
        assert (registry.find(name) is not None) == (name in expected)
