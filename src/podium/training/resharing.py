"""Deals the shares of the optimiser's state anew when an instance is lost or has come, from those of the instances that
are left and from their spare copies (`launch.spare_copies`). Called by `regrouping.py`.

Every instance makes the step of its share by itself, once all have the sums of all gradients: the barrier before the
step. So when one is lost, either no instance has made the step, and all do the update again; or one has, and all others
can, as they have the sums. Weights that the lost one has not told yet are with those that hold a copy of its share.
"""

import copy
from typing import Any

import torch

from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.distributed.regrouping import Group
from podium.distributed.sharding.spare import check_covered, taken
from podium.engine.parallelism import Parallelism, ShardedOptimiser
from podium.engine.update import Engine
from podium.optim.optimisers import Optimiser
from podium.optim.state_tensors import load_state_tensors, state_tensors
from podium.recipe.loading import Recipe
from podium.training.build import Training, own_of, shared_out
from podium.training.chain import mark_weights
from podium.training.validation import take_average


def keeps_spare_copies(recipe: Recipe) -> bool:
    return recipe.parallel.shard == "optimiser" and recipe.launch.spare_copies > 0


class Resharing:
    """The state of this instance, whose weights may wait for what others have stepped."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._engine: Engine | None = None
        #: the facts of the state before the losses of complete updates were added to it
        self._before: dict[str, Any] = {}
        #: weights after the step of this instance that it does not know yet; whether they are not averaged yet
        self._unknown: set[str] = set()
        self._is_averaged = True

    def interrupted(self, engine: Engine) -> bool:
        """Take note of an update that was interrupted; return whether this instance has made its step."""
        self._engine = engine
        has_stepped = engine.num_made > self._training.state.progress.update
        if has_stepped:
            self._stepped()
        self._before = copy.deepcopy(self._training.state.state())
        return has_stepped

    def _stepped(self) -> None:
        training = self._training
        training.state.progress.update += 1
        self._is_averaged = False
        if isinstance(training.parallelism, ShardedOptimiser):
            held, model = training.parallelism.held(), training.state.model
            known = {param for name, param in model.named_parameters() if name in held or not param.requires_grad}
            every = model.named_parameters(remove_duplicate=False)  # one that is tied has several names
            self._unknown = {name for name, param in every if param not in known}

    def follow(self, update: int, group: Group) -> bool:
        """Make the step of the interrupted update if the group goes on from there, else leave it; return whether it
        was made. `update`: the last one that this instance has made."""
        engine = self._engine
        if engine is None or not engine.can_finish:
            return False
        if group.update == update:
            engine.give_up()
            return False
        self._training.state.load_facts(self._before)
        engine.finish()
        self._stepped()
        return True

    def check_covered(self, group: Group, is_there: bool) -> None:
        """Raise CopiesLost, on all instances, where a share is lost with all of its copies. Collective."""
        model, form = self._training.state.model, self._training.parallelism
        every = {name for name, param in model.named_parameters() if param.requires_grad}
        held = form.held() if isinstance(form, ShardedOptimiser) else every
        check_covered(group.instances, held if is_there else (), every)

    def complete_weights(self, group: Group, is_there: bool) -> None:
        """Take the weights that other instances have stepped, or all; average them where that is due. Collective."""
        training = self._training
        every = local_tensors(training.state.model)
        unknown = self._unknown if is_there else set(every)
        known = {name: tensor for name, tensor in every.items() if name not in unknown}
        with torch.no_grad():
            for name, values in taken(group.instances, known, unknown.__contains__).items():
                every[name].copy_(values)
        self._unknown = set()
        if not self._is_averaged and is_there:
            take_average(training)
            mark_weights(training)
        self._is_averaged = True

    def dealt(self, group: Group, is_there: bool) -> tuple[Parallelism, Optimiser]:
        """Return the new form of parallelism, and an optimiser with the state of this instance's new share. Collective.

        What was before stays whole, until all have theirs.
        """
        training, state = self._training, self._training.state
        form = shared_out(training.recipe, state.model, group.instances)
        groups, section = training.task.workload.param_groups(state.model), training.recipe.optim
        optimiser = form.build_optimiser(section, groups, own_of(training.recipe, "optim"))
        held = form.held() if isinstance(form, ShardedOptimiser) else set(optimiser.names.values())
        has = state_tensors(state.optimiser) if is_there else {}
        mine = taken(group.instances, has, lambda key: key.partition("/")[2] in held or "/" not in key)
        load_state_tensors(optimiser, mine)
        return form, optimiser

    def share_average(self, group: Group, is_there: bool) -> None:
        """Give the average of the weights to those that have none. Collective."""
        average = self._training.state.average
        if average is None:
            return
        source = average.tensors if group.instances.index == group.source else {}
        found = taken(group.instances, source, lambda name: not is_there)
        if not is_there:
            average.load(found, self._training.state.progress.num_averaged)
