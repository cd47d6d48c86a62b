"""Checksums of weights: `weights_sha256` of a run, the checksums of single tensors that its records are made from, and
the check that all instances start from the same bits."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.errors import UserError
from podium.kernels.in_order import in_order


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


def tensor_xxh3(tensor: Tensor) -> str:
    """Digest the type, the shape and every bit of a tensor, wherever and in whatever layout its values lie: 16
    hexadecimal digits."""
    values = in_order(tensor)
    digest = xxhash.xxh3_64(f"{values.dtype} {tuple(values.shape)}\n".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Digest named tensors one by one; one that has several names is read once."""
    known: dict[tuple, str] = {}
    digests = {}
    for name, tensor in tensors:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known or not tensor.numel():
            known[place] = tensor_xxh3(tensor)
        digests[name] = known[place]
    return digests


def joined_digest(digests: Mapping[str, str]) -> str:
    """Digest a model from the digests of its tensors, sorted by name, which may come from several holders."""
    return xxhash.xxh3_64("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def check_equal_weights(model: nn.Module, group: Instances) -> None:
    """Raise UserError unless all instances of `group`, which hold the same part of the model, start from the same
    bits."""
    if group.count > 1:
        digest = bytes.fromhex(weights_sha256(model))
        gathered = group.gather(torch.tensor(list(digest), dtype=torch.uint8))
        if not (gathered == gathered[0]).all():
            raise UserError("instances start from different weights: their data or the machines' arithmetic differs")
