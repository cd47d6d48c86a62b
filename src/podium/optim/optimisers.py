"""Weight updates. Owns the `optim` section, the optimisers and gradient clipping. `kernels.py` has their arithmetic,
`state.py` what is saved of them.

`engine/update.py` hands over *sums* of gradients and one divisor.
Nothing here waits for the device.

torch's own kernels do the arithmetic (`_fused_sgd_`, `_fused_adam_`, `_fused_adamw_`; foreach operations for RMSprop,
which has no fused one), but not through `torch.optim.SGD.step` and its like: those sort parameters into lists, look for
hooks and open a profiler range at every step. For mnist's eight parameters (225,034 numbers) on one core, plain SGD
takes 52 µs here against 95 µs in torch's class; the bare kernel is 41 µs of both.
LARS and LAMB, which torch lacks, are made of the same kernels: those of pytorch_optimizer take 1.4 and 1.9 times as
long, and part from the papers where rates fall, norms exceed 10 or means are corrected (`bench/optimisers.py`).
"""

import math
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from podium.errors import UserError
from podium.optim.kernels import COUNTING_STEPS, KERNELS, in_single
from podium.optim.rounding import StochasticRounding
from podium.optim.scaling import Scale, contradiction
from podium.schema import Section
from podium.workloads.base import ParamGroup

#: the keys of each optimiser with what they are when left out
_KEYS: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 0.0},
    "momentum": {"weight_decay": 0.0, "momentum": 0.9},
    "nesterov": {"weight_decay": 0.0, "momentum": 0.9},
    "rmsprop": {"weight_decay": 0.0, "momentum": 0.0, "decay": 0.99, "eps": 1e-8},
    "rmsprop_tf": {"weight_decay": 0.0, "momentum": 0.0, "decay": 0.9, "eps": 1e-10},
    "adam": {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    "lars": {"weight_decay": 0.0, "momentum": 0.9, "eeta": 0.001, "eps": 0.0},
    "lamb": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": True},
}

#: those that multiply the rate, tensor by tensor, by a ratio of norms: the trust ratio
_LAYERWISE = ("lars", "lamb")

Coefficient = Annotated[float, Field(ge=0, lt=1)]


class OptimSection(Section):
    """`optim`: the optimiser and its learning rate. Keys of other optimisers than the named one stay null."""

    name: Literal["sgd", "momentum", "nesterov", "rmsprop", "rmsprop_tf", "adam", "adamw", "lars", "lamb"]
    lr: float | None = Field(None, gt=0, description="learning rate; at base_batch when scale is not none")
    scale: Scale = Field("none", description="how lr grows with global batch / base_batch")
    base_batch: int | None = Field(None, gt=0, description="the global batch that lr was found at")
    lr_exponent: int | None = Field(
        None, ge=-60, le=10, description="instead of lr: the learning rate is 2^lr_exponent times the global batch"
    )
    weight_decay: float | None = Field(
        None, ge=0, description="adamw, lamb: decoupled (0.01); all others: added to the gradient (0)"
    )
    decay_all: bool = Field(
        False, description="weight decay (lars, lamb: and the trust ratio) on every parameter, biases and norms too"
    )
    no_decay: list[str] = Field(
        [], description="further parameters without weight decay or trust ratio, as patterns on their names"
    )
    momentum: Coefficient | None = Field(None, description="momentum, nesterov, lars (0.9); rmsprop (0)")
    betas: tuple[Coefficient, Coefficient] | None = Field(None, description="adam, adamw, lamb (0.9, 0.999)")
    decay: Coefficient | None = Field(
        None, description="rmsprop: memory of the mean square (0.99; TensorFlow form 0.9)"
    )
    eps: float | None = Field(
        None, ge=0, description="adam, adamw, rmsprop (1e-8); rmsprop_tf (1e-10); lamb (1e-6); lars (0)"
    )
    eeta: float | None = Field(None, gt=0, description="lars: the trust ratio is this times a ratio of norms (0.001)")
    bias_correction: bool | None = Field(
        None, description="lamb: divide the running means by what they lack in the first steps (true)"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest global norm of the mean gradient")

    @model_validator(mode="after")
    def _keys_fit_the_optimiser(self) -> Self:
        for key in ("momentum", "betas", "decay", "eps", "eeta", "bias_correction"):
            if getattr(self, key) is not None and key not in _KEYS[self.name]:
                hint = ": use momentum or nesterov" if (self.name, key) == ("sgd", "momentum") else ""
                raise ValueError(f"{key} means nothing to {self.name}{hint or ': leave it out or set it to null'}")
        if self.eps == 0 and self.name != "lars":
            raise ValueError(f"eps of {self.name} must be greater than 0")
        if problem := contradiction(self.lr, self.lr_exponent, self.scale, self.base_batch):
            raise ValueError(problem)
        return self

    def value(self, key: str) -> Any:
        """The key as given, or its default for the named optimiser."""
        given = getattr(self, key)
        return _KEYS[self.name][key] if given is None else given


class Optimiser:
    """Groups and state as torch's optimisers have them, made before the first step. Stepped by `step` of this module.

    It is none of torch's: making one of these loads torch's compiler, which takes longer than the first updates.
    Each group lies on one device in one type. `state[param]` has one tensor shaped like the parameter for each name in
    `slots`; `num_steps` counts the steps on each device for kernels that read it there, else it is empty.
    Only parameters that are `held` have state, and are stepped: the others are another instance's.
    """

    def __init__(
        self, section: OptimSection, groups: list[dict[str, Any]], names: dict[nn.Parameter, str], held: set[str]
    ) -> None:
        self.name = section.name
        self.names = names
        #: (first row, rows in all) of parameters by name of which this instance has some rows alone
        self.rows: dict[str, tuple[int, int]] = {}
        self.kernel, starts = KERNELS[section.name]
        options = {key: section.value(key) for key in _KEYS[section.name] if key != "weight_decay"}
        options = {"momentum": 0.0, "nesterov": self.name == "nesterov", "decoupled": self.name == "adamw", **options}
        self.slots = [slot for slot in starts if slot != "momentum_buffer" or options["momentum"]]
        # without a rate of its own (lr_exponent), a forgotten one shows at once
        options["lr"] = math.nan if section.lr is None else section.lr
        self.param_groups = [{**options, **group} for group in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.num_steps: dict[torch.device, Tensor] = {}
        for group in self.param_groups:
            device = group["params"][0].device
            if self.kernel in COUNTING_STEPS:
                self.num_steps.setdefault(device, torch.zeros((), device=device))
            for param in group["params"]:
                if names[param] in held:
                    self.state[param] = {
                        slot: torch.full_like(param, starts[slot], requires_grad=False) for slot in self.slots
                    }
        # the very lists the kernels take, by group, gathered once; loading a checkpoint copies into these tensors
        self.held_lists = [[param for param in group["params"] if names[param] in held] for group in self.param_groups]
        self.slot_lists = [
            [[self.state[param][slot] for param in params] for slot in self.slots] for params in self.held_lists
        ]


def build_optimiser(
    section: OptimSection, model: nn.Module, groups: list[ParamGroup], held: Collection[str] | None = None
) -> Optimiser:
    """The optimiser of a model's trainable parameters, with its state in place: of those that are `held`, or of all
    that are here, where other devices have a part of the model (see `held.py`)."""
    named = dict(model.named_parameters())
    here = [
        {"params": [named[name] for name in names if not named[name].is_meta], "weight_decay": decay, "adapt": adapt}
        for (decay, adapt, _), names in grouped_names(section, model, groups).items()
    ]
    return Optimiser(
        section,
        [group for group in here if group["params"]],
        {param: name for name, param in named.items()},
        set(named if held is None else held),
    )


def grouped_names(
    section: OptimSection, model: nn.Module, groups: list[ParamGroup]
) -> dict[tuple[float, bool, torch.dtype], list[str]]:
    """(weight decay, whether the rate adapts to the layer, type) -> the trainable parameters of the whole model.

    Parameters that are treated alike end up in one group, whatever the workload called them: each group costs kernel
    launches at every step.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    listed = [name for group in groups for name in group.params if name in named]
    assert sorted(listed) == sorted(named), "param_groups must name every trainable parameter once"
    for pattern in section.no_decay:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise UserError(f"optim.no_decay: {pattern!r} fits no parameter; the first one is {next(iter(named))!r}")
    excluded = {name for name in named for pattern in section.no_decay if fnmatchcase(name, pattern)}
    decaying, adapted = set(), set()
    for group in groups:
        trust_ratio = group.weight_decay if group.trust_ratio is None else group.trust_ratio
        decaying |= set(group.params) - excluded if group.weight_decay or section.decay_all else set()
        adapted |= set(group.params) - excluded if trust_ratio or section.decay_all else set()
    alike: dict[tuple[float, bool, torch.dtype], list[str]] = {}
    for name, param in named.items():
        weight_decay = section.value("weight_decay") if name in decaying else 0.0
        adapt = section.name in _LAYERWISE and name in adapted  # also where the weight decay is 0
        alike.setdefault((weight_decay, adapt, param.dtype), []).append(name)
    return alike


def num_slots(section: OptimSection) -> int:
    """How many numbers the optimiser remembers for every weight."""
    return len(Optimiser(section, [], {}, set()).slots)


def step(
    optimiser: Optimiser, divisor: Tensor | float, lr: float | None = None, rounding: StochasticRounding | None = None
) -> None:
    """Update the weights with the gradients that lie in `param.grad`, each divided by `divisor`.

    `divisor` is a float32 scalar on the parameters' device, or a number of the host. `lr` is that of this step; left
    out, that of the groups. Parameters without a gradient stay as they are. Gradients are used up: what is in them
    afterwards is not defined (torch's fused kernels leave the quotient there). Half-precision weights are updated in
    single precision and rounded: by chance where `rounding` is given, else to the nearest.
    """
    with torch.no_grad():
        for num_steps in optimiser.num_steps.values():
            num_steps += 1
        for group, params, slots in zip(
            optimiser.param_groups, optimiser.held_lists, optimiser.slot_lists, strict=True
        ):
            if lr is not None:
                group["lr"] = lr
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
            if params[0].dtype.itemsize < 4:
                kernel = partial(in_single, kernel, rounding, [optimiser.names[param] for param in params])
            kernel(group, params, grads, slots, scale, optimiser.num_steps.get(device))


def clip_divisor(
    norms: Tensor, count: float | Tensor, max_norm: float, of_all: Callable[[Tensor], Tensor] = lambda norm: norm
) -> tuple[Tensor, Tensor]:
    """(the divisor for `step`, the norm before clipping) that keep the mean gradient's global norm within `max_norm`.

    `norms` are those of the gradients (`norms_of`), which are sums over `count` items; their norm in the order given:
    the same bits at every run. With norm = ‖norms‖ / count, the divisor is count / min(1, max_norm / (norm + 1e-6)).
    `of_all` makes the norm of all gradients of that of these, where they are a part of them.
    """
    norm = of_all(torch.linalg.vector_norm(norms)) / count
    return ((norm + 1e-6) / max_norm).clamp(min=1.0).float() * count, norm
