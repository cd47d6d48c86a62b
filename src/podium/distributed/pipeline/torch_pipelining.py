"""torch's pipelining: its stages run the parts of a model, and its runtime executes a given order of passes.

Called by `runtime.py`. The runtime that accepts any order is not a public interface of torch, so it is used in this
module only. To replace it, run the passes in this instance's order, and send and receive the tensors between parts
with `dist.batch_isend_irecv` around each pass.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from podium.distributed.lost import InstanceLost
from podium.distributed.pipeline.schedule import Action

_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}
# It logs the whole table of actions for every error, which we report in one sentence.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class Stage(PipelineStage):
    """torch's stage, with callbacks around its passes."""

    #: called before the forward pass of a micro-batch
    begin: Callable[[int], None]
    #: returns the inputs of the first part
    inputs: Callable[[int], tuple[Tensor, ...]]
    #: entered around a backward pass: (micro-batch, whether this is the first part, whether it is the last)
    around_backward: Callable[[int, bool, bool], AbstractContextManager[None]]
    #: the error raised in a pass, which torch's runtime replaces by another
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
            with self.around_backward(bwd_chunk_id, self.is_first, self.is_last):
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:
            self.error = error
            raise


class StageRunner:
    """A runner of passes over the stages of this instance, in a given order."""

    def __init__(
        self, stages: Sequence[Stage], orders: Sequence[Sequence[Action]], loss: Callable[[Any, int], Tensor]
    ) -> None:
        """Prepare the runtime; `orders` are those of all devices; `loss(output, micro-batch)` is called on the device
        of the last part."""
        self._stages = list(stages)
        micro_batches = {action.micro_batch for order in orders for action in order}
        for stage in stages:
            stage.has_backward = True
        self._runtime = _PipelineScheduleRuntime(self._stages, len(micro_batches), loss_fn=loss, scale_grads=False)
        self._runtime._prepare_schedule_with_comms(
            {
                index: [_Action(action.part, _KINDS[action.kind], action.micro_batch) for action in order]
                for index, order in enumerate(orders)
            }
        )
        self._num_micro_batches = len(micro_batches)

    def run(self) -> None:
        """Run all micro-batches forward and backward."""
        for stage in self._stages:
            stage.clear_runtime_states()
            stage.error = None
        nothing: list[Any] = [()] * self._num_micro_batches  # the first part gets its inputs from the callback
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
