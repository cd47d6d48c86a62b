"""The link that every metric record adds to the chain of a run, and the check that all instances have the same weights.

Every holder digests the tensors that it has; digests are joined by name. Where all instances have all weights, each
digests them all, which takes no longer than if one did, and shows memory that has changed on one of them.
"""

from typing import Any

import torch

from podium.chain import LINK, WEIGHT_MARKS, WEIGHTS
from podium.distributed.digest import joined_digest, tensor_digests
from podium.distributed.messages import all_gather_facts, broadcast_facts
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.errors import TrainingFailed
from podium.training.build import Training


def chained(training: Training) -> dict[str, Any]:
    """Digest the weights after the last update and add them to the chain; return the fields of its record.

    Collective: all instances have the same chain. Raise TrainingFailed where they turn out to have different weights.
    """
    progress = training.state.progress
    weights, each = _digest(training), progress.chain.each
    progress.chain = progress.chain.extended(progress.update, weights)
    return {WEIGHTS: weights, LINK: progress.chain.link} | ({WEIGHT_MARKS: each} if each else {})


def mark_weights(training: Training) -> None:
    """Note a mark of the weights after an update, where the recipe asks for that."""
    if training.recipe.log.digests == "updates":
        progress = training.state.progress
        weights = joined_digest(tensor_digests(local_tensors(training.state.model).items()))
        progress.chain = progress.chain.marked(weights)


def _digest(training: Training) -> str:
    parallelism, instances = training.parallelism, training.placement.instances
    if not parallelism.has_all_weights and parallelism.pipeline_group is None:
        with parallelism.whole_model() as model:  # sharded by rows: instance 0 has them whole for a moment
            own = joined_digest(tensor_digests(parallelism.weights(model))) if training.placement.is_lead else ""
        return str(broadcast_facts(instances, {"weights": own})["weights"])
    own_digests = tensor_digests(local_tensors(training.state.model).items())
    digest = joined_digest(own_digests)
    if instances.count == 1:
        return digest
    exact = training.recipe.engine.reduction == "exact"
    if parallelism.pipeline_group is None:
        everyone = instances.gather(torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
        if (everyone == everyone[0]).all():
            return digest
    found: list[dict[str, str]] = all_gather_facts(instances, own_digests)
    if exact:
        _check_equal(training, found)
    joined: dict[str, str] = {}
    for digests in found:
        joined = {**digests, **joined}
    return joined_digest(joined)


def _check_equal(training: Training, found: list[dict[str, str]]) -> None:
    """Raise TrainingFailed that names a tensor, and the instances on which it is not that of most others."""
    model, topology = training.state.model, training.placement.topology
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_floating_point():  # counters of a user's own are no part of the promise
            continue
        held = {index: digests[name] for index, digests in enumerate(found) if name in digests}
        values = sorted(held.values())
        if not values or values[0] == values[-1]:
            continue
        usual = max(values, key=values.count)
        odd = [index for index, value in held.items() if value != usual]
        alone = values.count(usual) > len(odd)
        if not alone:
            odd = sorted(held)
        named = ", ".join(f"{index} on {topology.host_of(index)}" for index in odd)
        what = f"is not on instance {named} what it is on the others" if alone else f"differs between instances {named}"
        raise TrainingFailed(
            f"after update {training.state.progress.update}, {name} {what}: memory or a processor there has failed, or "
            "its computation is not exact; earlier checkpoints are kept"
        )
