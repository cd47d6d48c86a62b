"""The optimiser's tensors as checkpoints hold them, by name. `checkpoint.py` saves and restores them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from podium.errors import UserError
from podium.optim.optimisers import Optimiser


def state_tensors(optimiser: Optimiser) -> dict[str, Tensor]:
    """The state of what this instance holds by parameter name, `exp_avg/<name>` and so on, and `step`. These tensors
    live: the next step changes them."""
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
    """(first row, rows in all) of those of `state_tensors` that are some rows alone."""
    return {
        key: optimiser.rows[name]
        for key in state_tensors(optimiser)
        if (name := key.partition("/")[2]) in optimiser.rows
    }


def load_state_tensors(optimiser: Optimiser, tensors: Mapping[str, Tensor]) -> None:
    """Continue from what `state_tensors` returned; UserError, and nothing changed, when it is another optimiser's."""
    state = state_tensors(optimiser)
    check_state(optimiser, state, tensors)
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(tensors[key])
    state_loaded(optimiser, state)


def state_loaded(optimiser: Optimiser, state: Mapping[str, Tensor]) -> None:
    """After a checkpoint was copied into the tensors of `state_tensors`: devices agree on the number of steps."""
    for num_steps in optimiser.num_steps.values():
        num_steps.copy_(state["step"])


def check_state(optimiser: Optimiser, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """UserError where `tensors` cannot be loaded into `state`, of which only names, shapes and types matter."""
    if state.keys() != tensors.keys():
        odd = min(state.keys() ^ tensors.keys())
        raise UserError(
            f"the saved optimiser state is not that of {optimiser.name} for this model: "
            f"{odd} is {'missing' if odd in state else 'not part of it'}"
        )
    for key, tensor in state.items():
        if (tensors[key].shape, tensors[key].dtype) != (tensor.shape, tensor.dtype):
            raise UserError(
                f"the saved optimiser state does not fit this model: {key} is {tensors[key].dtype} "
                f"{list(tensors[key].shape)}, expected {tensor.dtype} {list(tensor.shape)}"
            )
