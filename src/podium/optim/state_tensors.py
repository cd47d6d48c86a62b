"""The optimiser's tensors as checkpoints hold them, by name. `checkpoints/reading.py` saves and restores them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from podium.errors import UserError
from podium.optim.optimisers import Optimiser


def state_tensors(optimiser: Optimiser) -> dict[str, Tensor]:
    """Return the state that this instance holds, as `exp_avg/<parameter>` and so on, and `step`. The tensors are not
    copies: the next step changes them. Of a user's own class, there is none before the first step."""
    if optimiser.own is not None:
        return optimiser.own.tensors()
    state = {
        f"{slot}/{name}": tensor
        for param, name in optimiser.names.items()
        if param in optimiser.state
        for slot, tensor in optimiser.state[param].items()
    }
    for num_steps in optimiser.num_steps.values():
        state.setdefault("step", num_steps)  # the same on every device
    return state


def row_places(optimiser: Optimiser) -> dict[str, tuple[int, int]]:
    """Return (first row, total rows) of those of `state_tensors` that hold only some of the rows."""
    return {
        key: optimiser.rows[name]
        for key in state_tensors(optimiser)
        if (name := key.partition("/")[2]) in optimiser.rows
    }


def load_state_tensors(optimiser: Optimiser, tensors: Mapping[str, Tensor]) -> None:
    """Continue from what `state_tensors` returned; if it is another optimiser's, raise UserError and change nothing."""
    if optimiser.own is not None:
        optimiser.own.load(tensors)
        return
    state = state_tensors(optimiser)
    check_state(optimiser, state, tensors)
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(tensors[key])
    state_loaded(optimiser, state)


def state_loaded(optimiser: Optimiser, state: Mapping[str, Tensor]) -> None:
    """Use the tensors of `state_tensors`, which a checkpoint was loaded into: copy the number of steps to all devices,
    or hand the state of a user's own class to it."""
    if optimiser.own is not None:
        optimiser.own.load(state)
    for num_steps in optimiser.num_steps.values():
        num_steps.copy_(state["step"])


def check_state(optimiser: Optimiser, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if `tensors` cannot be loaded into `state`, of which only names, shapes and types matter."""
    if state.keys() != tensors.keys():
        odd = min(state.keys() ^ tensors.keys())
        raise UserError(
            f"the saved optimiser state does not belong to {optimiser.name} with this model: "
            f"{odd} is {'missing' if odd in state else 'not part of it'}"
        )
    for key, tensor in state.items():
        if (tensors[key].shape, tensors[key].dtype) != (tensor.shape, tensor.dtype):
            raise UserError(
                f"the saved optimiser state does not fit this model: {key} is {tensors[key].dtype} "
                f"{list(tensors[key].shape)}, expected {tensor.dtype} {list(tensor.shape)}"
            )
