"""The arithmetic of the optimisers: one step of one group of parameters. Called by `optimisers.step`.

`scale` divides the gradients, which may be overwritten; `slots` are lists like `params`, in the order of `KERNELS`.
Where `found_inf`, a scalar on the device, is 1, parameters and slots stay as they are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.machine import foreach
from podium.optim.stochastic_rounding import StochasticRounding

#: kinds of devices whose fused kernels take a divisor and `found_inf`, and ignore both without a word (torch 2.13)
IGNORING = ("mps",)

Group = dict[str, Any]
Tensors = list[Tensor]


def in_single(
    kernel: Callable[..., None],
    rounding: StochasticRounding | None,
    names: list[str],
    group: Group,
    params: Tensors,
    grads: Tensors,
    slots: list[Tensors],
    scale: Tensor,
    num_steps: Tensor | None,
    **skipping: Tensor,
) -> None:
    """Run another kernel's step on copies in single precision."""
    wide, *wide_slots = ([tensor.float() for tensor in tensors] for tensors in (params, *slots))
    kernel(group, wide, [grad.float() for grad in grads], wide_slots, scale, num_steps, **skipping)
    for number, (targets, values) in enumerate(zip((params, *slots), (wide, *wide_slots), strict=True)):
        for target, value, name in zip(targets, values, names, strict=True):
            if rounding is None:
                target.copy_(value)
            else:
                kept = target.clone() if skipping else target
                rounding.into(target, value, f"{number}/{name}")
                if skipping:  # rounding may change the sign of a zero
                    target.copy_(torch.where(skipping["found_inf"] > 0, kept, target))


def _aligned(params: Tensors, grads: Tensors) -> Tensors:
    """Return the gradients in the memory layout of their parameters.

    The fused CPU kernels traverse all tensors with one index and silently mix up elements if layouts differ, as those
    of a channels-last weight and a view of a flat gradient buffer may.
    """
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.stride() != param.stride():
            grads[i] = torch.empty_like(param, requires_grad=False).copy_(grad)
    return grads


def _in_memory_order(params: Tensors, grads: Tensors, slots: list[Tensors]) -> tuple[Tensors, Tensors, list[Tensors]]:
    """Return the same tensors with their axes in memory order, for elementwise kernels: torch's fused ones would copy
    other layouts back and forth (17 million weights of a 3D convolution, two cores: 12 ms instead of 68)."""
    if all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads)):
        return params, grads, slots  # the usual case, in a tenth of the time
    grads = _aligned(params, grads)
    orders = {
        i: sorted(range(param.dim()), key=param.stride, reverse=True)
        for i, param in enumerate(params)
        if not param.is_contiguous()
    }

    def turned(tensors: Tensors) -> Tensors:
        return [tensor.permute(orders[i]) if i in orders else tensor for i, tensor in enumerate(tensors)]

    return turned(params), turned(grads), [turned(tensors) for tensors in slots]


def _divided(grads: Tensors, scale: Tensor) -> Tensor | None:
    """Return the divisor that a fused kernel takes; where it would ignore it, the gradients are divided here."""
    if scale.device.type not in IGNORING:
        return scale
    foreach.div_(grads, scale)
    return None


def _fused_sgd(
    group: Group,
    params: Tensors,
    grads: Tensors,
    slots: list[Tensors],
    scale: Tensor,
    num_steps: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    params, grads, slots = _in_memory_order(params, grads, slots)
    torch._fused_sgd_(
        params,
        grads,
        slots[0] if slots else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=False,  # buffers start as zeros, which is equivalent
        grad_scale=_divided(grads, scale),
        found_inf=found_inf,
    )


def _fused_adam(
    group: Group,
    params: Tensors,
    grads: Tensors,
    slots: list[Tensors],
    scale: Tensor,
    num_steps: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    assert num_steps is not None
    kernel = torch._fused_adamw_ if group["decoupled"] else torch._fused_adam_
    params, grads, slots = _in_memory_order(params, grads, slots)
    kernel(
        params,
        grads,
        slots[0],
        slots[1],
        [],
        [num_steps] * len(params),
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=_divided(grads, scale),
        found_inf=found_inf,
    )


def _mean_squares(group: Group, params: Tensors, grads: Tensors, squares: Tensors, scale: Tensor) -> None:
    """Update the mean squares of both forms of RMSprop: squares <- decay · squares + (1 - decay) · gradient²."""
    foreach.div_(grads, scale)
    if group["weight_decay"]:
        foreach.add_(grads, params, alpha=group["weight_decay"])
    foreach.mul_(squares, group["decay"])
    foreach.addcmul_(squares, grads, grads, 1 - group["decay"])


def _rmsprop(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """Apply buffer <- momentum · buffer + gradient / (√squares + eps);  param <- param - lr · buffer."""
    _mean_squares(group, params, grads, slots[0], scale)
    roots = foreach.sqrt(slots[0])
    foreach.add_(roots, group["eps"])
    if len(slots) > 1:
        foreach.mul_(slots[1], group["momentum"])
        foreach.addcdiv_(slots[1], grads, roots)
        foreach.add_(params, slots[1], alpha=-group["lr"])
    else:
        foreach.addcdiv_(params, grads, roots, -group["lr"])


def _rmsprop_tf(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """Apply buffer <- momentum · buffer + lr · gradient / √(squares + eps);  param <- param - buffer.

    It also differs in that squares start as ones, which keeps the first steps small.
    """
    _mean_squares(group, params, grads, slots[0], scale)
    roots = foreach.add(slots[0], group["eps"])
    foreach.sqrt_(roots)
    if len(slots) > 1:
        foreach.mul_(slots[1], group["momentum"])
        foreach.addcdiv_(slots[1], grads, roots, group["lr"])
        foreach.sub_(params, slots[1])
    else:
        foreach.addcdiv_(params, grads, roots, -group["lr"])


def _lars(
    group: Group,
    params: Tensors,
    grads: Tensors,
    slots: list[Tensors],
    scale: Tensor,
    num_steps: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    """Apply buffer <- momentum · buffer + lr · trust · (gradient + weight_decay · param);  param <- param - buffer.

    trust = eeta · ‖param‖ / (‖gradient‖ + weight_decay · ‖param‖ + eps) for each tensor (You, Gitman, Ginsburg 2017).
    """
    grads = _aligned(params, grads)
    scale = scale.to(params[0].dtype)
    if group["adapt"]:
        weight_decay = group["weight_decay"]
        of_params, of_grads = norms_of(params), norms_of(grads) / scale
        trust = group["eeta"] * of_params / (of_grads + weight_decay * of_params + group["eps"])
        factors = _or_one(trust, of_params, of_grads) * (group["lr"] / scale)
        if weight_decay:
            foreach.addcmul_(grads, params, [weight_decay * scale] * len(params))
        foreach.mul_(grads, factors.unbind())
    else:
        foreach.mul_(grads, group["lr"] / scale)
    params, grads, slots = _in_memory_order(params, grads, slots)
    torch._fused_sgd_(
        params,
        grads,
        slots[0] if slots else [],
        weight_decay=0.0,
        momentum=group["momentum"],
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=found_inf,
    )


def _lamb(
    group: Group,
    params: Tensors,
    grads: Tensors,
    slots: list[Tensors],
    scale: Tensor,
    num_steps: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    """Apply param <- param - lr · trust · update, with update = Adam's update at rate 1 + weight_decay · param.

    trust = ‖param‖ / ‖update‖ for each tensor (You et al. 2020).
    """
    assert num_steps is not None
    if not group["bias_correction"]:
        num_steps = torch.full_like(num_steps, math.inf)  # Adam divides by 1 - beta^steps, which is then 1
    if not group["adapt"]:
        _fused_adam(group, params, grads, slots, scale, num_steps, found_inf)
        return
    # Adam subtracts from the tensor it is given: here the result is the update with its sign reversed
    updates = list(foreach.mul(params, -group["weight_decay"]))
    _fused_adam({**group, "lr": 1.0, "weight_decay": 0.0}, updates, grads, slots, scale, num_steps, found_inf)
    of_params, of_updates = norms_of(params), norms_of(updates)
    factors = _or_one(of_params / of_updates, of_params, of_updates) * group["lr"]
    if found_inf is not None:
        # Adam has left -weight_decay · param; times -0.0 it is a zero with the sign of the parameter, so zeros stay
        factors = torch.where(found_inf > 0, -0.0, factors)
    foreach.addcmul_(params, updates, factors.unbind())


def norms_of(tensors: Tensors) -> Tensor:
    """Return the norm of each tensor, (tensors,), on their device, in single precision at least: finite gradients in
    half precision may have norms beyond its range."""
    half = any(tensor.dtype.itemsize < 4 for tensor in tensors)
    return torch.stack(foreach.norm(tensors, dtype=torch.float32 if half else None))


def _or_one(ratios: Tensor, *norms: Tensor) -> Tensor:
    """Return the ratios, with 1 where one of the norms is 0."""
    return torch.where(torch.stack(norms).amin(0) > 0, ratios, 1.0)


#: optimiser -> its kernel, and the state of each parameter with its initial value
KERNELS: dict[str, tuple[Callable[..., None], dict[str, float]]] = {
    "sgd": (_fused_sgd, {}),
    "momentum": (_fused_sgd, {"momentum_buffer": 0.0}),
    "nesterov": (_fused_sgd, {"momentum_buffer": 0.0}),
    "rmsprop": (_rmsprop, {"square_avg": 0.0, "momentum_buffer": 0.0}),
    "rmsprop_tf": (_rmsprop_tf, {"square_avg": 1.0, "momentum_buffer": 0.0}),
    "adam": (_fused_adam, {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    "adamw": (_fused_adam, {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    "lars": (_lars, {"momentum_buffer": 0.0}),
    "lamb": (_lamb, {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
}

#: optimisers that need the number of steps, including the current one
COUNTING_STEPS = (_fused_adam, _lamb)

#: optimisers that read on the device whether to leave a step out: torch's fused kernels do. The others are made of
#: operators on lists, each of which would need a copy of the state to leave it as it was
SKIPPING = (_fused_sgd, _fused_adam, _lars, _lamb)
