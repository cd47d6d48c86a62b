"""`parallel.shard: parameters`: no instance has all weights, gradients or optimiser state. On torch's `fully_shard`.

Every instance has some rows of each parameter, and of its gradient and state. Before a block of the model runs, its
weights are gathered, and let go of afterwards; gradients are summed as they come, each instance keeping its rows.
torch adds in an order that depends on the number of instances: for `engine.reduction: fast` alone.

Whatever needs a plain model (validation, checkpoints, pictures) borrows one from `whole`, for as long as it uses it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.engine.fast import Fast
from podium.engine.instances import Instances
from podium.engine.lost import naming_who_is_lost
from podium.errors import UserError


class SpreadModel:
    """A model whose parameters are spread by rows over the instances, from the moment this is made."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], instances: Instances) -> None:
        """Collective. `model` is changed in place; weights are gathered for one of `blocks` at a time."""
        from torch.distributed.device_mesh import DeviceMesh  # torch's compiler comes with it, which takes long
        from torch.distributed.fsdp import fully_shard

        self.model = model
        self._instances = instances
        empty = {id(param): _empty_like(param) for param in model.parameters()}
        # A plain model for `whole`; what is in the memo is taken instead of a copy.
        self._plain = copy.deepcopy(model, dict(empty))
        self._empty = dict(self._plain.named_parameters(remove_duplicate=False))
        mesh = DeviceMesh.from_group(instances.group(), next(model.parameters()).device.type)
        for block in _apart(blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        #: the rows of this instance, by name, in the memory of the model's own; of parameters that are trained
        self.shards = Shards({name: p for name, p in model.named_parameters() if p.requires_grad}, instances)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Collective. A plain model of all weights and buffers, on every instance; gone afterwards."""
        with torch.no_grad(), naming_who_is_lost(None):
            values = {name: nn.Parameter(param.full_tensor()) for name, param in self.model.named_parameters()}  # type: ignore[attr-defined]
        ties = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in self.model.named_parameters()}
        for name in self._empty:
            _put(self._plain, name, values[first[id(ties[name])]])
        for own, buffer in zip(self._plain.buffers(), self.model.buffers(), strict=True):
            own.copy_(buffer)
        self._plain.train(self.model.training)
        try:
            yield self._plain
        finally:
            for name, param in self._empty.items():
                _put(self._plain, name, param)

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """Of all gradients, from that of this instance's rows."""
        squares = norm.double().square().cpu()
        with naming_who_is_lost(None):
            dist.all_reduce(squares, group=self._instances.group())
        return squares.sqrt().to(norm)


class Shards(nn.Module):
    """The rows of this instance as parameters, by the names of the whole ones: what the optimiser is made for."""

    def __init__(self, params: dict[str, nn.Parameter], instances: Instances) -> None:
        super().__init__()
        self.spread = params
        self.own = {name: nn.Parameter(param.to_local()) for name, param in params.items()}  # type: ignore[attr-defined]
        counts = instances.gather(torch.tensor([len(own) for own in self.own.values()]))
        before = counts[: instances.index].sum(0).tolist()
        #: (first row, rows in all)
        self.rows = {name: (first, len(params[name])) for name, first in zip(params, before, strict=True)}

    def named_parameters(self, *args: object, **keys: object) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.own.items())


class SpreadSums(Fast):
    """Sums over all replicas: each instance has those of its rows."""

    def __init__(
        self, spread: SpreadModel, buffers: list[Tensor], instances: Instances, waited: Callable[[float], None]
    ) -> None:
        self._take_message(list(spread.shards.own.values()), buffers, instances, waited)
        self._spread = spread
        self.model = spread.model

    def micro_batch(self, last: bool) -> AbstractContextManager:
        # Gradients are summed after every micro-batch: to wait for the last would take the memory of all of them.
        return nullcontext()

    def finish(self) -> tuple[Tensor, bool]:
        shards = self._spread.shards
        for name, param in shards.spread.items():
            grad, param.grad = param.grad, None
            shards.own[name].grad = None if grad is None else grad.to_local()  # type: ignore[attr-defined]
        return super().finish()


def check_spread(model: nn.Module, reduction: str, optimiser: str, compile: bool, scale: object) -> None:
    """UserError where a recipe asks for what rows cannot be trained with."""
    asked, instead = "parallel.shard=parameters", "parallel.shard=optimiser takes it"
    if reduction != "fast":
        raise UserError(
            f"{asked} adds gradients in torch's order, which depends on the number of instances: it needs "
            "engine.reduction=fast; parallel.shard=optimiser keeps the bits"
        )
    if optimiser in ("lars", "lamb"):
        raise UserError(f"{asked} cannot be with optim.name={optimiser}, which needs whole tensors: {instead}")
    if compile:
        raise UserError(f"{asked} cannot be with engine.compile=true: {instead}")
    if scale == "auto":
        raise UserError(f"{asked} cannot be with precision.loss_scale=auto: give a number, or {instead}")
    for name, param in model.named_parameters():
        if not param.is_contiguous():
            raise UserError(f"{asked} needs engine.layout=default: the rows of {name} are not one after the other")


def _apart(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks with parameters that no other one has; tied ones stay with the model, which has its own all the time."""
    uses = Counter(id(param) for block in blocks for param in block.parameters())
    return [
        block
        for block in blocks
        if any(True for _ in block.parameters()) and all(uses[id(param)] == 1 for param in block.parameters())
    ]


def _empty_like(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)


def _put(model: nn.Module, name: str, param: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, param)
