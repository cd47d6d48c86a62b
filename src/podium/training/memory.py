"""What a training will need of this host's memory, estimated before its first update.

A run that cannot fit would swap for hours or be killed at some later time; it is refused with what to change instead.
Nothing is assumed of the model. Most trainings fit many times over, which passes with two samples show already. Else
passes with as many samples as do no harm are recorded, and every request of theirs to the allocator is extended to
the whole micro-batch. A training, with what it keeps (gradients of other replicas, copies for checkpoints, the feed),
is then replayed on a model of the allocator, which also tells what lies between blocks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from podium.distributed.digest import tensor_digests
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.engine.parallelism import FullySharded, Pipelined
from podium.errors import UserError
from podium.layers.norm import inside
from podium.machine.allocator import return_free_memory
from podium.machine.heap import Heap
from podium.machine.memory import host_bytes, peak_bytes, reset_peak, resident_bytes
from podium.optim.state_tensors import state_tensors
from podium.replica_tree import subtrees
from podium.training.build import Training
from podium.training.evaluate import evaluation_feed_bytes
from podium.training.feeding import feed_bytes
from podium.training.pass_requests import extended, recorded
from podium.ui.console import warn

_GB = 1e9
#: samples of the first trial
_FEW = 2
#: of the available memory, what a later one may take
_TRIAL_SHARE = 0.25
#: passes after which those that follow take hardly more: blocks that are free have come to fit
_SETTLED = 2
#: what drawing the report takes: matplotlib's libraries and what stays of figures (38 to 83 MB when last looked at),
#: and figures for which memory of the passes is used again
_REPORT_LIBRARIES_BYTES, _REPORT_FIGURES_BYTES = 55 << 20, 50 << 20


@dataclass(frozen=True)
class Estimate:
    """Bytes that one instance will need at most."""

    #: in use before the first update: the program, weights, optimiser state, samples in memory
    now: int
    #: forward and backward passes of one micro-batch, gradients included
    passes: int
    #: everything else
    rest: int

    @property
    def total(self) -> int:
        return self.now + self.passes + self.rest


def check_memory(training: Training) -> None:
    """Raise UserError where the instances of a host need more memory than it has; warn where they need more than is
    available now. Collective."""
    mode, placement = training.recipe.engine.memory_check, training.placement
    if mode == "off":
        return
    total, available = host_bytes()
    found = estimate(training, enough=available // 2 // len(placement.instances.neighbours))
    own = [found.total, found.now, found.passes, total, available] if found else [0] * 5
    everyone = placement.instances.gather(torch.tensor(own, dtype=torch.int64)).reshape(-1, len(own)).tolist()
    topology = placement.topology
    for number, host in enumerate(topology.hosts):
        members = topology.instances_on(number)
        here = everyone[members.start : members.stop]
        if not all(row[0] for row in here):
            continue
        needed, present = sum(row[0] for row in here), sum(row[1] for row in here)
        total, available = min(row[3] for row in here), min(row[4] for row in here)
        where = host if len(topology.hosts) > 1 else "this host"
        passes = max(row[2] for row in here)
        if needed > total:
            sentence = _sentence(training, needed, f"{where} has {total / _GB:.1f} GB", passes)
            if mode == "error":
                raise UserError(f"{sentence}; engine.memory_check=warn tries it nevertheless")
            warn(sentence)
        elif needed - present > available and placement.is_lead:
            free = (available + present) / _GB
            warn(_sentence(training, needed, f"only {free:.1f} GB are available on {where} now", passes))


def _sentence(training: Training, needed: int, there_is: str, passes: int) -> str:
    recipe, count = training.recipe, max(training.placement.topology.host_sizes)
    advice = ["a smaller batch.micro"] if recipe.batch.micro_batch > 1 else []
    advice += ["parallel.recompute=true"] if not recipe.parallel.recompute else []
    advice += ["parallel.stages over several hosts"] if recipe.parallel.num_stages == 1 else []
    advice += ["fewer instances"] if count > 1 else []
    micro = f"batch.micro = {recipe.batch.micro_batch} takes {passes / _GB:.1f} GB of it"
    each = f"{micro} in each of {count} instances" if count > 1 else micro
    return (
        f"this training needs about {needed / _GB:.1f} GB of memory ({each}), but {there_is}: {_joined(advice)} helps"
    )


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def estimate(training: Training, enough: int = 0) -> Estimate | None:
    """Estimate the most memory that this instance will need; None where that cannot be tried: on other devices than the
    CPU, where the model is cut or its weights are sharded, and where the system does not tell the peak.

    Where the first trial shows that it needs less than `enough` from here on, a coarse upper bound will do.
    """
    if training.placement.device.type != "cpu" or isinstance(training.parallelism, FullySharded | Pipelined):
        return None
    if not reset_peak():
        return None
    micro_batch, valid_micro, rest = training.recipe.batch.micro_batch, _valid_micro(training), _rest(training)
    with _unchanged(training.state.model):
        few = min(_FEW, micro_batch)
        first = _trial(training, few)  # compiles kernels, which stay
        passes = -(-first // few) * max(micro_batch, valid_micro)
        if passes + rest > enough:
            most = _affordable(training, first // few)
            tried = min(micro_batch, most)
            taken_by_passes = _trial(training, tried, times=_SETTLED)
            _pass(training, min(valid_micro, most), train=False)  # what it loads stays
            tensor_digests(local_tensors(training.state.model).items())  # as in every record: so does this
            now = _used_now()  # the recording takes memory of its own
            train = _requests(training, micro_batch, most)
            valid = _requests(training, valid_micro, most, train=False)
            passes, taken = _replayed(training, train, valid)
            # Libraries have buffers of their own. They are not extended beyond the samples that were tried: a small
            # error of the measurement would become a large one.
            told = _most_of(train if tried == micro_batch else _requests(training, tried, most), _SETTLED)
            rest = taken - passes + max(0, taken_by_passes - told)
        else:
            now = _used_now()
    reset_peak()
    return Estimate(now, passes, rest + _report(training, passes))


def _used_now() -> int:
    """Return the memory of this process that is not merely kept."""
    return_free_memory()
    return resident_bytes()


def _affordable(training: Training, sample_bytes: int) -> int:
    """Return how many samples a trial may have without doing harm itself."""
    _, available = host_bytes()
    share = _TRIAL_SHARE * available / len(training.placement.instances.neighbours)
    return max(_FEW, int(share / max(1, sample_bytes)))


def _requests(training: Training, num_samples: int, most: int, *, train: bool = True) -> list[int]:
    """Return what passes of a micro-batch request of the allocator, from passes with at most `most` samples."""
    more = min(num_samples, most)
    large = recorded(lambda: _pass(training, more, train=train))
    if more == num_samples:
        return large
    few = max(1, more // 2)
    small = recorded(lambda: _pass(training, few, train=train))
    found = extended(small, few, large, more, num_samples)
    if found is not None:
        return found
    # Other operators run with other numbers of samples: only the most in use is extended.
    sizes = [_most_of(small), _most_of(large)]
    return [sizes[1] + max(0, sizes[1] - sizes[0]) * (num_samples - more) // max(1, more - few)]


def _most_of(requests: list[int], times: int = 1) -> int:
    heap = Heap()
    for _ in range(times):
        heap.replay(requests)
    return heap.most


def _replayed(training: Training, train: list[int], valid: list[int]) -> tuple[int, int]:
    """Return what a heap takes from the system for passes alone, and for a whole training."""
    alone = Heap()
    for requests in (train, train, valid, valid):
        alone.replay(requests)
    heap = Heap()
    heap.take(feed_bytes(training))
    state, parallelism, lengths = training.state, training.parallelism, training.task.lengths
    gradients = [param.numel() * param.element_size() for param in state.model.parameters() if param.requires_grad]
    sums = [heap.take(size) for _ in range(_num_sums(training)) for size in gradients]
    heap.replay(train)
    if state.optimiser.own is not None:
        heap.take(state.optimiser.own.unmade_bytes())
    heap.replay(train)
    for block in sums:
        heap.give(block)
    tensors = [tensor.numel() * tensor.element_size() for tensor in state.model.state_dict().values()]
    if state.average is not None:
        for size in tensors:
            heap.take(size)
    valid_feed = heap.take(_valid_feed_bytes(training))
    for _ in range(2):
        heap.replay(valid)
    heap.give(valid_feed)
    if parallelism.saves and parallelism.holders is None:
        for size in [*tensors, *(t.numel() * t.element_size() for t in state_tensors(state.optimiser).values())]:
            heap.take(size)
        every = lengths.updates(training.recipe.checkpoint.every)
        if 0 < every < lengths.total_updates:
            for requests in (train, valid):
                heap.replay(requests)
    return alone.most, heap.most


def _num_sums(training: Training) -> int:
    """Return how many sets of gradients are kept beside those of the replica that is running."""
    placement = training.placement
    num_subtrees = len(subtrees(placement.replicas, placement.topology.num_replicas))
    sent = num_subtrees if training.parallelism.data_group.count > 1 else 0
    audit = 1 if training.recipe.engine.audit else 0  # the sums stay while one replica is computed again
    return max(math.ceil(math.log2(len(placement.replicas))) + sent, audit)


def _rest(training: Training) -> int:
    state, parallelism = training.state, training.parallelism
    gradients = sum(param.numel() * param.element_size() for param in state.model.parameters() if param.requires_grad)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in state.model.state_dict().values())
    sums = gradients * _num_sums(training)
    average = weights if state.average is not None else 0
    unmade = 0 if state.optimiser.own is None else state.optimiser.own.unmade_bytes()
    copies = 0
    if parallelism.saves and parallelism.holders is None:
        made = sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state.optimiser).values())
        copies = weights + made + unmade + average
    return sums + average + unmade + copies + feed_bytes(training) + _valid_feed_bytes(training)


def _report(training: Training, passes: int) -> int:
    """Return what the report takes beside what passes have left, which the allocator keeps."""
    if not (training.recipe.log.report and training.placement.is_lead):
        return 0
    return _REPORT_LIBRARIES_BYTES + max(0, _REPORT_FIGURES_BYTES - passes)


def _valid_micro(training: Training) -> int:
    """Return the samples of the largest micro-batch in validation."""
    section, num_samples = training.recipe.valid, len(training.task.valid_source)
    return min(section.micro, num_samples, section.max_samples or num_samples)


def _valid_feed_bytes(training: Training) -> int:
    section, source = training.recipe.valid, training.task.valid_source
    return evaluation_feed_bytes(source, section.micro, section.max_samples, training.parallelism.data_group.count)


def _trial(training: Training, num_samples: int, times: int = 1) -> int:
    """Return the most that passes of `num_samples` take beyond what is in use before."""
    return_free_memory()
    reset_peak()
    before = resident_bytes()
    for _ in range(times):
        _pass(training, num_samples)
    return max(0, peak_bytes() - before)


def _pass(training: Training, num_samples: int, *, train: bool = True) -> None:
    """Run passes of a micro-batch, and forget their gradients."""
    model, workload = training.state.model, training.task.workload
    batch = workload.example(num_samples)
    if train:
        with inside(Alone()):
            workload.loss(model, batch).sum.backward()
        for param in model.parameters():
            param.grad = None
    else:
        with torch.inference_mode():
            workload.loss(model.eval(), batch)
        model.train()


class Alone:
    """A replica that shares statistics with none, in place of the span that only the engine's lockstep has."""

    def exchange(self, tensor: Tensor, num_replicas: int) -> Tensor:
        return tensor


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Leave buffers and torch's random numbers as they are now."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    was_training = model.training
    try:
        yield
    finally:
        model.train(was_training)
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
