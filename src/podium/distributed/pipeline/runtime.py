"""One replica over several devices: each instance holds a part of the model, and micro-batches pass through them.

torch's stages run the parts and exchange activations and gradients (`torch_pipelining.py`), in the order of
`schedule.py`. This module adds: the first and the last part on one device, random numbers that depend on the position
of a micro-batch, gradients of weights shared by both parts added in the order of an uncut model, and evaluation, where
micro-batches differ in size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.contract import Batch, Loss, Workload
from podium.distributed.instances import Instances
from podium.distributed.lost import naming_lost_instance
from podium.distributed.pipeline.block_probe import FixedOutput, TensorSpec, as_tuple, model_inputs
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.distributed.pipeline.partition import Split
from podium.distributed.pipeline.schedule import actions
from podium.distributed.pipeline.torch_pipelining import Stage, StageRunner
from podium.layers.loss import scaled
from podium.recipe.sections.parallel import Schedule
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.precision import autocast_blocks, cast_inputs, cast_outputs

_TAG = 2
#: tensors, kept until they are sent, and their messages
_Sent = tuple[tuple[Tensor, ...], list[dist.Work | None]]


class Pipeline:
    """This instance's parts of the model, in the pipeline group that holds the stages of the same replicas."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        workload: Workload,
        split: Split,
        inputs: tuple[Tensor, ...],
        outputs: Sequence[tuple[TensorSpec, ...]],
        group: Instances,
        *,
        micro_batch: int,
        num_micro_batches: int,
        schedule: Schedule,
        precision: PrecisionSection,
        device: torch.device,
        param_order: Sequence[str],
    ) -> None:
        """Set up the parts and torch's stages. Collective in the group.

        `inputs` are those of the first block, `outputs` those of every block; `param_order` are the names of all
        trainable parameters, in the order in which an uncut model computes the norms of their gradients.
        """
        self._model, self._workload, self.group, self._device = model, workload, group, device
        self.split = split
        last = len(split.parts) - 1
        #: the outputs of each part
        self._outputs = [outputs[part.stop - 1] for part in split.parts]
        passed = [inputs, *(_meta_tensors(specs, micro_batch) for specs in self._outputs)]
        self._parts = {
            number: Part(
                [blocks[block] for block in split.parts[number]],
                self._outputs[number - 1] if number else (),
                self._outputs[number],
                precision,
                device,
                first=number == 0,
                last=number == last,
            )
            for number in split.parts_of(group.index)
        }
        self._tied = _Tied(self._parts.get(0))
        stages = [
            Stage(part, number, last + 1, device, input_args=passed[number], output_args=passed[number + 1],
                  group=group.group())
            for number, part in self._parts.items()
        ]  # fmt: skip
        for stage in stages:
            stage.begin, stage.inputs, stage.around_backward = self._begin_micro_batch, self._inputs, self._tied.around
        self._runner = StageRunner(stages, actions(schedule, split.num_devices, num_micro_batches), self._loss)
        self._param_order = {name: place for place, name in enumerate(param_order)}
        self._begin: Callable[[int], None] = lambda index: None
        self._batches: Sequence[Batch] = ()
        self._losses: list[Loss] = []
        self._scale: Tensor | float = 1.0

    @property
    def has_losses(self) -> bool:
        """Whether this instance has samples and losses: device 0 alone does."""
        return self.group.index == 0

    def run(self, batches: Sequence[Batch], begin: Callable[[int], None], scale: Tensor | float) -> list[Loss]:
        """Run one replica's micro-batches forward and backward; gradients accumulate in `param.grad`.

        `begin(index)` is called before any part runs micro-batch `index`. Only device 0 returns losses.
        """
        self._begin, self._batches, self._losses, self._scale = begin, batches, [], scale
        self._runner.run()
        self._tied.check_done()
        losses, self._losses, self._batches = self._losses, [], ()
        return losses

    def _begin_micro_batch(self, index: int) -> None:
        self._begin(index)

    def _inputs(self, index: int) -> tuple[Tensor, ...]:
        return model_inputs(self._workload, self._batches[index], training=True)

    def _loss(self, output: Any, index: int) -> Tensor:
        self._begin(index)  # random numbers drawn before the loss calls the model are the same as for the first part
        loss = self._workload.loss(FixedOutput(output, training=True), self._batches[index])
        self._losses.append(loss)
        return scaled(loss.sum, self._scale)

    # --- what all stages of a replica have to agree on -------------------------------------------------------------

    def agree_on(self, count: int, stop: bool) -> tuple[int, bool]:
        """Return (the count of items on device 0, whether any device asks to stop)."""
        gathered = self.group.gather(torch.tensor([count, int(stop)]))
        return int(gathered[0, 0]), bool(gathered[:, 1].any())

    def all_norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return the gradient norms of all parameters, in the order of an uncut model, from those of this device."""
        ours = torch.full((len(self._param_order),), -1.0, dtype=torch.float64)
        ours[[self._param_order[name] for name in names]] = norms.cpu().double()
        every = self.group.gather(ours)
        # Only the device that holds a parameter has its norm, which may be NaN.
        present = every != -1
        found = torch.where(present, every, 0.0).sum(0)[present.any(0)]
        return found.to(norms.dtype).to(norms.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the whole model, sorted by name, on device 0; the others send what they hold."""
        held = local_tensors(self._model)
        all_ = sorted(self._model.state_dict().items())
        holders = self.group.gather(torch.tensor([name in held for name, _ in all_])).int().argmax(0).tolist()
        for (name, tensor), whose in zip(all_, holders, strict=True):
            if self.group.index == 0:
                received = held[name] if name in held else torch.empty(tensor.shape, dtype=tensor.dtype)
                if whose:
                    self._message(dist.recv, received, whose)
                yield name, received
            elif self.group.index == whose:
                self._message(dist.send, held[name].detach().cpu().contiguous(), 0)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def losses(self, batches: Iterable[Batch]) -> Iterator[Loss]:
        """Yield the losses of the micro-batches in order, in evaluation mode: on device 0, while the other devices call
        `forward_parts`. Several micro-batches are in flight at a time."""
        last = len(self.split.parts) - 1
        # The feed reuses its buffers, so micro-batches in flight are copied.
        remaining = ({name: rows.clone() for name, rows in batch.items()} for batch in batches)
        while group := list(islice(remaining, 2 * self.split.num_devices)):
            sent = [
                self._send(0, self._parts[0](*model_inputs(self._workload, batch, training=False))) for batch in group
            ]
            for batch in group:
                size = len(next(iter(batch.values())))
                output = self._parts[last](*self._received(last, size))
                yield self._workload.loss(FixedOutput(output, training=False), batch)
            self._wait(sent)

    def forward_parts(self, sizes: Iterable[int]) -> None:
        """Run the evaluation of `losses` on the other devices, which only need the size of each micro-batch."""
        (number,) = self._parts
        for size in sizes:
            self._wait([self._send(number, self._parts[number](*self._received(number, size)))])

    def _received(self, part: int, num_samples: int) -> tuple[Tensor, ...]:
        source = self.split.device_of_part(part - 1)
        tensors = tuple(spec.empty(num_samples, self._device) for spec in self._outputs[part - 1])
        for tensor in tensors:
            self._message(dist.recv, tensor, source)
        return tensors

    def _send(self, part: int, output: Any) -> _Sent:
        tensors = as_tuple(output)
        target = self.split.device_of_part(part + 1)
        with naming_lost_instance(self.group.members[target]):
            messages = [dist.isend(tensor, group=self.group.group(), group_dst=target, tag=_TAG) for tensor in tensors]
        return tensors, messages

    def _wait(self, sent: Iterable[_Sent]) -> None:
        with naming_lost_instance(None):
            for _, messages in sent:
                for message in messages:
                    assert message is not None
                    message.wait()

    def _message(self, kind: Callable[..., Any], tensor: Tensor, other: int) -> None:
        peer = {"group_src": other} if kind is dist.recv else {"group_dst": other}
        with naming_lost_instance(self.group.members[other]):
            kind(tensor, group=self.group.group(), tag=_TAG, **peer)


def _meta_tensors(specs: tuple[TensorSpec, ...], num_samples: int) -> tuple[Tensor, ...]:
    tensors = [spec.empty(num_samples, "meta") for spec in specs]
    return tuple(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors)


class Part(nn.Module):
    """Consecutive blocks of a model, run one after the other."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        precision: PrecisionSection,
        device: torch.device,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._inputs, self._outputs, self._precision, self._device = inputs, outputs, precision, device
        self._first, self._last = first, last

    def forward(self, *args: Tensor) -> Any:
        if self._first:
            values: tuple[Any, ...] = cast_inputs(self._precision, args)
        else:
            values = tuple(spec.from_message(arg) for spec, arg in zip(self._inputs, args, strict=True))
        with autocast_blocks(self._precision, self._device):
            for block in self.blocks:
                values = as_tuple(block(*values))
        if self._last:
            values = cast_outputs(self._precision, values)
        else:
            values = tuple(spec.to_message(value) for spec, value in zip(self._outputs, values, strict=True))
        return values[0] if len(values) == 1 else values


class _Tied:
    """The weights that the first and the last part share, detected when both have a gradient for them.

    An uncut model adds both gradients of a micro-batch to each other, then to those of earlier micro-batches. Here the
    last part's gradient is computed first and held back until the first part has its own.
    """

    def __init__(self, first: nn.Module | None) -> None:
        self._params = list(first.parameters()) if first is not None else []
        self._held: dict[tuple[int, nn.Parameter], Tensor] = {}
        self._known: set[nn.Parameter] = set()
        self._index = -1

    @contextmanager
    def around(self, index: int, first: bool, last: bool) -> Iterator[None]:
        """Surround the backward pass of micro-batch `index` through a part."""
        if first:
            self._index = index
        if not last:
            yield
            return
        before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        yield
        for param, grad in zip(self._params, before, strict=True):
            if param.grad is not None:
                self._held[index, param] = param.grad
                if param not in self._known:
                    self._known.add(param)
                    param.register_hook(self._hook(param))
            param.grad = grad

    def check_done(self) -> None:
        assert not self._held, "a weight of the first part had a gradient in the last part alone"

    def _hook(self, param: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def joined(grad: Tensor) -> Tensor | None:
            held = self._held.pop((self._index, param), None)
            return None if held is None else held.add_(grad)

        return joined
