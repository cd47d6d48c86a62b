"""Checksums of weights: `weights_sha256` of a run, and the check that all instances start from the same bits."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.errors import UserError


def weights_sha256(model: nn.Module) -> str:
    """Digest the parameters and buffers on this instance, sorted by name: name, type, shape and every bit."""
    return sha256_of(sorted(local_tensors(model).items()))


def sha256_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Digest named tensors in the given order."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_equal_weights(model: nn.Module, group: Instances) -> None:
    """Raise UserError unless all instances of `group`, which hold the same part of the model, start from the same
    bits."""
    if group.count > 1:
        digest = bytes.fromhex(weights_sha256(model))
        gathered = group.gather(torch.tensor(list(digest), dtype=torch.uint8))
        if not (gathered == gathered[0]).all():
            raise UserError("instances start from different weights: their data or the machines' arithmetic differs")
