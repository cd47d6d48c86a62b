"""Optimisers and schedules of a user: a class derived from `torch.optim.Optimizer`, and a function of the update.

The class steps the parameters of the groups that Podium makes, on mean gradients. Its state is lazy, as that of torch's
own: `state[param]` is empty before the parameter's first step, and is filled from a checkpoint in a run that continues.
So that this gives the same bits, everything that a step depends on has to be there: `check_resumes` tries it.
"""

import copy
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import PodiumError, UserError
from podium.machine import foreach
from podium.ui.user_frames import describe

#: marks of numbers among the state's tensors, by their type: `step:int/<parameter>`
_MARKS: dict[str, tuple[type, torch.dtype]] = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
    "bool": (bool, torch.int64),
}
_NONE = "none"


class OwnOptimiser:
    """A user's optimiser of the parameters that this instance holds."""

    def __init__(
        self,
        cls: Any,
        name: str,
        options: Mapping[str, Any],
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        held: Collection[str],
    ) -> None:
        """Build it, and try on copies whether a run with it can continue exactly. `groups` are Podium's: parameters
        with their `weight_decay` (None: the default of the class) and `lr_scale`."""
        check_class(cls, name)
        self._cls, self._options, self.shown = cls, {key: _tuples(value) for key, value in options.items()}, name
        self._names = names
        self._lr_scales: list[float] = []
        own_groups: list[dict[str, Any]] = []
        decays = _accepts(cls, "weight_decay")
        for group in groups:
            if group["weight_decay"] and not decays:
                raise UserError(
                    f"optim.weight_decay does not apply to {name}, which has no such argument: leave it out"
                )
            for param in group["params"]:
                if param.dtype.itemsize < 4:
                    raise UserError(f"optim.name = {name} needs weights in single precision: set precision=16.32")
            params = [param for param in group["params"] if names[param] in held]
            if params:
                decay = {"weight_decay": group["weight_decay"]} if decays and group["weight_decay"] is not None else {}
                own_groups.append({"params": params, **decay})
                self._lr_scales.append(group["lr_scale"])
        #: None: all parameters belong to other instances
        self._optimiser = self._built(own_groups) if own_groups else None
        if self._optimiser is not None:
            self._check_resumes(own_groups, divided=sum(len(group["params"]) for group in own_groups) < len(names))

    def step(self, divisor: Tensor | float, lr: float | None) -> None:
        """Divide the gradients, set the rates, and step."""
        if self._optimiser is None:
            return
        for group, lr_scale in zip(self._optimiser.param_groups, self._lr_scales, strict=True):
            if lr is not None:
                group["lr"] = lr * lr_scale
            grads = [param.grad for param in group["params"] if param.grad is not None]
            if grads:
                scale = torch.as_tensor(divisor, dtype=torch.float32, device=grads[0].device)
                foreach.div_(grads, scale)
        self._optimiser.step()

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `slot/parameter`; numbers as tensors under names that tell their type."""
        if self._optimiser is None:
            return {}
        found = {}
        for param, slots in self._optimiser.state.items():
            if not isinstance(param, Tensor):
                raise self._refused(f"keeps state outside of that of parameters ({param!r})")
            for slot, value in slots.items():
                key, tensor = self._as_tensor(slot, value)
                found[f"{key}/{self._names[param]}"] = tensor
        return found

    def without_state(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that have no state among the tensors of a checkpoint, as they had no
        gradient yet."""
        have = {key.partition("/")[2] for key in tensors}
        return sorted(set(self._names.values()) - have)

    def blank(self, stateless: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors like those of `tensors` in a run that continues, to be filled."""
        without = set(stateless)
        return {
            f"{key}/{self._names[param]}": torch.empty_like(tensor)
            for param in self._params()
            if self._names[param] not in without
            for key, tensor in self._layout(param).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned; raise UserError, and change nothing, if it is another optimiser's."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            slot, _, name = key.partition("/")
            by_name.setdefault(name, {})[slot] = tensor
        params = {self._names[param]: param for param in self._params()}
        if odd := sorted(by_name.keys() - params.keys()):
            raise self._misfit(f"{odd[0] or min(tensors)} is not part of it")
        for name, slots in by_name.items():
            for slot, like in self._layout(params[name]).items():
                if slot not in slots:
                    raise self._misfit(f"{slot}/{name} is missing")
                if (slots[slot].shape, slots[slot].dtype) != (like.shape, like.dtype):
                    raise self._misfit(
                        f"{slot}/{name} is {slots[slot].dtype} {list(slots[slot].shape)}, expected {like.dtype} "
                        f"{list(like.shape)}"
                    )
        if self._optimiser is not None:
            self._optimiser.state.clear()
            for name, slots in by_name.items():
                param = params[name]
                self._optimiser.state[param] = dict(_as_value(slot, tensor, param) for slot, tensor in slots.items())

    def _params(self) -> list[nn.Parameter]:
        groups = [] if self._optimiser is None else self._optimiser.param_groups
        return [param for group in groups for param in group["params"]]

    def _as_tensor(self, slot: Any, value: Any) -> tuple[str, Tensor]:
        if not isinstance(slot, str) or "/" in slot or ":" in slot:
            raise self._refused(f"has a state called {slot!r}, which cannot be saved: use a plain name")
        if isinstance(value, Tensor):
            return slot, value.detach()
        if value is None:
            return f"{slot}:{_NONE}", torch.empty(0, dtype=torch.uint8)
        for mark, (kind, dtype) in _MARKS.items():
            if type(value) is kind:
                return f"{slot}:{mark}", torch.tensor(value, dtype=dtype)
        raise self._refused(f"keeps a {type(value).__name__} in its state ({slot}): only tensors and numbers are saved")

    def _layout(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return what the first step of a copy of a parameter leaves as its state."""
        trial = nn.Parameter(param.detach().clone())
        optimiser = self._built([{"params": [trial]}])
        trial.grad = torch.zeros_like(trial)
        with _random_numbers_kept():
            optimiser.step()
        return dict(self._as_tensor(slot, value) for slot, value in optimiser.state.get(trial, {}).items())

    # --- trials -----------------------------------------------------------------------------------------------------

    def _built(self, groups: list[dict[str, Any]]) -> Any:
        try:
            return self._cls([dict(group) for group in groups], lr=1e-3, **self._options)
        except PodiumError:
            raise
        except Exception as error:
            raise UserError(f"optim.options do not fit {self.shown}: {describe(error)}") from error

    def _check_resumes(self, groups: list[dict[str, Any]], *, divided: bool) -> None:
        """Raise UserError unless a few steps of copies, continued from a copied state, end with the same bits.
        `divided`: other instances step other parameters, so that these may not influence each other."""
        smallest = [
            {**group, "params": sorted(group["params"], key=lambda param: param.numel())[:2]} for group in groups
        ]
        with _random_numbers_kept():
            trial = _Trial(self, smallest)
            for number in range(3):
                trial.step(number)
            changed = [
                key
                for before, after in zip(trial.options, trial.optimiser.param_groups, strict=True)
                for key in after
                if key not in ("params", "lr") and not _same(before.get(key), after[key])
            ]
            if changed:
                raise self._refused(f"changes {changed[0]} of its groups, which is not saved: keep it in state[param]")
            again = _Trial(self, [{**group, "params": list(group["params"])} for group in trial.groups], trial)
            for number in range(3, 5):
                trial.step(number)
                again.step(number)
            if not trial.equals(again):
                raise self._refused(
                    "does not continue to the bit from state[param]: it keeps state elsewhere, or draws random numbers"
                )
            if divided:
                parts = [
                    _Trial(self, [{**group, "params": [param]}]) for group in smallest for param in group["params"]
                ]
                for part in parts:
                    for number in range(5):
                        part.step(number)
                if any(not torch.equal(a, b) for a, b in zip(trial.params, (p.params[0] for p in parts), strict=True)):
                    raise self._refused(
                        "steps parameters depending on each other, so that they cannot be divided between instances: "
                        "set parallel.shard=none and parallel.stages=1"
                    )

    def _refused(self, reason: str) -> UserError:
        return UserError(f"optim.name = {self.shown}: the class {reason}")

    def _misfit(self, reason: str) -> UserError:
        return UserError(f"the saved optimiser state does not belong to {self.shown} with this model: {reason}")


class _Trial:
    """A user's optimiser of copies of some parameters, with made-up gradients; `after`: one to continue from."""

    def __init__(self, own: OwnOptimiser, groups: list[dict[str, Any]], after: "_Trial | None" = None) -> None:
        self._own = own
        self.groups = [
            {**group, "params": [nn.Parameter(param.detach().clone()) for param in group["params"]]} for group in groups
        ]
        self.params = [param for group in self.groups for param in group["params"]]
        self.optimiser = own._built(self.groups)
        self.options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimiser.param_groups
        ]
        if after is not None:
            for theirs, param in zip(after.params, self.params, strict=True):
                if theirs in after.optimiser.state:
                    saved = [own._as_tensor(slot, value) for slot, value in after.optimiser.state[theirs].items()]
                    self.optimiser.state[param] = dict(_as_value(slot, tensor, param) for slot, tensor in saved)

    def step(self, number: int) -> None:
        for param in self.params:
            count = torch.arange(param.numel(), dtype=param.dtype, device=param.device).view(param.shape)
            param.grad = torch.empty_like(param).copy_(torch.sin(count + number + 1))
        try:
            self.optimiser.step()
        except PodiumError:
            raise
        except Exception as error:
            raise UserError(f"optim.name = {self._own.shown}: its step fails: {describe(error)}") from error
        if any(not isinstance(key, Tensor) for key in self.optimiser.state):
            raise self._own._refused("keeps state outside of that of parameters, which is not saved")
        for slots in self.optimiser.state.values():
            for slot, value in slots.items():
                self._own._as_tensor(slot, value)

    def equals(self, other: "_Trial") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.params, other.params, strict=True))


def check_class(cls: Any, name: str) -> None:
    """Raise UserError unless this is an optimiser that steps without a closure and has a learning rate."""
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        raise UserError(f"optim.name = {name}: expected a class derived from torch.optim.Optimizer")
    needed = [
        argument.name
        for argument in list(inspect.signature(cls.step).parameters.values())[1:]
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise UserError(
            f"optim.name = {name}: its step needs a {needed[0]}, and an update computes its gradients once: choose an "
            "optimiser that steps without"
        )
    if not _accepts(cls, "lr"):
        raise UserError(f"optim.name = {name}: the class takes no lr, which the schedule sets: give it that argument")


def num_own_slots(cls: Any, name: str, options: Mapping[str, Any]) -> int:
    """Return how many numbers a user's optimiser stores for every weight, tried on a small one."""
    param = nn.Parameter(torch.ones(2, 3))
    group = {"params": [param], "weight_decay": None, "lr_scale": 1.0}
    own = OwnOptimiser(cls, name, options, [group], {param: "weight"}, {"weight"})
    return round(sum(tensor.numel() for tensor in own.blank([]).values()) / param.numel())


class OwnShape:
    """A user's schedule: the fraction of the full learning rate at an update, from the end of the warm-up on."""

    def __init__(self, function: Any, name: str, total_updates: int) -> None:
        if not callable(function) or inspect.isclass(function):
            raise UserError(f"schedule.name = {name}: expected a function (update, total_updates) -> fraction")
        self._function: Callable[[int, int], Any] = function
        self._name, self._total = name, total_updates
        try:
            inspect.signature(function).bind(0, total_updates)
        except TypeError:
            raise UserError(
                f"schedule.name = {name}: the function must take two arguments, the update and the total number of "
                "updates"
            ) from None
        for update in {0, total_updates - 1}:
            if self(update) != self(update):
                raise UserError(
                    f"schedule.name = {name}: update {update} has another rate when asked again: the function may "
                    "depend on nothing but its arguments"
                )

    def __call__(self, update: int) -> float:
        value = self._function(update, self._total)
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
            raise UserError(
                f"schedule.name = {self._name}: it returned {value!r} for update {update}: expected a finite number, "
                "at least 0"
            )
        return float(value)


def _accepts(cls: Any, argument: str) -> bool:
    return argument in inspect.signature(cls).parameters


def _tuples(value: Any) -> Any:
    """Return a value of YAML as code expects it: fixed lists, as `betas`, are tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _as_value(slot: str, tensor: Tensor, param: Tensor) -> tuple[str, Any]:
    """Return the slot and the value that `OwnOptimiser.tensors` has made into a tensor."""
    plain, _, mark = slot.partition(":")
    if mark == _NONE:
        return plain, None
    if mark in _MARKS:
        return plain, _MARKS[mark][0](tensor.item())
    # As the optimiser itself makes them: in the memory layout of the parameter where the shape is the same. Scalars
    # stay on the host, where torch's own count their steps.
    if tensor.shape == param.shape and tensor.dim():
        return plain, torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return plain, tensor.detach().clone() if not tensor.dim() else tensor.to(param.device, copy=True)


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return isinstance(before, Tensor) and isinstance(after, Tensor) and torch.equal(before, after)
    return bool(before == after)


def _random_numbers_kept() -> Any:
    """Return a context after which torch's random numbers go on as if nothing had drawn any."""
    return torch.random.fork_rng(devices=[])
