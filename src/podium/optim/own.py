"""Optimisers of a user: a class derived from `torch.optim.Optimizer`, named by its file or module.

The class steps the parameters of the groups that Podium makes, on mean gradients. Its state is lazy, as that of torch's
own: there is none before a parameter's first step, and a run that continues fills it from a checkpoint
(`own_state.py`). Whether that gives the same bits is tried before the training (`own_trials.py`).
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import UserError
from podium.machine import foreach
from podium.optim.own_state import OwnForm, OwnStepper, is_of_group
from podium.optim.own_trials import try_steps


class OwnOptimiser:
    """A user's optimiser of the parameters that this instance holds."""

    def __init__(
        self, form: OwnForm, groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str], held: Collection[str]
    ) -> None:
        """Build it, and try on copies whether a run with it can continue exactly. `groups` are Podium's: parameters
        with their `weight_decay` (None: the default of the class) and `lr_scale`."""
        check_class(form)
        decays = _accepts(form.cls, "weight_decay")
        for group in groups:
            if group["weight_decay"] and not decays:
                raise form.refused("has no argument weight_decay: leave optim.weight_decay out")
            if any(param.dtype.itemsize < 4 for param in group["params"]):
                raise UserError(
                    f"optim.name = {form.name} steps weights in single precision only: set precision=16.32 or 32.32"
                )
        options = [
            {"weight_decay": group["weight_decay"]} if decays and group["weight_decay"] is not None else {}
            for group in groups
        ]
        trainable = {name for param, name in names.items() if param.requires_grad}
        present = {names[param] for group in groups for param in group["params"]}
        # All that are present, not the held ones only: every instance comes to the same verdict.
        self._tried = {
            names[param]: state
            for param, state in try_steps(
                form,
                [{"params": group["params"], **more} for group, more in zip(groups, options, strict=True)],
                divided=not trainable <= (present & set(held)),
            ).items()
        }
        self._form, self._names = form, names
        self._lr_scales, own = [], []
        for group, more in zip(groups, options, strict=True):
            if params := [param for param in group["params"] if names[param] in held]:
                own.append({"params": params, **more})
                self._lr_scales.append(group["lr_scale"])
        #: None: all parameters belong to other instances
        self._stepper = OwnStepper(form, own) if own else None

    def step(self, divisor: Tensor | float, lr: float | None) -> None:
        """Divide the gradients, set the rates, and step."""
        if self._stepper is None:
            return
        for group, lr_scale in zip(self._stepper.groups, self._lr_scales, strict=True):
            if lr is not None:
                group["lr"] = lr * lr_scale
            grads = [param.grad for param in group["params"] if param.grad is not None]
            if grads:
                foreach.div_(grads, torch.as_tensor(divisor, dtype=torch.float32, device=grads[0].device))
        self._stepper.optimiser.step()

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `name/parameter`, with the names of `OwnStepper.taken`."""
        taken = {} if self._stepper is None else self._stepper.taken()
        return {
            f"{name}/{self._names[param]}": tensor for param, state in taken.items() for name, tensor in state.items()
        }

    def blank(self, layout: list[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
        """Return tensors to be filled with what this instance holds of a checkpoint; `layout` as of `layout_of`."""
        held = {self._names[param] for param in self._params()}
        return {
            key: torch.empty(shape, dtype=getattr(torch, dtype))
            for key, dtype, shape in layout
            if key.partition("/")[2] in held
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned; raise UserError, and change nothing, if it is another optimiser's."""
        params = {self._names[param]: param for param in self._params()}
        saved: dict[nn.Parameter, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, of = key.partition("/")
            if of not in params:
                raise self._misfit(f"{key} is not part of it")
            saved.setdefault(params[of], {})[name] = tensor
        for of, expected in self._tried.items():
            if of in params:
                self._check_fits(of, saved.get(params[of], {}), expected)
        if self._stepper is not None:
            for group in self._stepper.groups:
                self._check_shared([saved.get(param, {}) for param in group["params"]])
            devices = {name: tensor.device for state in self._tried.values() for name, tensor in state.items()}
            self._stepper.give_back(saved, devices)

    def unmade_bytes(self) -> int:
        """Return about how many bytes the state will take that is made in the first steps."""
        if self._stepper is None or self._stepper.optimiser.state:
            return 0
        shares: dict[int, float] = {}
        for param in self._params():
            if (tried := self._tried.get(self._names[param])) is not None:
                num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tried.values() if tensor.dim())
                shares[param.dim()] = max(shares.get(param.dim(), 0.0), num_bytes / max(1, param.numel()))
        largest = max(shares.values(), default=0.0)
        return round(sum(param.numel() * shares.get(param.dim(), largest) for param in self._params()))

    def _params(self) -> list[nn.Parameter]:
        return [] if self._stepper is None else self._stepper.params

    def _check_fits(self, of: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Raise UserError unless there is everything that a few steps leave; nothing is there before the first."""
        slots = {name.partition(":")[0] for name in saved if not is_of_group(name)}
        for name, like in expected.items():
            if not slots or is_of_group(name):
                continue
            if name.partition(":")[0] not in slots:
                raise self._misfit(f"{name}/{of} is missing")
            if name in saved and (saved[name].shape, saved[name].dtype) != (like.shape, like.dtype):
                raise self._misfit(
                    f"{name}/{of} is {saved[name].dtype} {list(saved[name].shape)}, expected {like.dtype} "
                    f"{list(like.shape)}"
                )

    def _check_shared(self, states: list[dict[str, Tensor]]) -> None:
        """Raise UserError unless the values that a group shares are the same with each of its parameters."""
        first = {name: tensor for name, tensor in states[0].items() if is_of_group(name)}
        for state in states[1:]:
            shared = {name: tensor for name, tensor in state.items() if is_of_group(name)}
            if shared.keys() != first.keys() or any(not torch.equal(shared[name], first[name]) for name in shared):
                raise self._misfit("the parameters of a group disagree on what they share")

    def _misfit(self, reason: str) -> UserError:
        return UserError(f"the saved optimiser state does not belong to {self._form.name} with this model: {reason}")


def layout_of(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    """Return names, types and shapes, to be told to other instances."""
    return [
        (key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for key, tensor in sorted(tensors.items())
    ]


def check_class(form: OwnForm) -> None:
    """Raise UserError unless this is an optimiser that steps without a closure and has a learning rate."""
    cls = form.cls
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        raise UserError(f"optim.name = {form.name}: expected a class derived from torch.optim.Optimizer")
    for argument in list(inspect.signature(cls.step).parameters.values())[1:]:
        positional = argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        if positional and argument.default is argument.empty:
            raise form.refused(
                f"cannot step without {argument.name}, but an update computes its gradients once: choose another one"
            )
    if callable(getattr(cls, "eval", None)):
        raise form.refused(
            "has other weights in evaluation than in training, which checkpoints do not know: choose another one, or "
            "average weights with the section average"
        )
    if not _accepts(cls, "lr"):
        raise form.refused("takes no lr, which the schedule sets: give it that argument")


def num_own_slots(form: OwnForm) -> int:
    """Return about how many numbers a user's optimiser stores for every weight, tried on a small one."""
    check_class(form)
    param = nn.Parameter(torch.ones(2, 3))
    (state,) = try_steps(form, [{"params": [param]}], divided=False).values()
    return round(sum(tensor.numel() for tensor in state.values() if tensor.dim()) / param.numel())


def _accepts(cls: Any, argument: str) -> bool:
    return argument in inspect.signature(cls).parameters
