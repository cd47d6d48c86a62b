"""The reduction by torch's DistributedDataParallel: `engine.reduction: fast`. Bits depend on the number of instances.

Gradients of the local replicas accumulate in `param.grad`; the last backward pass all-reduces them. The count, the
request to stop and the floating-point buffers are all-reduced in one small message.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from podium.distributed.instances import Instances
from podium.distributed.reduction.tree import Tensors, TreeSum, add_in_place, take_gradients
from podium.errors import UserError


class DdpReduction:
    """Sums over all replicas, in whatever order is fastest."""

    def __init__(
        self,
        model: nn.Module,
        params: list[nn.Parameter],
        buffers: list[Tensor],
        instances: Instances,
        waited: Callable[[float], None],
    ) -> None:
        self._prepare_message(params, buffers, instances, waited)
        self._ddp = DistributedDataParallel(
            model,
            process_group=instances.group(),
            forward_sync_buffers=False,  # they are averaged instead: see `start`
            gradient_as_bucket_view=True,
        )
        self.model: nn.Module = self._ddp

    def _prepare_message(
        self,
        params: list[nn.Parameter],
        buffers: list[Tensor],
        instances: Instances,
        waited: Callable[[float], None],
    ) -> None:
        """Set up everything but the reduction of gradients."""
        self._instances = instances
        self._params, self._buffers, self._waited = params, buffers, waited
        self._message = self._values = torch.empty(0)
        self._works: list[dist.Work | None] = []
        self.buffer_totals: list[Tensor] = []

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self._ddp.no_sync()

    def take(self) -> Tensors:
        return take_gradients([], self._buffers)

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        totals = self.take()
        for sums in reversed(tree.partial):
            add_in_place(totals, sums)
        values = [total.double().flatten() for total in totals if total is not None]
        self._message = torch.tensor([count, stop], dtype=torch.float64)
        if self._instances.device.type == "cpu":
            self._message = torch.cat([self._message, *values])
        self._works = [dist.all_reduce(self._message, group=self._instances.group(), async_op=True)]
        if self._instances.device.type != "cpu" and values:  # over the device's own backend, as the host does not look
            self._values = torch.cat(values)
            self._works.append(dist.all_reduce(self._values, group=self._instances.group(), async_op=True))

    def leave(self) -> None:
        pass

    def finish(self) -> tuple[Tensor | float, bool]:
        if any(param.grad is None for param in self._params):
            # DistributedDataParallel would silently skip the reduction of this update, and fail in the next.
            raise UserError(
                "engine.reduction=fast needs a gradient for every parameter, and some of this model have none: "
                "use engine.reduction=exact, which allows that"
            )
        began = time.perf_counter()
        for work in self._works:
            assert work is not None
            work.wait()
        self._waited(time.perf_counter() - began)
        count, stop = self._message[:2].tolist()
        on_cpu = self._instances.device.type == "cpu"
        parts = (self._message[2:] if on_cpu else self._values).split([buffer.numel() for buffer in self._buffers])
        self.buffer_totals = [
            part.view(buffer.shape).to(buffer) for part, buffer in zip(parts, self._buffers, strict=True)
        ]
        # DistributedDataParallel leaves the mean over the instances in `param.grad`, not the sum.
        divisor = count / self._instances.count
        return torch.tensor(divisor, dtype=torch.float32) if on_cpu else divisor, bool(stop)
