"""Messages of tensors on an accelerator, which travel by its own backend of torch.distributed (NCCL, XCCL).

Such backends ignore tags, and start messages in the order in which each instance has asked for them: two instances that
both send before they receive would wait for each other for ever. So everything between two waits is posted as one
batch, and all instances post their batches in the same order. Nothing here waits on the host: `wait` makes the current
stream of the device wait.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from podium.errors import UserError

#: (the other instance, by its index in the group; what is sent to it, or where to receive)
Message = tuple[int, Tensor]


def backend_for(device: torch.device) -> str:
    """Return the backends of a group whose instances compute on such a device; those of the CPU are for the control of
    the run. Raise UserError where torch has none for the device."""
    if device.type == "cpu":
        return "gloo"
    own = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    if own == "gloo":
        raise UserError(
            f"several instances on devices of the kind {device.type} cannot exchange tensors, as torch has no backend "
            "for that: train on one instance, or with engine.device=cpu"
        )
    if not dist.is_backend_available(own):
        raise UserError(
            f"several instances on devices of the kind {device.type} need torch's backend {own}, which this torch was "
            "built without: train on one instance, or install a torch that has it"
        )
    return f"cpu:gloo,{device.type}:{own}"


def open_for(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the device's backend of a new group. Collective: later batches may be between some instances only."""
    if device.type != "cpu":
        dist.broadcast(torch.zeros(1, device=device), group=group, group_src=0)


def post(group: dist.ProcessGroup, sent: Sequence[Message], received: Sequence[Message]) -> list[dist.Work]:
    """Post messages as one batch; between two instances, they are matched in their order. Return what to wait for."""
    batch = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=other) for other, tensor in received]
    batch += [dist.P2POp(dist.isend, tensor, group=group, group_peer=other) for other, tensor in sent]
    return dist.batch_isend_irecv(batch) if batch else []
