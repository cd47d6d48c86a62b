"""Passes that are recorded once and replayed: the same bits as without, and given up where anything would differ."""

import pytest
import torch
from torch import nn

from podium.contract import Loss, by_dimension
from podium.engine import replay
from podium.optim.optimisers import build_optimiser
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.transforms.seeding import seed_blocks
from tests.support.engines import small_engine

NUM_UPDATES = 8


class Squares:
    fixed = True

    def loss(self, model, batch):
        output = model(batch["input"])
        return Loss(((output - batch["target"]) ** 2).sum(), len(output), {"size": (output.abs().sum(), len(output))})


class Reads(Squares):
    """Its loss depends on a value that it reads."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return Loss(found.sum * 2 if float(batch["input"][0, 0]) > 0 else found.sum, found.count)


class Counts(Squares):
    """Its loss depends on what no operator shows."""

    num = 0

    def loss(self, model, batch):
        self.num += 1
        found = super().loss(model, batch)
        return Loss(found.sum * self.num, found.count)


class Reaches(Squares):
    """Its count is read where no operator shows it."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return Loss(found.sum, 1 + int((batch["input"].numpy() > 0).sum()))


def network():
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Sequential(nn.Dropout(0.4), nn.Linear(16, 16), nn.GELU()),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 3)),
    )


def trained(workload, *, replicas=1, accumulation=1, before_update=lambda update, model: None):
    """Return (weights and buffers after some updates, the losses, what replayed)."""
    torch.manual_seed(3)
    model = network()
    seed_blocks(list(model), torch.device("cpu"))
    batch = BatchSection(micro=4, replicas=replicas, accumulation=accumulation)
    optimiser = build_optimiser(OptimSection(name="momentum", lr=0.1), model, by_dimension(model))
    engine = small_engine(model, workload, optimiser, batch, seed=5)
    draws = torch.Generator().manual_seed(1)
    for update in range(NUM_UPDATES):
        before_update(update, model)
        samples = {
            name: torch.randn(replicas, accumulation, 4, size, generator=draws)
            for name, size in (("input", 6), ("target", 3))
        }
        engine.update(update, samples, 0.01)
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return values, engine.collect().parts, engine._replicas.replay


def without(monkeypatch, workload, **options):
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_NUM_BEFORE", 1 << 40)
        return trained(workload, **options)


def same(ours, theirs):
    return ours[1] == theirs[1] and all(map(torch.equal, ours[0], theirs[0]))


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (5, 1), (3, 2)])
def test_replayed_passes_have_the_bits_of_those_that_run_as_they_are(replicas, accumulation, monkeypatch):
    sizes = {"replicas": replicas, "accumulation": accumulation}
    num_forward, num_replayed = [], []
    forward = replay.Recorded.forward
    monkeypatch.setattr(replay.Recorded, "forward", lambda *args: (num_replayed.append(1), forward(*args))[1])
    loss = Squares.loss
    monkeypatch.setattr(Squares, "loss", lambda *args: (num_forward.append(1), loss(*args))[1])
    ours = trained(Squares(), **sizes)
    passes = NUM_UPDATES * replicas * accumulation
    assert len(num_replayed) > 0
    if accumulation == 1:  # after the first, the recorded and the compared ones, the model is not called any more
        until_recorded = replay._NUM_BEFORE + 1
        update_of_it = -(-until_recorded // replicas) * replicas
        assert len(num_forward) == update_of_it + replay._NUM_COMPARED
        assert len(num_replayed) == passes - update_of_it
    assert same(ours, without(monkeypatch, Squares(), **sizes))


class Library(Squares):
    """Its loss is one of torch's, which is reduced in place."""

    def loss(self, model, batch):
        output = model(batch["input"])
        return Loss(self.function(output, batch["target"].sigmoid(), reduction="sum"), len(output))


@pytest.mark.parametrize(
    "name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"]
)
def test_losses_of_torch_are_replayed_without_a_word(name, monkeypatch, capfd):
    monkeypatch.setattr(Library, "function", staticmethod(getattr(nn.functional, name)), raising=False)
    ours = trained(Library())
    assert ours[2]._num_equal == replay._NUM_COMPARED
    assert same(ours, without(monkeypatch, Library()))
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("workload", [Reads, Counts, Reaches])
def test_a_loss_that_depends_on_more_than_its_samples_is_not_replayed(workload, monkeypatch):
    ours = trained(workload())
    assert ours[2]._is_given_up
    assert same(ours, without(monkeypatch, workload()))


def test_a_workload_that_does_not_say_that_its_loss_is_fixed_is_not_replayed(monkeypatch):
    monkeypatch.setattr(Squares, "fixed", False)
    monkeypatch.setattr(replay, "Recorded", None)
    trained(Squares())


def test_a_large_model_is_not_replayed(monkeypatch):
    monkeypatch.setattr(replay, "MOST_BYTES", 1000)
    assert trained(Squares())[2]._is_given_up


def test_a_hook_that_comes_later_sees_every_pass(monkeypatch):
    def hooked(seen):
        def before_update(update, model):
            if update == 7:
                model[0].register_forward_hook(lambda module, inputs, output: seen.append(output) or output * 2)

        return before_update

    ours, theirs = [], []
    found = trained(Squares(), before_update=hooked(ours))
    assert same(found, without(monkeypatch, Squares(), before_update=hooked(theirs)))
    assert len(ours) == len(theirs) == 1


def test_weights_that_moved_to_other_memory_are_those_that_train(monkeypatch):
    def moved(update, model):
        if update == 7:
            for param in model.parameters():
                param.data = param.data.clone()

    assert same(trained(Squares(), before_update=moved), without(monkeypatch, Squares(), before_update=moved))
