"""Replicas that share batch-norm statistics, run side by side. Called by the engine when a model has such layers.

An instance normally runs its replicas one after the other, but the replicas of a span need each other's sums in the
middle of the forward and backward pass. So each runs in its own thread, in lockstep: exactly one thread runs at a
time, in order of the replica index, from one exchange to the next.

    replica 0: forward ─┐ exchange            forward … backward ─┐ exchange
    replica 1:          └ forward ─┐ exchange ↑                   └ …
    …                              └ … ───────┘ the last adds up: tree of the local replicas, then over instances

The last replica runs in the calling thread. It reaches every exchange last, so when one of its gradients is complete
those of the others are too, and messages to other instances are sent from the calling thread.

Each local replica has its own copy of the model (`twin`): parameters share memory with the original, gradients and
buffers do not. The state of the random generator is saved and restored as replicas alternate.
"""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.lost import naming_lost_instance
from podium.distributed.reduction.tree import Tensors, take_gradients
from podium.distributed.reduction.uneven_buffers import sum_of
from podium.distributed.span_sums import SpanSums
from podium.errors import UserError
from podium.layers.norm import SpanBatchNorm, inside
from podium.machine import foreach
from podium.machine.device import random_states, set_random_states, use_device
from podium.replica_tree import deal, join_order
from podium.topology import Blocks

T = TypeVar("T")
#: (sum over the local replicas of a block, the number of its replicas) -> the sum over the aligned block of so many
InstanceSum = Callable[[Tensor, int], Tensor]

_MESSAGE_TAG = 1
_END = "the end"


def largest_span(model: nn.Module) -> int:
    """Return how many replicas have to run side by side; 1 if every replica can run alone."""
    return max((layer.span for layer in model.modules() if isinstance(layer, SpanBatchNorm)), default=1)


def check_span(
    span: int, num_replicas: int, num_instances: int = 1, reduction: Literal["exact", "fast"] = "exact"
) -> None:
    """Raise UserError unless the span divides the replicas and fits the way in which they are dealt to instances."""
    if span & (span - 1):
        raise UserError(f"norm.span = {span} is not a power of two")
    if num_replicas % span:
        raise UserError(
            f"norm.span = {span} does not divide batch.replicas = {num_replicas}: {span} replicas share statistics, so "
            "batch.replicas must be a multiple of it"
        )
    Blocks(span).check(num_replicas, num_instances)
    num_local = max(len(block) for block in deal(num_replicas, num_instances))
    if reduction == "fast" and span > 1 and num_local > 1 and num_instances > 1:
        raise UserError(
            f"norm.span = {span} with {num_local} replicas per instance needs engine.reduction=exact: fast supports "
            f"one model per instance, and replicas that run side by side have one each ({num_replicas} instances "
            "would carry one replica each)"
        )


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of the model for another replica: parameters in the same memory, separate gradients and buffers."""
    aliases: dict[int, Any] = {
        id(param): nn.Parameter(param.detach(), requires_grad=param.requires_grad) for param in model.parameters()
    }
    aliases |= {id(buffer): buffer.clone() for buffer in model.buffers()}  # not every device copies them deeply
    return copy.deepcopy(model, aliases)


def sum_over_instances(
    instances: Instances,
    num_replicas: int,
    waited: Callable[[float], None] = lambda seconds: None,
    device: torch.device | None = None,
) -> InstanceSum:
    """Return a function that sums over aligned blocks of the replicas that are dealt to `instances`: the upper levels
    of their tree, with the same bits on all instances of a block.

    Instances of one host read each other's numbers in shared memory, if `device` is a CPU. Messages are a few numbers
    per channel, so only the number of rounds matters: instances with equally many replicas use recursive doubling,
    others send theirs to all. Messages have their own tag, as gradients may be in transit at the same time. `waited` is
    called with the seconds each sum took.
    """
    on_cpu = device is None or device.type == "cpu"
    shared = SpanSums.open(instances, num_replicas) if instances.count > 1 and on_cpu else None
    if shared is not None:

        def read(tensor: Tensor, num_in_block: int) -> Tensor:
            began = time.perf_counter()
            found = shared.total(tensor, num_in_block)
            waited(time.perf_counter() - began)
            return found

        return read
    group = instances.group() if instances.count > 1 else None
    blocks = deal(num_replicas, instances.count)

    def exchanged(tensor: Tensor, others: Sequence[int]) -> list[Tensor]:
        """Send `tensor` to others; return theirs."""
        assert group is not None
        received = [torch.empty_like(tensor) for _ in others]
        if tensor.device.type != "cpu":
            sent = [(other, tensor) for other in others]
            for message in instances.post(sent, list(zip(others, received, strict=True))):
                message.wait()
            return received
        posted = []
        for other, into in zip(others, received, strict=True):
            with naming_lost_instance(instances.members[other]):
                posted.append((other, group.recv([into], other, _MESSAGE_TAG)))
                posted.append((other, group.send([tensor], other, _MESSAGE_TAG)))
        for other, message in posted:
            with naming_lost_instance(instances.members[other]):
                message.wait()
        return received

    def total(tensor: Tensor, num_in_block: int) -> Tensor:
        began, start = time.perf_counter(), blocks[instances.index].start // num_in_block * num_in_block
        whole = range(start, start + num_in_block)
        inside = [index for index, block in enumerate(blocks) if block.start in whole]
        if len({len(blocks[index]) for index in inside}) == 1:
            distance, first = 1, inside[0]
            while distance < len(inside):
                (received,) = exchanged(tensor, [first + ((instances.index - first) ^ distance)])
                tensor, distance = tensor + received, distance * 2
        else:
            others = [index for index in inside if index != instances.index]
            sums = {instances.index: tensor, **dict(zip(others, exchanged(tensor, others), strict=True))}
            tensor = sum_of([sums[index] for index in inside], join_order([blocks[index] for index in inside], whole))
        waited(time.perf_counter() - began)
        return tensor

    return total


class SideBySide:
    """The local replicas of a model whose layers span `span` replicas: `size` at a time, each with its own model.

    Where a span covers several instances, `size` is the part of it on this instance.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        span: int,
        num_replicas: int,
        instances: Instances,
        waited: Callable[[float], None],
    ) -> None:
        """Create the copies of `model`, for replicas that are dealt to `instances`; `params` are in the order in which
        `take` returns gradients."""
        self.size = min(span, len(deal(num_replicas, instances.count)[instances.index]))
        self._lockstep = Lockstep(
            self.size, sum_over_instances(instances, num_replicas, waited, params[0].device), params[0].device
        )
        self._twins = [twin(model) for _ in range(self.size - 1)]
        self._models = [*self._twins, model]
        self._buffers = [list(of.buffers()) for of in self._models]
        self._params = [list(params)]
        for of in self._twins:
            aliases = dict(zip(model.parameters(), of.parameters(), strict=True))
            self._params.insert(-1, [aliases[param] for param in params])

    def run(self, task: Callable[[nn.Module, int], T]) -> list[T]:
        """Run task(model, position) for `size` replicas side by side, the original model last; all start from its
        buffers.

        The gradients of the others stay in their own models until `take`.
        """
        for params, buffers in zip(self._params[:-1], self._buffers[:-1], strict=True):
            alike = zip(params, self._params[-1], strict=True)
            assert all(ours.data_ptr() == original.data_ptr() for ours, original in alike), "weights have moved"
            if buffers:
                foreach.copy_(buffers, self._buffers[-1])
        return self._lockstep.run([partial(task, model, position) for position, model in enumerate(self._models)])

    def take(self) -> list[Tensors]:
        """Return the gradients and floating-point buffers of all replicas that just ran except the last, in order."""
        return [
            take_gradients(params, [buffer for buffer in buffers if buffer.is_floating_point()])
            for params, buffers in zip(self._params[:-1], self._buffers[:-1], strict=True)
        ]


def run_in_lockstep(tasks: Sequence[Callable[[], T]], instance_sum: InstanceSum | None = None) -> list[T]:
    """Run each task as one local replica of a span, in order of the replica index; return their results."""
    with Lockstep(len(tasks), instance_sum) as lockstep:
        return lockstep.run(tasks)


class Lockstep:
    """Threads that run `num_local` replicas side by side; kept from update to update, as new threads are slow.

    `instance_sum` sums over instances when a span is larger than `num_local`.
    """

    def __init__(
        self, num_local: int, instance_sum: InstanceSum | None = None, device: torch.device | None = None
    ) -> None:
        assert num_local > 0
        assert num_local & (num_local - 1) == 0, "the replicas of a span are a power of two"
        self._num_local, self._instance_sum = num_local, instance_sum
        self._device = device or torch.device("cpu")
        self._threads = ThreadPoolExecutor(num_local - 1, "replica") if num_local > 1 else None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run one task per local replica. What a task raises is raised here, after all others have ended.

        Tasks run in other threads: whatever torch keeps per thread (autocast, say) has to be entered inside them.
        """
        assert len(tasks) == self._num_local
        return _Round(tasks, self._instance_sum, self._device).run(self._threads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ended(BaseException):
    """Raised in a replica to end it because another one failed; not an Exception, so that no task catches it."""


class _Round:
    """One run of the tasks: whose turn it is, the tensors they offered, and the sums they receive."""

    def __init__(
        self, tasks: Sequence[Callable[[], Any]], instance_sum: InstanceSum | None, device: torch.device
    ) -> None:
        self._tasks, self._instance_sum, self._device = tasks, instance_sum, device
        num = self._num = len(tasks)
        self._turns = [threading.Semaphore(0) for _ in tasks]
        self._offers: list[Tensor | None] = [None] * num
        self._sums: list[Tensor | None] = [None] * num
        self._results: list[Any] = [None] * num
        #: what the first replica reached: an exchange of some shape, or the end; the others must reach the same
        self._reached: object = None
        self._error: BaseException | None = None
        self._random = [random_states(device) for _ in tasks]
        self._num_threads = torch.get_num_threads()

    def run(self, threads: ThreadPoolExecutor | None) -> list[Any]:
        last = self._num - 1
        futures: list[Future[None]] = []
        try:
            for position in range(last):
                assert threads is not None
                futures.append(threads.submit(self._in_thread, position))
            if last:
                self._turns[0].release()
                self._wait(last)
            self._run_task(last)
        except BaseException as error:
            self._error = self._error or error
        finally:
            for position, future in enumerate(futures):  # all have ended, or are waiting and see the error now
                if self._error is not None:
                    self._turns[position].release()
                future.result()
        # Layers keep a reference to this object in the graphs of their replicas, so it must keep nothing alive.
        results, failure = self._results, self._error
        self._results, self._tasks, self._error = [], (), None
        if failure is None:
            return results
        try:
            raise failure
        finally:
            del failure

    def exchange(self, position: int, tensor: Tensor, num_replicas: int) -> Tensor:
        """Offer `tensor`, let the other replicas run up to the same exchange, and return the sum."""
        self._check_reached(position, (num_replicas, tensor.shape, tensor.dtype))
        self._offers[position] = tensor
        if position == self._num - 1:
            self._add_up(num_replicas)
        if self._num > 1:
            self._save_random_state(position)
            self._turns[(position + 1) % self._num].release()
            self._wait(position)
        total = self._sums[position]
        assert total is not None
        self._sums[position] = None
        return total

    def _add_up(self, num_replicas: int) -> None:
        """Sum over the tree of replica indices: pairs of local replicas, then pairs of instances."""
        offers = [offer for offer in self._offers if offer is not None]
        assert len(offers) == self._num
        size = 1
        while size < min(num_replicas, self._num):
            offers = [offers[i] + offers[i + 1] for i in range(0, len(offers), 2)]
            size *= 2
        if size < num_replicas:
            assert self._instance_sum is not None, f"a span of {num_replicas} replicas with only {self._num} local ones"
            offers = [self._instance_sum(offers[0], num_replicas)]
        self._sums = [offers[position // size] for position in range(self._num)]
        self._offers = [None] * self._num

    def _in_thread(self, position: int) -> None:
        # OpenMP's number of threads is a setting of the calling thread, and it affects the numerics.
        torch.set_num_threads(self._num_threads)
        use_device(self._device)  # a new thread's is the first of the host, whatever that of the process
        try:
            self._wait(position)
            self._run_task(position)
        except BaseException as error:
            if not isinstance(error, _Ended):
                self._error = self._error or error
        finally:
            # After an error, the calling thread is next and ends the others one by one.
            self._turns[position + 1 if self._error is None else -1].release()

    def _run_task(self, position: int) -> None:
        # The backward pass runs in this thread on every device: a device's own thread, waiting in an exchange for the
        # other replicas, would keep them from running.
        with inside(_Place(self, position)), torch.autograd.set_multithreading_enabled(False):
            self._results[position] = self._tasks[position]()
        self._check_reached(position, _END)

    def _check_reached(self, position: int, what: object) -> None:
        if position == 0:
            self._reached = what
        assert what == self._reached, f"the replicas of a span diverge: {what} and {self._reached}"

    def _wait(self, position: int) -> None:
        self._turns[position].acquire()
        if self._error is not None:
            raise _Ended
        set_random_states(self._device, self._random[position])

    def _save_random_state(self, position: int) -> None:
        self._random[position] = random_states(self._device)


class _Place:
    """A replica's position in the lockstep: the `Span` that its layers see."""

    def __init__(self, round_: _Round, position: int) -> None:
        self._round, self._position = round_, position

    def exchange(self, tensor: Tensor, num_replicas: int) -> Tensor:
        return self._round.exchange(self._position, tensor, num_replicas)
