"""Whether a user's optimiser keeps Podium's promises, tried on copies of a few parameters before the training.

A few steps cannot show everything: `podium check` tries it on the training itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import PodiumError
from podium.optim.own_state import FIRST_LR, OwnForm, OwnStepper

_NUM_BEFORE, _NUM_AFTER = 3, 2


def try_steps(form: OwnForm, groups: list[dict[str, Any]], *, divided: bool) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Return the state that a few steps leave for some of the parameters; raise UserError where an optimiser that
    continues from it would end with other bits, or does not follow the learning rate.

    `divided`: instances step different parameters, so that these may not influence each other.
    """
    few = [{**group, "params": _few(group["params"])} for group in groups]
    with torch.random.fork_rng(devices=[]):
        trial, faster = _Trial(form, few), _Trial(form, few)
        for number in range(_NUM_BEFORE):
            trial.step(number)
            faster.step(number, 2 * FIRST_LR)
        if trial.equals(faster):
            raise form.refused("does not use the lr of its groups, which the schedule sets")
        state = trial.stepper.taken()
        again = _Trial(form, trial.groups)
        again.stepper.give_back(dict(zip(again.params, (state[param] for param in trial.params), strict=True)))
        kept = {
            param: {name: tensor.clone() for name, tensor in state[copied].items()}
            for param, copied in zip((param for group in few for param in group["params"]), trial.params, strict=True)
        }
        for number in range(_NUM_BEFORE, _NUM_BEFORE + _NUM_AFTER):
            trial.step(number)
            again.step(number)
        if not trial.equals(again):
            raise form.refused(
                "does not continue to the bit from what is saved, state[param] and the numbers in its groups: it keeps "
                "something elsewhere, or draws random numbers"
            )
        if divided and not _steps_alone(form, few, trial):
            raise form.refused(
                "steps parameters depending on each other, so that they cannot be divided between instances: set "
                "parallel.shard=none and parallel.stages=1"
            )
    return kept


def _steps_alone(form: OwnForm, groups: list[dict[str, Any]], together: "_Trial") -> bool:
    """Return whether each parameter ends with the same bits when it is the only one."""
    alone = [_Trial(form, [{**group, "params": [param]}]) for group in groups for param in group["params"]]
    for one in alone:
        for number in range(_NUM_BEFORE + _NUM_AFTER):
            one.step(number)
    return all(torch.equal(param, one.params[0]) for param, one in zip(together.params, alone, strict=True))


def _few(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the two smallest parameters and the smallest of each number of dimensions, which may be treated apart."""
    by_size = sorted(params, key=lambda param: param.numel())
    few = by_size[:2]
    for param in by_size[2:]:
        if all(param.dim() != one.dim() for one in few):
            few.append(param)
    return few


class _Trial:
    """A user's optimiser of copies of parameters, with made-up gradients."""

    def __init__(self, form: OwnForm, groups: list[dict[str, Any]]) -> None:
        self._form = form
        self.groups = [
            {**group, "params": [nn.Parameter(param.detach().clone()) for param in group["params"]]} for group in groups
        ]
        self.stepper = OwnStepper(form, self.groups)
        self.params = self.stepper.params

    def step(self, number: int, lr: float = FIRST_LR) -> None:
        for group in self.stepper.groups:
            group["lr"] = lr
        for param in self.params:
            count = torch.arange(param.numel(), dtype=param.dtype, device=param.device).view(param.shape)
            param.grad = torch.empty_like(param).copy_(torch.sin(count + number + 1))
        try:
            self.stepper.optimiser.step()
        except PodiumError:
            raise
        except Exception as error:
            raise self._form.failed("its step fails", error) from error
        self.stepper.taken()  # tells what cannot be saved

    def equals(self, other: "_Trial") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.params, other.params, strict=True))
