"""Kernels of the optimisers: one step of one group of parameters. Called by `optimisers.step`.

`scale` divides the gradients, which may be written over; `slots` are lists like `params`, in the order of `KERNELS`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.optim.rounding import StochasticRounding

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
) -> None:
    """The step of another kernel, on copies in single precision."""
    wide, *wide_slots = ([tensor.float() for tensor in tensors] for tensors in (params, *slots))
    kernel(group, wide, [grad.float() for grad in grads], wide_slots, scale, num_steps)
    for number, (targets, values) in enumerate(zip((params, *slots), (wide, *wide_slots), strict=True)):
        for target, value, name in zip(targets, values, names, strict=True):
            if rounding is None:
                target.copy_(value)
            else:
                rounding.into(target, value, f"{number}/{name}")


def _aligned(params: Tensors, grads: Tensors) -> Tensors:
    """Gradients in the memory layout of their parameters.

    The fused CPU kernels walk through all tensors with one index, and mix up elements without a word where layouts
    differ, as those of a channels-last weight and a view of a flat gradient buffer may.
    """
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.stride() != param.stride():
            grads[i] = torch.empty_like(param, requires_grad=False).copy_(grad)
    return grads


def _in_memory_order(params: Tensors, grads: Tensors, slots: list[Tensors]) -> tuple[Tensors, Tensors, list[Tensors]]:
    """The same tensors for kernels that treat each element alike, their axes in the order of memory: torch's fused ones
    copy others to and fro (17 million weights of a convolution of volumes, two cores: 12 ms, not 68)."""
    grads = _aligned(params, grads)
    orders = {
        i: sorted(range(param.dim()), key=param.stride, reverse=True)
        for i, param in enumerate(params)
        if not param.is_contiguous()
    }

    def turned(tensors: Tensors) -> Tensors:
        return [tensor.permute(orders[i]) if i in orders else tensor for i, tensor in enumerate(tensors)]

    return turned(params), turned(grads), [turned(tensors) for tensors in slots]


def _fused_sgd(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
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
        is_first_step=False,  # buffers begin as zeros, which comes to the same
        grad_scale=scale,
        found_inf=None,
    )


def _fused_adam(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
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
        grad_scale=scale,
        found_inf=None,
    )


def _mean_squares(group: Group, params: Tensors, grads: Tensors, squares: Tensors, scale: Tensor) -> None:
    """What both forms of RMSprop begin with: squares <- decay · squares + (1 - decay) · gradient²."""
    torch._foreach_div_(grads, scale)
    if group["weight_decay"]:
        torch._foreach_add_(grads, params, alpha=group["weight_decay"])
    torch._foreach_mul_(squares, group["decay"])
    torch._foreach_addcmul_(squares, grads, grads, 1 - group["decay"])


def _rmsprop(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """buffer <- momentum · buffer + gradient / (√squares + eps);  param <- param - lr · buffer"""
    _mean_squares(group, params, grads, slots[0], scale)
    roots = torch._foreach_sqrt(slots[0])
    torch._foreach_add_(roots, group["eps"])
    if len(slots) > 1:
        torch._foreach_mul_(slots[1], group["momentum"])
        torch._foreach_addcdiv_(slots[1], grads, roots)
        torch._foreach_add_(params, slots[1], alpha=-group["lr"])
    else:
        torch._foreach_addcdiv_(params, grads, roots, -group["lr"])


def _rmsprop_tf(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """buffer <- momentum · buffer + lr · gradient / √(squares + eps);  param <- param - buffer

    Apart from where eps and lr stand, squares begin as ones, which keeps the first steps small.
    """
    _mean_squares(group, params, grads, slots[0], scale)
    roots = torch._foreach_add(slots[0], group["eps"])
    torch._foreach_sqrt_(roots)
    if len(slots) > 1:
        torch._foreach_mul_(slots[1], group["momentum"])
        torch._foreach_addcdiv_(slots[1], grads, roots, group["lr"])
        torch._foreach_sub_(params, slots[1])
    else:
        torch._foreach_addcdiv_(params, grads, roots, -group["lr"])


def _lars(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """buffer <- momentum · buffer + lr · trust · (gradient + weight_decay · param);  param <- param - buffer

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
            torch._foreach_addcmul_(grads, params, [weight_decay * scale] * len(params))
        torch._foreach_mul_(grads, factors.unbind())
    else:
        torch._foreach_mul_(grads, group["lr"] / scale)
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
    )


def _lamb(
    group: Group, params: Tensors, grads: Tensors, slots: list[Tensors], scale: Tensor, num_steps: Tensor | None
) -> None:
    """update = Adam's update at rate 1 + weight_decay · param;  param <- param - lr · trust · update

    trust = ‖param‖ / ‖update‖ for each tensor (You et al. 2020).
    """
    assert num_steps is not None
    if not group["bias_correction"]:
        num_steps = torch.full_like(num_steps, math.inf)  # Adam divides by 1 - beta^steps, which is 1 then
    if not group["adapt"]:
        _fused_adam(group, params, grads, slots, scale, num_steps)
        return
    # Adam subtracts from what it is given: here that becomes the update with its sign turned round
    updates = list(torch._foreach_mul(params, -group["weight_decay"]))
    _fused_adam({**group, "lr": 1.0, "weight_decay": 0.0}, updates, grads, slots, scale, num_steps)
    of_params, of_updates = norms_of(params), norms_of(updates)
    factors = _or_one(of_params / of_updates, of_params, of_updates) * group["lr"]
    torch._foreach_addcmul_(params, updates, factors.unbind())


def norms_of(tensors: Tensors) -> Tensor:
    """The norm of each tensor, (tensors,), on their device."""
    return torch.stack(torch._foreach_norm(tensors))


def _or_one(ratios: Tensor, *norms: Tensor) -> Tensor:
    """The ratios; 1 where one of the norms is 0."""
    return torch.where(torch.stack(norms).amin(0) > 0, ratios, 1.0)


#: optimiser -> its kernel, and what it remembers for each parameter with the value that begins as
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

#: those that need the number of steps made, this one included
COUNTING_STEPS = (_fused_adam, _lamb)
