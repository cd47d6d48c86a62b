"""Goes on with other instances, without a checkpoint: when one is lost or has come, the others keep their weights and
optimiser state, deal the replicas anew, and do the interrupted update again. Called by `train.py`.

Every instance has the state of the last update that it completed, which differs by one at most: some may have made the
step that others were interrupted before. All go on from the furthest one; whoever is behind, or new, takes the state
from an instance that is there. Losses that were not recorded yet are read from where every instance has left them,
the lost one too (`PendingLosses.publish`). What follows an update (record, validation, checkpoint) is done again unless
all have finished it under a lead that is still there.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.checkpoints.reading import Checkpoint, shared
from podium.distributed.lost import InstanceLost
from podium.distributed.messages import broadcast_facts
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.distributed.regrouping import Group, Membership, Standing
from podium.distributed.sharding.spare import CopiesLost
from podium.engine.parallelism import Parallelism, Replicated
from podium.engine.update import Engine
from podium.errors import PodiumError
from podium.optim.optimisers import Optimiser
from podium.optim.state_tensors import state_tensors
from podium.training.build import Training
from podium.training.clock import Clock
from podium.training.progress import Meter
from podium.training.resharing import Resharing, keeps_spare_copies
from podium.ui import console

_NO_STATE = -1
#: how often an instance looks whether another group is to go on: a look at a file takes as long as a small kernel
_LOOK_S = 0.01


class LeadChanged(Exception):
    """This instance leads from now on: it writes records and checkpoints, and prints."""


class Regrouping:
    """What of a training outlives its groups of instances."""

    def __init__(self, training: Training, clock: Clock) -> None:
        self._training, self._clock = training, clock
        self._membership = training.placement.instances.membership
        self._engine: Engine | None = None
        self._shares = Resharing(training) if keeps_spare_copies(training.recipe) else None
        #: the state after the last update, before what follows it, once all its losses are collected
        self._collected: dict[str, Any] | None = None
        self._update = training.state.progress.update
        #: whether what follows the last update is to be done again
        self.again = False
        #: whether the first of the instances was lost, and this one has taken its place
        self.has_taken_over = False
        self._look_at = 0.0
        #: the speed since the last record
        self.meter = Meter(clock, training.task.lengths, self._update, training)

    # --- in the order of an update ----------------------------------------------------------------------------------

    def begin(self, engine: Engine) -> None:
        """Begin to make updates with `engine`, in a group that all of its instances are in."""
        self._engine, self._collected = engine, None
        self._update = self._training.state.progress.update
        if self._membership is None:
            return
        if not self.again:
            self._membership.recorded()
        if self._training.parallelism.can_regroup() and self._training.placement.device.type == "cpu":
            self._membership.announce()
        else:
            self._membership.stay()

    def check(self) -> None:
        """Raise InstanceLost where another group is to go on: between two updates, as far as this one knows."""
        if self._membership is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        if self._membership.has_changed():
            raise InstanceLost(None, "the group has changed")

    def updated(self) -> None:
        """Note that an update is complete."""
        self._update, self._collected = self._training.state.progress.update, None
        if self._membership is not None:
            self._membership.updated()

    def collected(self) -> None:
        """Note that the losses of all updates so far are in the progress."""
        if self._membership is not None:
            self._collected = self._training.state.state()

    def recorded(self) -> None:
        """Note that what follows the update is done, as far as it is due."""
        self.again = False
        if self._membership is not None:
            self._membership.recorded()

    def end(self) -> None:
        """Note that no more updates are made."""
        if self._membership is not None:
            self._membership.withdraw()

    # --- another group ----------------------------------------------------------------------------------------------

    def regroup(self, lost: InstanceLost) -> None:
        """Go on in another group; raise `lost` where that is not possible, LeadChanged if this instance leads now."""
        training, membership = self._training, self._membership
        if membership is None or not training.parallelism.can_regroup():
            raise lost
        was_lead = training.placement.is_lead
        training.parallelism.leave()
        if self._shares is not None and self._engine is not None and self._shares.interrupted(self._engine):
            self.updated()
        self._enter(membership)
        if training.placement.is_lead and not was_lead:
            membership.speak()
            self.has_taken_over = True
            raise LeadChanged

    def restart(self, reason: str) -> None:
        """Have all instances restart from the last checkpoint."""
        if self._membership is not None:
            self._membership.cannot(reason)

    def join(self) -> None:
        """Come to a run that is under way, with everything built and no state; lead it where no other one can."""
        assert self._membership is not None
        self._update = _NO_STATE
        self._enter(self._membership)
        if self._training.placement.is_lead:
            self._membership.speak()
            self.has_taken_over = True

    def _enter(self, membership: Membership) -> None:
        try:
            while not self._is_in(membership, membership.next_group(self._standing())):
                pass
        except (InstanceLost, PodiumError):
            raise
        except Exception as error:
            console.keep_traceback()
            reason = str(error).splitlines()[0] if str(error) else ""
            self.restart(f"the instances could not go on by themselves ({type(error).__name__}: {reason})")
            raise InstanceLost(None, reason) from error

    def _standing(self) -> Standing:
        """Return what this instance has, with all losses of complete updates in the progress where it can have them."""
        if self._update == _NO_STATE:
            return Standing(_NO_STATE, whole=False)
        if self._collected is None:
            self._collect_lost()
        return Standing(self._update, whole=self._collected is not None)

    def _collect_lost(self) -> None:
        """Note the losses of complete updates, where that is possible without those that are lost."""
        assert self._engine is not None
        with suppress(InstanceLost):
            self._training.state.progress.pending.extend(self._engine.rescue())
            self._collected = self._training.state.state()

    def _is_in(self, membership: Membership, group: Group) -> bool:
        """Have all instances of the group at its update; return False where one of them is lost meanwhile."""
        training, state = self._training, self._training.state
        try:
            if self._shares is not None:
                form, optimiser = self._take_share(self._shares, membership, group)
            else:
                self._take_state(membership, group)
                form, optimiser = Replicated(state.model, group.instances), state.optimiser
            group.instances.barrier()
        except InstanceLost:
            group.instances.leave()
            return False
        membership.has_state()
        # Nothing follows the update that a training begins or goes on from: no losses have come since.
        self.again = group.again and bool(state.progress.pending.parts)
        training.placement = replace(training.placement, topology=group.topology, instances=group.instances)
        training.parallelism, state.optimiser = form, optimiser
        return True

    def _take_state(self, membership: Membership, group: Group) -> None:
        """Hand over the state, or take it. Between any two waits this instance has the state of one update, whole."""
        state, instances, is_there = self._training.state, group.instances, self._update == group.update
        if group.again and is_there and self._collected is not None:
            state.load_facts(self._collected)  # as before what is done again
        facts, own = None, None
        if is_source := instances.index == group.source:
            assert is_there
            assert self._collected is not None, "nobody has the losses that are not recorded yet"
            facts = {"update": group.update, "seconds": self._clock.seconds(), **state.state()}
        facts = broadcast_facts(instances, facts, group.source)
        if not bool(instances.gather(torch.tensor(is_there)).all()):
            if is_source:
                average = state.average.tensors if state.average is not None else {}
                weights, optimiser = local_tensors(state.model), state_tensors(state.optimiser)
                tensors = map(_copied, (weights, optimiser, average))
                own = Checkpoint(Path("another instance"), group.update, facts, *tensors)
            found = shared(own, instances, source=group.source)
            if not is_there:
                assert found is not None
                found.restore(state.model, state.optimiser)
                state.load(found.state, found.average)
                if self._update == _NO_STATE:
                    self._clock.restore(facts["seconds"])
                membership.updated()
        if not is_source:
            state.load_facts(facts)
        self._update, self._collected = group.update, state.state()

    def _take_share(self, shares: Resharing, membership: Membership, group: Group) -> tuple[Parallelism, Optimiser]:
        """Do the same where each instance has a share of the optimiser's state; return what makes the next updates."""
        state, instances = self._training.state, group.instances
        if shares.follow(self._update, group):
            self.updated()
            self._collect_lost()
        is_there = self._update == group.update
        if not is_there and self._update != _NO_STATE:
            raise AssertionError("an update was made that this instance cannot make")
        if group.again and is_there and self._collected is not None:
            state.load_facts(self._collected)
        try:
            shares.check_covered(group, is_there)
        except CopiesLost:
            reason = "the instances that held a share of the optimiser's state and its spare copies are lost"
            self.restart(reason)
            raise InstanceLost(None, reason) from None
        shares.complete_weights(group, is_there)
        form, optimiser = shares.dealt(group, is_there)
        if is_there:
            self._collected = state.state() if self._collected is not None else None
        is_source = instances.index == group.source
        assert not is_source or self._collected is not None, "nobody has the losses that are not recorded yet"
        own = {"seconds": self._clock.seconds(), **state.state()} if is_source else None
        facts = broadcast_facts(instances, own, group.source)
        if not is_source:
            state.load_facts(facts)
        if bool(instances.gather(torch.tensor(not is_there)).any()):
            shares.share_average(group, is_there)
        if not is_there:
            self._clock.restore(facts["seconds"])
            membership.updated()
            self._training.parallelism, state.optimiser = form, optimiser  # it had none: from here on it holds these
        self._update, self._collected = group.update, state.state()
        return form, optimiser


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that share no memory and have no gaps."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
