"""`engine.graph`: passes captured once and replayed have the bits of passes that run, with a stand-in for CUDA's."""

from typing import ClassVar

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from podium.engine import graph
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.train import train
from tests.support.recipes import TINY

_OFF = ["workload.model.dropout=0", "valid.every=0up", "checkpoint.every=100up", "train.length=4up", "batch.micro=2",
        "engine.layout=default", "engine.kernels=off", "schedule.warmup=1up"]  # fmt: skip


class Recorded(TorchDispatchMode):
    """Keeps operators with the memory they took and gave, and runs nothing else when they are repeated: what the host
    does between them has no effect, as with a graph."""

    made: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.kept, self.num_replays = [], 0
        Recorded.made.append(self)

    def warm_up(self, work):
        work()

    def capture(self, work):
        with self:
            work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.kept.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        self.num_replays += 1
        for func, args, kwargs, results in self.kept:
            if func.is_view:
                continue
            again = func(*args, **kwargs)
            pairs = zip(results, again, strict=True) if isinstance(results, tuple) else [(results, again)]
            for result, value in pairs:
                if hasattr(result, "copy_") and result is not value:
                    result.detach().copy_(value)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(graph.CAPTURES, "cpu", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def recipe_of(name, *more):
    return load_recipe(TINY[name][0], [*TINY[name][1:], *_OFF, *more])


def weights(folder, recipe):
    summary = train(recipe, folder).summary()
    return summary["weights_sha256"], summary["train"]


@pytest.mark.parametrize("more", [(), ("batch.replicas=2", "batch.accumulation=2", "precision.loss_scale=8")])
def test_replayed_passes_have_the_bits_of_passes_that_run(more, recorded, tmp_path):
    """Batch norm, whose buffers change, accumulation and replicas."""
    expected = weights(tmp_path / "run", recipe_of("neuron", *more))
    assert weights(tmp_path / "replayed", recipe_of("neuron", *more, "engine.graph=true")) == expected
    (one,) = recorded
    assert one.num_replays == 4 * (4 if more else 1)


def test_a_model_that_draws_is_refused(recorded, tmp_path):
    with pytest.raises(UserError, match="the model draws random numbers in training"):
        train(recipe_of("gpt2", "workload.model.dropout=0.1", "engine.graph=true"), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "override", "reason"),
    [
        ("neuron", "precision.loss_scale=auto", "precision.loss_scale = auto"),
        ("neuron", "parallel.recompute=true", "parallel.recompute"),
        ("bert", "precision.loss_scale=1", "counts that the host reads from the samples"),
    ],
)
def test_what_cannot_be_replayed_is_refused(name, override, reason, recorded, tmp_path):
    with pytest.raises(UserError, match=rf"engine\.graph = true cannot be combined with {reason}"):
        train(recipe_of(name, override, "engine.graph=true"), tmp_path / "run")


def test_replicas_that_share_statistics_are_refused(recorded, tmp_path):
    keys = ["batch.replicas=2", "workload.model.norm.span=2", "engine.graph=true"]
    with pytest.raises(UserError, match=r"engine\.graph = true cannot be combined with norm\.span = 2"):
        train(load_recipe(TINY["cnn"][0], [*TINY["cnn"][1:], *keys]), tmp_path / "run")


def test_a_device_without_graphs_is_refused(tmp_path):
    with pytest.raises(UserError, match="a device of the kind cpu, which has no graphs"):
        train(recipe_of("neuron", "engine.graph=true"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
