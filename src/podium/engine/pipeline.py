"""One replica over several devices: each instance carries a part of the model, and micro-batches go through them.

Built on `torch.distributed.pipelining`: its stages run the parts and exchange what goes between them, and its runtime
carries out the order of `pipeline_order`. That runtime is no public interface of torch, so nothing but this module
knows of it. What is ours: the first and the last part on one device, random numbers by place, gradients of weights
that both parts share added up as an uncut model adds them, and evaluation, where micro-batches differ in size.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from podium.engine.blocks import Answer, Between, as_tuple, asked_inputs
from podium.engine.instances import Instances
from podium.engine.lost import InstanceLost, naming_who_is_lost
from podium.engine.pipeline_order import Schedule, actions
from podium.engine.precision import PrecisionSection, computing, given, returned
from podium.engine.split import Split
from podium.held import held_tensors
from podium.workloads.base import Batch, Loss, Workload

_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}
_TAG = 2
#: tensors, kept until they have left, and their messages
_Sent = tuple[tuple[Tensor, ...], list[dist.Work | None]]
# It writes the whole table of actions for every error, which we tell in a sentence.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class Pipeline:
    """This instance's parts of the model, among the instances that carry the stages of the same replicas."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        workload: Workload,
        split: Split,
        inputs: tuple[Tensor, ...],
        between: Sequence[tuple[Between, ...]],
        line: Instances,
        *,
        micro_batch: int,
        num_micro_batches: int,
        schedule: Schedule,
        precision: PrecisionSection,
        device: torch.device,
        param_order: Sequence[str],
    ) -> None:
        """`inputs` go into the first block, `between` are the outputs of every block; `param_order` are the names of
        all trainable parameters, in the order in which an uncut model takes the norms of their gradients."""
        self._model, self._workload, self.line, self._device = model, workload, line, device
        self.split = split
        last = len(split.parts) - 1
        #: what leaves each part
        self._leaves = [between[part.stop - 1] for part in split.parts]
        passed = [inputs, *(_without_memory(leaves, micro_batch) for leaves in self._leaves)]
        self._parts = {
            number: Part(
                [blocks[block] for block in split.parts[number]],
                self._leaves[number - 1] if number else (),
                self._leaves[number],
                precision,
                device,
                first=number == 0,
                last=number == last,
            )
            for number in split.parts_of(line.index)
        }
        self._tied = _Tied(self._parts.get(0))
        self._stages = [
            _Stage(part, number, last + 1, device, input_args=passed[number], output_args=passed[number + 1],
                   group=line.group())
            for number, part in self._parts.items()
        ]  # fmt: skip
        for stage in self._stages:
            stage.begin, stage.inputs, stage.tied = self._begin_micro_batch, self._inputs, self._tied
            stage.has_backward = True
        self._runtime = _PipelineScheduleRuntime(self._stages, num_micro_batches, loss_fn=self._loss, scale_grads=False)
        self._runtime._prepare_schedule_with_comms(
            {
                index: [_Action(action.part, _KINDS[action.kind], action.micro_batch) for action in order]
                for index, order in enumerate(actions(schedule, split.num_devices, num_micro_batches))
            }
        )
        self._num_micro_batches = num_micro_batches
        self._param_order = {name: place for place, name in enumerate(param_order)}
        self._begin: Callable[[int], None] = lambda index: None
        self._batches: Sequence[Batch] = ()
        self._losses: list[Loss] = []
        self._scale = 1.0

    @property
    def has_losses(self) -> bool:
        """Whether this instance has samples and losses: device 0 alone does."""
        return self.line.index == 0

    def run(self, batches: Sequence[Batch], begin: Callable[[int], None], scale: float) -> list[Loss]:
        """One replica's micro-batches forward and backward; gradients pile up in `param.grad`.

        `begin(index)` is called before any part runs micro-batch `index`. Losses are device 0's alone.
        """
        self._begin, self._batches, self._losses, self._scale = begin, batches, [], scale
        nothing: list[Any] = [()] * self._num_micro_batches  # inputs are made when the first part runs
        for stage in self._stages:
            stage.clear_runtime_states()
            stage.error = None
        try:
            self._runtime._step_microbatches(
                nothing, [{}] * len(nothing), list(range(len(nothing))), losses=None, return_outputs=False
            )
        except RuntimeError as error:
            own = next((stage.error for stage in self._stages if stage.error is not None), None)
            if own is not None:
                raise own from None
            raise InstanceLost(None, str(error)) from error
        self._runtime._internal_losses.clear()
        self._tied.check_done()
        losses, self._losses, self._batches = self._losses, [], ()
        return losses

    def _begin_micro_batch(self, index: int) -> None:
        self._begin(index)

    def _inputs(self, index: int) -> tuple[Tensor, ...]:
        return asked_inputs(self._workload, self._batches[index], training=True)

    def _loss(self, output: Any, index: int) -> Tensor:
        self._begin(index)  # what the loss draws before it calls the model, it drew for the first part too
        loss = self._workload.loss(Answer(output, training=True), self._batches[index])
        self._losses.append(loss)
        return loss.sum if self._scale == 1 else loss.sum * self._scale

    # --- what all devices of a line have to agree on -------------------------------------------------------------

    def agreed(self, count: int, stop: bool) -> tuple[int, bool]:
        """(items that device 0 counted, whether any device asks to stop)"""
        told = self.line.gather(torch.tensor([count, int(stop)]))
        return int(told[0, 0]), bool(told[:, 1].any())

    def all_norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norms of all parameters' gradients, in the order of an uncut model, from those of this device."""
        ours = torch.full((len(self._param_order),), -1.0, dtype=torch.float64)
        ours[[self._param_order[name] for name in names]] = norms.double().cpu()
        every = self.line.gather(ours)
        # The one device that holds a parameter has a norm of it, which may be NaN.
        there = every != -1
        found = torch.where(there, every, 0.0).sum(0)[there.any(0)]
        return found.to(norms.dtype).to(norms.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the whole model by name, on device 0; the others send what they hold."""
        held = held_tensors(self._model)
        all_ = sorted(self._model.state_dict().items())
        holders = self.line.gather(torch.tensor([name in held for name, _ in all_])).int().argmax(0).tolist()
        for (name, tensor), whose in zip(all_, holders, strict=True):
            if self.line.index == 0:
                received = held[name] if name in held else torch.empty(tensor.shape, dtype=tensor.dtype)
                if whose:
                    self._message(dist.recv, received, whose)
                yield name, received
            elif self.line.index == whose:
                self._message(dist.send, held[name].detach().cpu().contiguous(), 0)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def losses(self, batches: Iterable[Batch]) -> Iterator[Loss]:
        """Of the micro-batches, in their order, in evaluation mode: on device 0, while the others `carry`. Some are
        under way at a time."""
        last = len(self.split.parts) - 1
        # The feed hands out buffers that it fills again: those under way are copied.
        remaining = ({name: rows.clone() for name, rows in batch.items()} for batch in batches)
        while group := list(islice(remaining, 2 * self.split.num_devices)):
            sent = [
                self._pass_on(0, self._parts[0](*asked_inputs(self._workload, batch, training=False)))
                for batch in group
            ]
            for batch in group:
                size = len(next(iter(batch.values())))
                output = self._parts[last](*self._received(last, size))
                yield self._workload.loss(Answer(output, training=False), batch)
            self._wait(sent)

    def carry(self, sizes: Iterable[int]) -> None:
        """The same on the other devices, which know only how many samples each micro-batch has."""
        (number,) = self._parts
        for size in sizes:
            self._wait([self._pass_on(number, self._parts[number](*self._received(number, size)))])

    def _received(self, part: int, num_samples: int) -> tuple[Tensor, ...]:
        source = self.split.device_of_part(part - 1)
        tensors = tuple(one.empty(num_samples, self._device) for one in self._leaves[part - 1])
        for tensor in tensors:
            self._message(dist.recv, tensor, source)
        return tensors

    def _pass_on(self, part: int, output: Any) -> _Sent:
        tensors = as_tuple(output)
        target = self.split.device_of_part(part + 1)
        with naming_who_is_lost(self.line.members[target]):
            messages = [dist.isend(tensor, group=self.line.group(), group_dst=target, tag=_TAG) for tensor in tensors]
        return tensors, messages

    def _wait(self, sent: Iterable[_Sent]) -> None:
        with naming_who_is_lost(None):
            for _, messages in sent:
                for message in messages:
                    assert message is not None
                    message.wait()

    def _message(self, kind: Callable[..., Any], tensor: Tensor, other: int) -> None:
        peer = {"group_src": other} if kind is dist.recv else {"group_dst": other}
        with naming_who_is_lost(self.line.members[other]):
            kind(tensor, group=self.line.group(), tag=_TAG, **peer)


def _without_memory(leaves: tuple[Between, ...], num_samples: int) -> tuple[Tensor, ...]:
    tensors = [between.empty(num_samples, "meta") for between in leaves]
    return tuple(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors)


class Part(nn.Module):
    """Neighbouring blocks of a model, run one after the other."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        arrives: tuple[Between, ...],
        leaves: tuple[Between, ...],
        precision: PrecisionSection,
        device: torch.device,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._arrives, self._leaves, self._precision, self._device = arrives, leaves, precision, device
        self._first, self._last = first, last

    def forward(self, *args: Tensor) -> Any:
        if self._first:
            values: tuple[Any, ...] = given(self._precision, args)
        else:
            values = tuple(between.arrived(arg) for between, arg in zip(self._arrives, args, strict=True))
        with computing(self._precision, self._device):
            for block in self.blocks:
                values = as_tuple(block(*values))
        if self._last:
            values = returned(self._precision, values)
        else:
            values = tuple(between.leaving(value) for between, value in zip(self._leaves, values, strict=True))
        return values[0] if len(values) == 1 else values


class _Stage(PipelineStage):
    """torch's stage, with what has to happen around its passes."""

    begin: Callable[[int], None]
    inputs: Callable[[int], tuple[Tensor, ...]]
    tied: "_Tied"
    #: what went wrong in here: torch's runtime raises another error for it
    error: Exception | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *rest: Any, **kwargs: Any) -> Any:
        try:
            self.begin(fwd_chunk_id)
            args = self.inputs(fwd_chunk_id) if self.is_first else args
            return super().forward_one_chunk(fwd_chunk_id, args, *rest, **kwargs)
        except Exception as error:
            cause = error.__cause__
            self.error = cause if isinstance(cause, Exception) else error
            raise

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.tied.around(bwd_chunk_id, first=self.is_first, last=self.is_last):
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:
            self.error = error
            raise


class _Tied:
    """Weights that the first and the last part share, found when both have a gradient for them.

    An uncut model adds both gradients of a micro-batch to each other, then to those of the micro-batches before. Here
    the last part's come first: they are kept aside until the first part has its own.
    """

    def __init__(self, first: nn.Module | None) -> None:
        self._params = list(first.parameters()) if first is not None else []
        self._held: dict[tuple[int, nn.Parameter], Tensor] = {}
        self._known: set[nn.Parameter] = set()
        self._index = -1

    @contextmanager
    def around(self, index: int, *, first: bool, last: bool) -> Iterator[None]:
        """The backward pass of micro-batch `index` through a part."""
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
