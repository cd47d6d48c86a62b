"""Weight updates. Owns the optimisers and gradient clipping. `steps.py` has their arithmetic, `state_tensors.py` their
saved state, `recipe/sections/optim.py` their keys.

`engine/update.py` passes *sums* of gradients and one divisor. Nothing here waits for the device.

torch's own kernels do the arithmetic (`_fused_sgd_`, `_fused_adam_`, `_fused_adamw_`; foreach operations for RMSprop,
which has no fused one), but not through `torch.optim.SGD.step` and the like: those sort parameters into lists, check
for hooks and open a profiler range at every step. For mnist's eight parameters (225,034 numbers) on one core, plain SGD
takes 52 µs here and 95 µs in torch's class, of which the kernel itself takes 41 µs.
LARS and LAMB, which torch lacks, use the same kernels: those of pytorch_optimizer take 1.4 and 1.9 times as long, and
differ from the papers when rates decay, norms exceed 10 or means are bias-corrected (`bench/optimisers.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from podium.contract import ParamGroup
from podium.errors import UserError
from podium.optim.own import OwnOptimiser, num_own_slots
from podium.optim.own_state import OwnForm
from podium.optim.steps import COUNTING_STEPS, IGNORING, KERNELS, SKIPPING, in_single
from podium.optim.stochastic_rounding import StochasticRounding
from podium.recipe.section import is_own_name
from podium.recipe.sections.optim import KEYS, OptimSection

#: optimisers that multiply the rate of each tensor by a ratio of norms, the trust ratio
_LAYERWISE = ("lars", "lamb")


class Optimiser:
    """Parameter groups and state as in torch's optimisers, created before the first step; `step` updates the weights.

    It does not derive from torch's class, which imports torch's compiler and takes longer than the first updates.
    Each group is on one device and has one type. `state[param]` has one tensor shaped like the parameter for each name
    in `slots`; `num_steps` counts the steps on each device for kernels that read it there, otherwise it is empty.
    Only parameters that are `held` have state and are updated: the others belong to another instance.
    A user's own class (`own_class`) has its state in `own`, and the rest here is empty.
    """

    def __init__(
        self,
        section: OptimSection,
        groups: list[dict[str, Any]],
        names: dict[nn.Parameter, str],
        held: set[str],
        own_class: Any = None,
    ) -> None:
        self.name = section.name
        self.names = names
        #: (first row, total rows) by name of the parameters of which this instance holds only some rows
        self.rows: dict[str, tuple[int, int]] = {}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.num_steps: dict[torch.device, Tensor] = {}
        self.own: OwnOptimiser | None = None
        #: whether a step that is not to be made is left out on the device
        self.can_skip = False
        if is_own_name(section.name):
            self.own = OwnOptimiser(_own_form(section, own_class), groups, names, held)
            self.param_groups, self.slots = groups, []
            return
        self.kernel, starts = KERNELS[section.name]
        kinds = {group["params"][0].device.type for group in groups}
        self.can_skip = self.kernel in SKIPPING and kinds.isdisjoint(IGNORING)
        options = {key: section.value(key) for key in KEYS[section.name] if key != "weight_decay"}
        options = {"momentum": 0.0, "nesterov": self.name == "nesterov", "decoupled": self.name == "adamw", **options}
        self.slots = [slot for slot in starts if slot != "momentum_buffer" or options["momentum"]]
        # with lr_exponent there is no rate here: forgetting to pass one to `step` shows at once
        options["lr"] = math.nan if section.lr is None else section.lr
        self.param_groups = [{**options, **group} for group in groups]
        for group in self.param_groups:
            device = group["params"][0].device
            if self.kernel in COUNTING_STEPS:
                self.num_steps.setdefault(device, torch.zeros((), device=device))
            for param in group["params"]:
                if names[param] in held:
                    self.state[param] = {
                        slot: torch.full_like(param, starts[slot], requires_grad=False) for slot in self.slots
                    }
        # the lists that the kernels take, by group, collected once; loading a checkpoint copies into these tensors
        self.held_lists = [[param for param in group["params"] if names[param] in held] for group in self.param_groups]
        self.slot_lists = [
            [[self.state[param][slot] for param in params] for slot in self.slots] for params in self.held_lists
        ]


def build_optimiser(
    section: OptimSection,
    model: nn.Module,
    groups: list[ParamGroup],
    held: Collection[str] | None = None,
    own_class: Any = None,
) -> Optimiser:
    """Build the optimiser of a model's trainable parameters and its state: of those that are `held`, or of all that are
    present if other devices hold a part of the model (see `distributed/pipeline/meta_blocks.py`). `own_class`: the
    user's, where `optim.name` leads to one."""
    named = dict(model.named_parameters())
    here = [
        {
            "params": [named[name] for name in names if not named[name].is_meta],
            "weight_decay": alike.weight_decay,
            "adapt": alike.adapt,
            "lr_scale": alike.lr_scale,
        }
        for alike, names in grouped_names(section, model, groups).items()
    ]
    return Optimiser(
        section,
        [group for group in here if group["params"]],
        {param: name for name, param in named.items()},
        set(named if held is None else held),
        own_class,
    )


class Alike(NamedTuple):
    """What parameters of one group have in common: weight decay, whether the rate adapts to the layer, the multiple of
    the rate, the type."""

    #: None: that of the user's own class
    weight_decay: float | None
    adapt: bool
    lr_scale: float
    dtype: torch.dtype


def grouped_names(section: OptimSection, model: nn.Module, groups: list[ParamGroup]) -> dict[Alike, list[str]]:
    """Map what parameters have in common to the trainable parameters of the whole model.

    Parameters that are treated the same way share one group, even if the workload puts them into several: each group
    costs kernel launches at every step.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    listed = [name for group in groups for name in group.params if name in named]
    assert sorted(listed) == sorted(named), "param_groups must name every trainable parameter once"
    excluded = matching(named, section.no_decay, "optim.no_decay")
    own = [(group, matching(named, group.patterns, "optim.groups")) for group in section.groups]
    decaying, adapted = set(), set()
    for group in groups:
        trust_ratio = group.weight_decay if group.trust_ratio is None else group.trust_ratio
        decaying |= set(group.params) - excluded if group.weight_decay or section.decay_all else set()
        adapted |= set(group.params) - excluded if trust_ratio or section.decay_all else set()
    alike: dict[Alike, list[str]] = {}
    for name, param in named.items():
        weight_decay = section.value("weight_decay") if name in decaying else 0.0
        adapt = section.name in _LAYERWISE and name in adapted  # even if the weight decay is 0
        of_its_own = next((group for group, names in own if name in names), None)
        lr_scale = 1.0 if of_its_own is None else section.lr_scale(of_its_own)
        if of_its_own is not None and of_its_own.weight_decay is not None:
            weight_decay = of_its_own.weight_decay
        alike.setdefault(Alike(weight_decay, adapt, lr_scale, param.dtype), []).append(name)
    return alike


def matching(names: Iterable[str], patterns: list[str], key: str) -> set[str]:
    """Return the names that match a pattern; raise UserError, which names the `key` of the recipe, if one matches
    none."""
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise UserError(f"{key}: {pattern!r} matches no parameter; the first one is {names[0]!r}")
        found |= matched
    return found


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Exclude the parameters that match from training; raise UserError if none would be left."""
    if not patterns:
        return
    named = dict(model.named_parameters())
    for name in matching(named, patterns, "optim.freeze"):
        named[name].requires_grad_(False)
    if not any(param.requires_grad for param in named.values()):
        raise UserError(f"optim.freeze = {patterns}: no parameter is left to train")


def num_slots(section: OptimSection, own_class: Any = None) -> int:
    """Return how many numbers the optimiser stores for every weight."""
    if is_own_name(section.name):
        return num_own_slots(_own_form(section, own_class))
    return len(Optimiser(section, [], {}, set()).slots)


def _own_form(section: OptimSection, own_class: Any) -> OwnForm:
    return OwnForm(own_class, section.name, section.value("options"))


def step(
    optimiser: Optimiser,
    divisor: Tensor | float,
    lr: float | None = None,
    rounding: StochasticRounding | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update the weights with the gradients in `param.grad`, each divided by `divisor`.

    `divisor` is a float32 scalar on the parameters' device, or a number on the host. `lr` is the rate of this step, by
    default that of the groups. Parameters without a gradient stay as they are. Gradients are consumed: their content
    is undefined afterwards (torch's fused kernels leave the quotient there). Half-precision weights are updated in
    single precision and rounded: stochastically if `rounding` is given, otherwise to the nearest. Where `found_inf`, a
    float32 scalar on their device, is 1, everything stays as it is; it is read there by kernels that can do so.
    """
    if found_inf is not None and not optimiser.can_skip:
        # The host waits for the device here, as it must know whether to make the update.
        if bool(found_inf):
            return
        found_inf = None
    if optimiser.own is not None:
        optimiser.own.step(divisor, lr)
        return
    with torch.no_grad():
        for num_steps in optimiser.num_steps.values():
            num_steps += 1 if found_inf is None else 1 - found_inf.to(num_steps.device, non_blocking=True)
        for group, params, slots in zip(
            optimiser.param_groups, optimiser.held_lists, optimiser.slot_lists, strict=True
        ):
            if lr is not None:
                group["lr"] = lr * group["lr_scale"]
            grads = [param.grad for param in params]
            if any(grad is None for grad in grads):
                kept = [i for i, grad in enumerate(grads) if grad is not None]
                params, grads, *slots = ([tensors[i] for i in kept] for tensors in (params, grads, *slots))
            if not params:
                continue
            device = params[0].device
            if not isinstance(divisor, Tensor):
                # filled on the device: a copy from the host could wait for it
                divisor = torch.full((), divisor, dtype=torch.float32, device=device)
            scale = divisor if divisor.device == device else divisor.to(device, non_blocking=True)
            kernel = optimiser.kernel
            skipping = {} if found_inf is None else {"found_inf": found_inf.to(device, non_blocking=True)}
            if params[0].dtype.itemsize < 4:
                kernel = partial(in_single, kernel, rounding, [optimiser.names[param] for param in params])
            kernel(group, params, grads, slots, scale, optimiser.num_steps.get(device), **skipping)


def clip_divisor(
    norms: Tensor, count: float | Tensor, max_norm: float, of_all: Callable[[Tensor], Tensor] = lambda norm: norm
) -> tuple[Tensor, Tensor]:
    """Return (the divisor for `step`, the norm before clipping) that limit the mean gradient's norm to `max_norm`.

    `norms` are those of the gradients (`norms_of`), which are sums over `count` items; they are combined in the given
    order, with the same bits in every run. With norm = ‖norms‖ / count, the divisor is count / min(1, max_norm /
    (norm + 1e-6)). If these are only some of the gradients, `of_all` turns their norm into that of all gradients.
    """
    norm = of_all(torch.linalg.vector_norm(norms)) / count
    return ((norm + 1e-6) / max_norm).clamp(min=1.0).float() * count, norm
