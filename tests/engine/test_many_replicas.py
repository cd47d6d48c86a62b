"""A thousand replicas on one instance: memory for the partial sums of the tree, not for each of them."""

import math
import weakref

from podium.distributed.reduction.tree import TreeSum
from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from podium.training.feeding import build_engine
from tests.support.recipes import TINY

NUM_REPLICAS = 1024


def test_an_update_of_1024_replicas_keeps_no_more_than_log2_sets_of_gradients(one_thread, monkeypatch):
    name, *overrides = TINY["mnist"]
    many = ["batch.micro=1", f"batch.replicas={NUM_REPLICAS}", "train.length=2up", "workload.data.generated_train=2048"]
    small = ["workload.model.filters=[2,2]", "workload.model.hidden=8"]
    training = build_training(load_recipe(name, [*overrides, *many, *small]))
    alive: list[weakref.ref] = []
    most = 0
    push = TreeSum.push

    def counted(tree, tensors):
        nonlocal most
        alive.extend(weakref.ref(tensor) for tensor in tensors)
        alive[:] = [tensor for tensor in alive if tensor() is not None]
        most = max(most, len({tensor().data_ptr() for tensor in alive}) / len(tensors))
        push(tree, tensors)

    monkeypatch.setattr(TreeSum, "push", counted)
    samples = {
        name: rows.expand(NUM_REPLICAS, 1, *rows.shape) for name, rows in training.task.workload.example(1).items()
    }
    build_engine(training).update(0, samples, 1e-3)
    # at least: the last replica finds a complete sum on every level of the tree
    assert most == math.log2(NUM_REPLICAS) + 1
