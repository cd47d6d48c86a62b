"""`parallel.shard: parameters`: no instance has all weights, gradients or optimiser state. Uses torch's `fully_shard`.

Every instance has some rows of each parameter, and of its gradient and optimiser state. The weights of a block are
gathered before it runs and freed afterwards; gradients are reduced as they are computed, and each instance keeps its
rows. torch adds in an order that depends on the number of instances, so this needs `engine.reduction: fast`.

Code that needs a plain model (validation, checkpoints, pictures) enters `whole` for as long as it uses the model.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.lost import naming_lost_instance
from podium.distributed.reduction.ddp import DdpReduction
from podium.errors import UserError
from podium.recipe.section import is_own_name
from podium.topology import Blocks


class ShardedModel:
    """A model whose parameters are sharded by rows over the instances."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], instances: Instances) -> None:
        """Shard `model` in place; weights will be gathered for one of `blocks` at a time. Collective."""
        from torch.distributed.device_mesh import DeviceMesh  # loads torch's compiler, which takes long
        from torch.distributed.fsdp import fully_shard

        self.model = model
        self._instances = instances
        empty = {id(param): _empty_like(param) for param in model.parameters()}
        # The plain model for `whole`. Parameters are in the memo, so they are not copied.
        self._plain = copy.deepcopy(model, dict(empty))
        self._empty = dict(self._plain.named_parameters(remove_duplicate=False))
        mesh = DeviceMesh.from_group(instances.group(), next(model.parameters()).device.type)
        for block in _untied(blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        #: this instance's rows of the trainable parameters, by name, in the same memory as the model's own
        self.shards = Shards({name: p for name, p in model.named_parameters() if p.requires_grad}, instances)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Yield a plain model with all weights and buffers, on every instance; freed on exit. Collective."""
        with torch.no_grad(), naming_lost_instance(None):
            values = {name: nn.Parameter(param.full_tensor()) for name, param in self.model.named_parameters()}  # type: ignore[attr-defined]
        ties = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in self.model.named_parameters()}
        for name in self._empty:
            _set_param(self._plain, name, values[first[id(ties[name])]])
        for own, buffer in zip(self._plain.buffers(), self.model.buffers(), strict=True):
            own.copy_(buffer)
        self._plain.train(self.model.training)
        try:
            yield self._plain
        finally:
            for name, param in self._empty.items():
                _set_param(self._plain, name, param)

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from the norm of this instance's rows."""
        squares = norm.double().square()
        with naming_lost_instance(None):
            dist.all_reduce(squares, group=self._instances.group())
        return squares.sqrt().to(norm)


class Shards(nn.Module):
    """This instance's rows as parameters, under the names of the whole ones; the optimiser is built for these."""

    def __init__(self, params: dict[str, nn.Parameter], instances: Instances) -> None:
        super().__init__()
        self.sharded = params
        self.own = {name: nn.Parameter(param.to_local()) for name, param in params.items()}  # type: ignore[attr-defined]
        counts = instances.gather(torch.tensor([len(own) for own in self.own.values()]))
        before = counts[: instances.index].sum(0).tolist()
        #: (first row, rows in all)
        self.rows = {name: (first, len(params[name])) for name, first in zip(params, before, strict=True)}

    def named_parameters(self, *args: object, **keys: object) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.own.items())


class ShardedReduction(DdpReduction):
    """Sums over all replicas, of which each instance gets its own rows."""

    def __init__(
        self, sharded: ShardedModel, buffers: list[Tensor], instances: Instances, waited: Callable[[float], None]
    ) -> None:
        self._prepare_message(list(sharded.shards.own.values()), buffers, instances, waited)
        self._sharded = sharded
        self.model = sharded.model

    def micro_batch(self, last: bool) -> AbstractContextManager:
        # Gradients are reduced after every micro-batch: waiting for the last would need memory for all of them.
        return nullcontext()

    def finish(self) -> tuple[Tensor | float, bool]:
        shards = self._sharded.shards
        for name, param in shards.sharded.items():
            grad, param.grad = param.grad, None
            shards.own[name].grad = None if grad is None else grad.to_local()  # type: ignore[attr-defined]
        return super().finish()


def check_fully_sharded(model: nn.Module, reduction: str, optimiser: str, compile: bool, scale: object) -> None:
    """Raise UserError where a recipe combines parameter sharding with something it does not support."""
    asked, instead = "parallel.shard=parameters", "use parallel.shard=optimiser, which can"
    if reduction != "fast":
        raise UserError(
            f"{asked} adds gradients in torch's order, which depends on the number of instances: set "
            "engine.reduction=fast, or use parallel.shard=optimiser, which keeps the bits"
        )
    if optimiser in ("lars", "lamb"):
        raise UserError(f"{asked} cannot be combined with optim.name={optimiser}, which needs whole tensors: {instead}")
    if is_own_name(optimiser):
        raise UserError(
            f"{asked} cannot be combined with optim.name={optimiser}, which may need whole tensors: {instead}"
        )
    if compile:
        raise UserError(f"{asked} cannot be combined with engine.compile=true: {instead}")
    if scale == "auto":
        raise UserError(f"{asked} cannot be combined with precision.loss_scale=auto: give a number, or {instead}")
    for name, param in model.named_parameters():
        if not param.is_contiguous():
            raise UserError(f"{asked} needs engine.layout=default: the rows of {name} are not contiguous in memory")


def check_equal_blocks(num_replicas: int, num_instances: int) -> None:
    """Raise UserError unless all instances carry equally many replicas: each gathers weights for every micro-batch."""
    Blocks(alike=True).check(num_replicas, num_instances)


def _untied(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another one; tied blocks stay with the model's own parameters,
    which are gathered for the whole pass."""
    uses = Counter(id(param) for block in blocks for param in block.parameters())
    return [
        block
        for block in blocks
        if any(True for _ in block.parameters()) and all(uses[id(param)] == 1 for param in block.parameters())
    ]


def _empty_like(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)


def _set_param(model: nn.Module, name: str, param: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, param)
