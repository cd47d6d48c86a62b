"""A user's optimiser and its state, parameter by parameter, as named tensors that a checkpoint can hold.

Names tell what is no tensor: `exp_avg` is one, `step:int` a number, `k:group-int` a number that the optimiser counts in
its group. A group's values are saved with each of its parameters, so that a group can be divided between instances in
one way and continued in another.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import PodiumError, UserError
from podium.ui.user_frames import describe, user_frames

#: type of a number -> that of the tensor which holds it
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
    "bool": (bool, torch.int64),
}
_NONE, _GROUP = "none", "group-"
_SAVED_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
#: what Podium itself sets in groups
_SET_HERE = ("params", "lr")
#: the rate that an optimiser is built with, before the schedule sets one
FIRST_LR = 1e-3


@dataclass(frozen=True)
class OwnForm:
    """The user's class as the recipe names it, with its options."""

    cls: Any
    name: str
    options: Mapping[str, Any]

    def refused(self, reason: str) -> UserError:
        """Return the error for a class that cannot be used."""
        return UserError(f"optim.name = {self.name}: the class {reason}")

    def failed(self, what: str, error: Exception) -> UserError:
        """Return the error for an exception of the class itself, with the lines of the user's own files."""
        return UserError(f"optim.name = {self.name}: {what}: {describe(error)}{user_frames(error)}")


class OwnStepper:
    """An optimiser of the user's class, built for groups of parameters; its state can be taken and given back."""

    def __init__(self, form: OwnForm, groups: list[dict[str, Any]]) -> None:
        self.form = form
        try:
            options = {key: _as_code_has_it(value) for key, value in form.options.items()}
            self.optimiser: torch.optim.Optimizer = form.cls([dict(group) for group in groups], lr=FIRST_LR, **options)
        except PodiumError:
            raise
        except Exception as error:
            raise form.failed("it cannot be built with optim.options and this model", error) from error
        if any("lr" not in group for group in self.groups):
            raise form.refused("has no lr in its groups, where the schedule sets it")
        self._at_start = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in _SET_HERE} for group in self.groups
        ]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimiser.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.groups for param in group["params"]]

    def taken(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the state of every parameter by name, empty before its first step; raise UserError for what cannot be
        saved. Tensors are not copied."""
        state: dict[Any, Any] = self.optimiser.state
        if state.keys() - set(self.params):
            raise self.form.refused("keeps state outside of that of parameters, which is not saved: use state[param]")
        found = {}
        for group, start in zip(self.groups, self._at_start, strict=True):
            shared = {
                key: value
                for key, value in group.items()
                if key not in _SET_HERE and not (key in start and _same(start[key], value))
            }
            for param in group["params"]:
                own = [self._as_tensor(slot, value) for slot, value in state.get(param, {}).items()]
                found[param] = dict(own + [self._as_tensor(key, value, _GROUP) for key, value in shared.items()])
        return found

    def give_back(
        self, saved: Mapping[nn.Parameter, Mapping[str, Tensor]], devices: Mapping[str, torch.device] | None = None
    ) -> None:
        """Continue from what `taken` has returned. `devices`: where scalars lie, by name; by default as saved."""
        state: dict[Any, Any] = self.optimiser.state
        state.clear()
        for group, start in zip(self.groups, self._at_start, strict=True):
            group.update(copy.deepcopy(start))
            for param in group["params"]:
                for name, tensor in saved.get(param, {}).items():
                    slot, _, mark = name.partition(":")
                    value = _as_value(mark.removeprefix(_GROUP), tensor, param, (devices or {}).get(name))
                    into = group if mark.startswith(_GROUP) else state.setdefault(param, {})
                    into[slot] = value

    def _as_tensor(self, slot: Any, value: Any, place: str = "") -> tuple[str, Tensor]:
        where = "groups" if place else "state"
        if not isinstance(slot, str) or not slot or "/" in slot or ":" in slot:
            raise self.form.refused(f"calls a value of its {where} {slot!r}, which cannot be saved: use a plain name")
        if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in _SAVED_DTYPES:
            return f"{slot}:{place}tensor" if place else slot, value.detach()
        if value is None:
            return f"{slot}:{place}{_NONE}", torch.zeros(1, dtype=torch.uint8)
        for mark, (kind, dtype) in _NUMBERS.items():
            if type(value) is kind and (not isinstance(value, int) or -(2**63) <= value < 2**63):
                return f"{slot}:{place}{mark}", torch.tensor(value, dtype=dtype)
        shown = f"tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise self.form.refused(
            f"keeps a {shown} in its {where} ({slot}), which cannot be saved: use dense tensors of real numbers, and "
            "plain numbers"
        )


def is_of_group(name: str) -> bool:
    """Return whether a name of `OwnStepper.taken` is that of a value which the whole group shares."""
    return name.partition(":")[2].startswith(_GROUP)


def _as_value(mark: str, tensor: Tensor, param: Tensor, device: torch.device | None) -> Any:
    if mark == _NONE:
        return None
    if mark in _NUMBERS:
        return _NUMBERS[mark][0](tensor.item())
    # As the optimiser itself makes them: in the memory layout of the parameter where the shape is the same.
    if tensor.shape == param.shape and tensor.dim():
        return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    # Scalars may stay on the host, where torch's own optimisers count their steps.
    return tensor.to(device or (param.device if tensor.dim() else tensor.device), copy=True)


def _as_code_has_it(value: Any) -> Any:
    """Return a value of YAML as code expects it: fixed lists, as `betas`, are tuples."""
    return tuple(_as_code_has_it(item) for item in value) if isinstance(value, list) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return isinstance(before, Tensor) and isinstance(after, Tensor) and torch.equal(before, after)
    return type(before) is type(after) and bool(before == after)
