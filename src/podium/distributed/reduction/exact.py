"""The exact reduction of gradients while the backward pass still runs: flat buckets, hooks, and a carrier that sums
them in the background.

`Engine` uses one `ExactReduction` when there are several instances and the reduction is exact. In an update:

    all local replicas but the last leave their sums in a `TreeSum`
    after the last one's last forward pass, `start` fills in what is known (count, buffers) and arms the hooks
    in its backward pass, a hook per parameter counts down; a complete bucket gets the local sums and is carried away
    `finish` hands over the rest, waits for the carrier, and makes `param.grad` views of the buckets

Buckets are filled in reverse order of the model's parameters, roughly the order of the backward pass, and always
handed over in the same order, which is all that instances need to agree on.

On a CPU, the count of items, the request to stop, and which parameters have gradients travel with the buckets. From an
accelerator the host would have to wait for them, so there they are a message of their own, between the hosts.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.reduction.carriers import Carrier, agreed, carrier_for
from podium.distributed.reduction.summed_buffers import summed_buffers
from podium.distributed.reduction.tree import Tensors, TreeSum, add_in_place, take_gradients
from podium.machine.recording import is_own_pass

#: The first bucket is smaller, so that communication starts early; then few large ones, as each costs some rounds.
FIRST_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
#: views start at multiples of this many elements
_ALIGNMENT = 16
#: The count of items is lo + 4096 · hi in two float32 elements. Sums are exact up to 4,096 instances and 2^36 items.
_COUNT_BASE = 4096
_HEAD = 3  # elements: lo, hi, how many instances ask to stop
_HEAD_PLACE = -1  # no tensor's index


@dataclass
class _Bucket:
    """Tensors of one type that are summed together: parameters, in the first buckets also the head and buffers.

    They are followed by one element per parameter: on how many instances a replica had a gradient for it.
    """

    dtype: torch.dtype
    number: int = 0
    num_elements: int = 0
    params: list[int] = field(default_factory=list)
    num_missing: int = 0
    handed_over: bool = False

    def reserve(self, num_elements: int) -> int:
        """Reserve room for `num_elements`; return its offset."""
        offset = self.num_elements
        self.num_elements += -(-num_elements // _ALIGNMENT) * _ALIGNMENT
        return offset


#: by tensor: its bucket and its offset there
Places = dict[int, tuple[_Bucket, int]]


class _Memory:
    """Flat tensors, one for each bucket, as what they hold."""

    def __init__(
        self, flats: Sequence[Tensor], buckets: Sequence[_Bucket], places: Places, tensors: Sequence[Tensor]
    ) -> None:
        self.head = flats[places[_HEAD_PLACE][0].number][:_HEAD]
        #: of all parameters, then of all buffers
        self.views = [_view(places[index], tensor, flats) for index, tensor in enumerate(tensors)]
        #: by bucket: on how many instances its parameters have gradients
        self.present = [flat[bucket.num_elements :] for bucket, flat in zip(buckets, flats, strict=True)]


class ExactReduction:
    """The exact sums of gradients and floating-point buffers over all replicas of all instances."""

    def __init__(
        self,
        model: nn.Module,
        params: list[nn.Parameter],
        buffers: list[Tensor],
        instances: Instances,
        num_replicas: int,
        waited: Callable[[float], None],
        *,
        during_backward: bool = True,
    ) -> None:
        """Prepare the reduction over replicas that are dealt to `instances`; `params` and `buffers` are in the order of
        the tensors in `TreeSum`: parameters first. Collective. Unless `during_backward`, sums begin after the pass."""
        self.model = model
        self._params, self._buffers, self._waited = params, buffers, waited
        self._device, self._instances = params[0].device, instances
        self._buckets, places = _planned(_backward_order(model, params), params, buffers)
        sizes = [(bucket.num_elements + len(bucket.params), bucket.dtype) for bucket in self._buckets]
        summed = summed_buffers(instances, num_replicas, sizes, self._device)
        tensors = [*params, *buffers]
        #: the sets of buffers that are filled in turn, and the totals of each
        self._sets = [
            (_Memory(flats, self._buckets, places, tensors), _Memory(totals, self._buckets, places, tensors))
            for flats, totals in summed.sets
        ]
        self._num_sums = 0
        self._filled, self._totals = self._sets[0]
        self.buffer_totals: list[Tensor] = []
        #: the same for the subtrees of this instance's block before the last one
        self._complete = [
            [_view(places[index], tensor, flats) for index, tensor in enumerate(tensors)] for flats in summed.complete
        ]
        # A single bucket is complete when the backward pass is.
        self._during_backward = during_backward and (len(self._buckets) > 1 or self._device.type != "cpu")
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.params}
        self._armed = False
        self._next = 0
        self._partial: list[Tensors] = []
        self._sums_of_complete: list[Tensors] = []
        self._own_count, self._own_stop, self._own_present = 0, False, [False] * len(params)
        #: seconds that sums with other instances have taken so far, up to two of them at once; None: unknown
        self.exchange_s: float | None = 0.0 if self._device.type == "cpu" else None
        self._carrier = carrier_for(summed, len(self._buckets), self._device)
        method = weakref.WeakMethod(self._on_gradient)
        handles = [
            param.register_post_accumulate_grad_hook(_weak_hook(method, index))
            for index, param in enumerate(params)
            if self._during_backward
        ]
        self._end = weakref.finalize(self, _end, self._carrier, handles)
        self._summed = summed

    def leave(self) -> None:
        self._armed = False
        self._summed.leave()
        self._end()

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext()

    def take(self) -> Tensors:
        return take_gradients(self._params, self._buffers)

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        self._sums_of_complete, partial = tree.before_last()
        self._partial = partial[::-1]
        self._filled, self._totals = self._sets[self._num_sums % len(self._sets)]
        self._num_sums, self.buffer_totals = self._num_sums + 1, self._totals.views[len(self._params) :]
        if self._device.type == "cpu":
            self._filled.head.copy_(
                torch.tensor([count % _COUNT_BASE, count // _COUNT_BASE, stop], dtype=torch.float32)
            )
        self._own_count, self._own_stop = count, stop
        self._sum_locally(range(len(self._params), len(self._filled.views)), self._buffers)
        for bucket in self._buckets:
            bucket.num_missing, bucket.handed_over = len(bucket.params), False
        self._next, self._armed = 0, self._during_backward

    def finish(self) -> tuple[int, bool]:
        self._armed = False
        for bucket in self._buckets[self._next :]:  # some parameter had no gradient in this update
            self._hand_over(bucket)
        self._partial, self._sums_of_complete = [], []
        began = time.perf_counter()
        took = self._carrier.wait()
        count, stop, present = self._agreed()
        self._waited(time.perf_counter() - began)
        if self.exchange_s is not None:
            self.exchange_s += took or 0.0
        for param, view, is_present in zip(self._params, self._totals.views, present, strict=False):
            param.grad = view if is_present else None
        return count, stop

    def _on_gradient(self, index: int) -> None:
        """Hand over complete buckets; called by the backward pass when the gradient of a parameter is complete."""
        if not self._armed or is_own_pass():  # then `finish` hands them over, as it does after a replayed pass
            return
        bucket = self._bucket_of[index]
        assert not bucket.handed_over, "a gradient changed after it was sent (is a block recomputed with reentrance?)"
        bucket.num_missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].num_missing == 0:
            self._hand_over(self._buckets[self._next])
            self._next += 1

    def _hand_over(self, bucket: _Bucket) -> None:
        grads = [self._params[index].grad for index in bucket.params]
        self._sum_locally(bucket.params, grads)
        present = [
            grad is not None or any(sums[index] is not None for sums in (*self._partial, *self._sums_of_complete))
            for index, grad in zip(bucket.params, grads, strict=True)
        ]
        if self._device.type == "cpu":
            row = self._filled.present[bucket.number]
            row.fill_(1.0)
            for place, is_present in enumerate(present):
                if not is_present:
                    row[place] = 0.0
        for index, is_present in zip(bucket.params, present, strict=True):
            self._own_present[index] = is_present
        for index, grad in zip(bucket.params, grads, strict=True):
            if grad is not None:
                self._params[index].grad = self._filled.views[index]  # frees the gradient's own memory
        bucket.handed_over = True
        self._carrier.put(bucket.number)

    def _sum_locally(self, indices: Sequence[int], last: Sequence[Tensor | None]) -> None:
        """Write partial sums + tensors of the last replica to the views, in the tree's order (from the right;
        a + b = b + a), and the sums of complete subtrees to theirs."""
        for complete, sums in zip(self._complete, self._sums_of_complete, strict=True):
            for index in indices:
                _write(complete[index], sums[index])
        views = [self._filled.views[index] for index in indices]
        first, rest = self._partial[:1], self._partial[1:]
        for index, view, tensor in zip(indices, views, last, strict=True):
            present = [sums for sums in (tensor, *(sums[index] for sums in first)) if sums is not None]
            if len(present) == 2:
                torch.add(*present, out=view)  # one pass over the memory instead of two
            else:
                _write(view, present[0] if present else None)
        for sums in rest:
            add_in_place(list(views), [sums[index] for index in indices])

    def _agreed(self) -> tuple[int, bool, list[bool]]:
        """Return (the count of items of all instances, whether any asks to stop, for each parameter whether any replica
        had a gradient)."""
        if self._device.type != "cpu":
            row = torch.tensor([self._own_count, self._own_stop, *self._own_present], dtype=torch.int64)
            return agreed(self._instances.gather(row).tolist())
        present = [False] * len(self._params)
        for bucket in self._buckets:
            for index, num_present in zip(bucket.params, self._totals.present[bucket.number].tolist(), strict=True):
                present[index] = num_present > 0
        lo, hi, stop = self._totals.head.tolist()
        return int(lo) + int(hi) * _COUNT_BASE, stop > 0, present


def _backward_order(model: nn.Module, params: list[nn.Parameter]) -> list[int]:
    place = {param: index for index, param in enumerate(params)}
    return [place[param] for param in reversed(list(model.parameters())) if param in place]


def _planned(order: list[int], params: list[nn.Parameter], buffers: list[Tensor]) -> tuple[list[_Bucket], Places]:
    """Plan the buckets: the head and buffers, then neighbours in `order`; a bucket holds one type of element.

    Return the buckets, and for all parameters and buffers their bucket and offset.
    """
    tensors = [*params, *buffers]
    head = _Bucket(torch.float32)
    places = {_HEAD_PLACE: (head, head.reserve(_HEAD))}
    closed: list[_Bucket] = []
    open_ = {head.dtype: head}
    for index in [*range(len(params), len(tensors)), *order]:
        tensor = tensors[index]
        bucket = open_.setdefault(tensor.dtype, _Bucket(tensor.dtype))
        places[index] = (bucket, bucket.reserve(tensor.numel()))
        if index < len(params):
            bucket.params.append(index)
            if bucket.num_elements * tensor.element_size() >= (BUCKET_BYTES if closed else FIRST_BYTES):
                closed.append(open_.pop(tensor.dtype))
    buckets = closed + list(open_.values())
    for number, bucket in enumerate(buckets):
        bucket.number = number
    return buckets, places


def _view(place: tuple[_Bucket, int], like: Tensor, flats: Sequence[Tensor]) -> Tensor:
    """Return a part of a bucket in the shape of `like` and, where that has no gaps, in its memory layout
    (channels-last, say): fused optimisers need gradients laid out like their parameters. `flats`: all buckets."""
    bucket, offset = place
    flat, stride = flats[bucket.number], torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, stride, flat.storage_offset() + offset)


def _write(view: Tensor, values: Tensor | None) -> None:
    if values is None:
        view.fill_(-0.0)  # x + -0.0 is x for every x; x + 0.0 is not x for x = -0.0
    else:
        view.copy_(values)


def _weak_hook(method: weakref.WeakMethod, index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        on_gradient = method()
        if on_gradient is not None:
            on_gradient(index)

    return hook


def _end(carrier: Carrier, handles: list) -> None:
    carrier.close()
    for handle in handles:
        handle.remove()
