"""Audits (`engine.audit`): in some updates one replica's gradients are computed a second time, by another instance, and
compared to the bit before anything is done with them.

Which updates, which replica and by whom follows from (seed, update), so audits are those of the same updates on any
number of instances. The first computation is the one that the training uses: its gradients are digested in the backward
pass, before they are added to those of other replicas. The second one reads its samples anew, from the same weights and
buffers, and leaves both as they were. Called by `update.py`; where replicas are cut, sharded or run side by side, there
is no audit (`check_audit`).
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from podium.distributed.digest import tensor_digests, tensor_xxh3
from podium.distributed.instances import Instances
from podium.distributed.messages import all_gather_facts
from podium.engine.replicas import LocalReplicas
from podium.errors import TrainingFailed
from podium.machine import counter_rng, foreach
from podium.replica_tree import deal

#: bytes of a digest; zeros: a parameter without gradient
_DIGEST_BYTES = 8

#: gives the samples of a replica in an update: (1, accumulation, micro-batch, …)
SamplesOf = Callable[[int, int], AbstractContextManager[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class AuditOptions:
    """What an engine needs for audits."""

    #: of the updates
    share: float
    samples: SamplesOf
    #: names an instance and its host
    place: Callable[[int], str]


@dataclass(frozen=True)
class Assignment:
    """One audit: a replica, the instance that carries it, and the one that computes it again."""

    replica: int
    owner: int
    auditor: int


def audited(seed: int, share: float, num_updates: int) -> int:
    """Return how many of the first updates are audited."""
    draws = counter_rng.uniforms(_stream(seed), np.arange(num_updates), 3)
    return int((draws[:, 0] < share).sum())


def assignment(seed: int, share: float, update: int, num_replicas: int, num_instances: int) -> Assignment | None:
    """Return the audit of an update; None where there is none."""
    chosen, which, whom = counter_rng.uniforms(_stream(seed), np.array([update]), 3)[0].tolist()
    if chosen >= share:
        return None
    replica = int(which * num_replicas)
    owner = next(index for index, block in enumerate(deal(num_replicas, num_instances)) if replica in block)
    further = 0 if num_instances == 1 else 1 + int(whom * (num_instances - 1))
    return Assignment(replica, owner, (owner + further) % num_instances)


def _stream(seed: int) -> int:
    return counter_rng.key("audit", seed)


class Audits:
    """The audits of this instance, together with the others."""

    def __init__(
        self,
        options: AuditOptions,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        num_replicas: int,
        group: Instances,
        seed: int,
        waited: Callable[[float], None],
    ) -> None:
        """Prepare to watch gradients. Made before anything else hears of them, which adds them up in place."""
        self._options, self._model, self._params, self._buffers = options, model, list(params), list(buffers)
        self._num_replicas, self._group, self._seed, self._waited = num_replicas, group, seed, waited
        names = {id(param): name for name, param in model.named_parameters()}
        self._names = [names[id(param)] for param in self._params]
        self._due: Assignment | None = None
        #: whether the pass that runs is the one whose gradients are compared
        self._watches: Callable[[], bool] = lambda: False
        self._first: dict[int, str] = {}
        self._start: list[Tensor] = []
        method = weakref.WeakMethod(self._on_gradient)
        handles = [
            param.register_post_accumulate_grad_hook(_weak_hook(method, place))
            for place, param in enumerate(self._params)
        ]
        weakref.finalize(self, _remove, handles)  # another engine may follow, with the same parameters

    def begin(self, update: int, replicas: LocalReplicas) -> bool:
        """Prepare for an update that the other instances begin, too; return whether it is audited."""
        options, index = self._options, self._group.index
        self._due = assignment(self._seed, options.share, update, self._num_replicas, self._group.count)
        self._first = {}
        if self._due is None:
            return False
        if self._due.owner == index:
            last = (replicas.numbers.index(self._due.replica), replicas.num_micro_batches - 1)
            self._watches = lambda: replicas.running == last
        if self._due.auditor == index:
            self._start = [buffer.clone() for buffer in self._buffers]
        return True

    def check(self, update: int, model: nn.Module, replicas: LocalReplicas) -> None:
        """Compute the gradients again and compare them; raise TrainingFailed, on all instances, where they differ.

        Called when `param.grad` has the sums over all replicas, which stay. `model`: what the passes run through.
        """
        due, index = self._due, self._group.index
        assert due is not None
        self._watches, self._due = lambda: False, None
        again = self._again(due, update, model, replicas) if due.auditor == index else {}
        if self._group.count == 1:
            rows = [self._row(self._first), self._row(again)]
        else:
            began = time.perf_counter()
            gathered = self._group.gather(self._row(again if due.auditor == index else self._first))
            self._waited(time.perf_counter() - began)
            rows = [gathered[due.owner], gathered[due.auditor]]
        different = (rows[0] != rows[1]).any(1).nonzero().flatten().tolist()
        if different:
            raise TrainingFailed(self._sentence(due, update, [self._names[place] for place in different]))

    def _again(self, due: Assignment, update: int, model: nn.Module, replicas: LocalReplicas) -> dict[int, str]:
        """Return the digests of the gradients of the second computation."""
        sums = [param.grad for param in self._params]
        now = [buffer.clone() for buffer in self._buffers]
        for param in self._params:
            param.grad = None
        if self._buffers:
            foreach.copy_(self._buffers, self._start)
        try:
            with self._options.samples(update, due.replica) as samples:
                one = replicas.alone(due.replica)
                one.begin(update, samples)
                for number in range(one.num_micro_batches):
                    loss = one.forward(model, 0, number)
                    one.backward(loss)
                    del loss
            grads = [param.grad for param in self._params]
            return {place: tensor_xxh3(grad) for place, grad in enumerate(grads) if grad is not None}
        finally:
            for param, grad in zip(self._params, sums, strict=True):
                param.grad = grad
            if self._buffers:
                foreach.copy_(self._buffers, now)
            self._start = []

    def _on_gradient(self, place: int) -> None:
        grad = self._params[place].grad
        if self._watches() and grad is not None:
            self._first[place] = tensor_xxh3(grad)

    def _row(self, digests: Mapping[int, str]) -> Tensor:
        none = "00" * _DIGEST_BYTES
        rows = [list(bytes.fromhex(digests.get(place, none))) for place in range(len(self._params))]
        return torch.tensor(rows, dtype=torch.uint8)

    def _sentence(self, due: Assignment, update: int, names: list[str]) -> str:
        """Return what differs, on whom, and whether their weights do. Collective."""
        place = self._options.place
        more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        what = f"the audit of update {update + 1} found another gradient of {names[0]}{more} in replica {due.replica}"
        end = "nothing of this update is saved"
        if due.owner == due.auditor:
            return (
                f"{what} when {place(due.owner)} computed it a second time: its processor or memory failed, or the "
                f"model's computation does not repeat (`podium check` finds out); {end}"
            )
        who = f"{place(due.owner)} computed it first, {place(due.auditor)} again"
        found: list[dict[str, str]] = all_gather_facts(self._group, tensor_digests(self._model.named_parameters()))
        apart = [name for name in found[due.owner] if found[due.owner][name] != found[due.auditor][name]]
        if not apart:
            why = (
                "their weights are equal, so a processor or memory failed in the passes, or the model's computation "
                "does not repeat (`podium check` finds out)"
            )
            return f"{what}: {who}; {why}; {end}"
        held = [digests[apart[0]] for digests in found]
        usual = max(held, key=held.count)
        odd = [index for index in (due.owner, due.auditor) if held[index] != usual]
        known = len(odd) == 1 and held.count(usual) > len(held) // 2
        whose = f"that of {place(odd[0])}" if known else "that of one of them"
        return f"{what}: {who}; their weights differ in {apart[0]}, so memory has failed, {whose}; {end}"


def _weak_hook(method: weakref.WeakMethod, place: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        on_gradient = method()
        if on_gradient is not None:
            on_gradient(place)

    return hook


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()
