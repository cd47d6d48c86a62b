"""Memory: a training that cannot fit is refused with what to change; one that fits is never held up or changed."""

import weakref

import numpy as np
import pytest
import torch

from podium.contract import Loss
from podium.engine.losses import PendingLosses
from podium.recipe.loading import load_recipe
from podium.training import memory
from podium.training.build import build_training
from tests.support.processes import assert_user_error, podium_here, run_files
from tests.support.recipes import TINY


def with_host(monkeypatch, total: float, available: float) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: (int(total), int(available)))


def built(workload: str, *overrides: str):
    name, *words = TINY[workload]
    return build_training(load_recipe(name, [*words, *overrides]))


def test_a_training_that_cannot_fit_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    with_host(monkeypatch, 1e8, 1e8)
    done = podium_here("train", *TINY["mnist"], "--out", tmp_path / "run")
    assert_user_error(
        done, "this training needs about ", "GB of memory (batch.micro = 8 takes", "but this host has 0.1 GB",
        "a smaller batch.micro", "parallel.recompute=true", "engine.memory_check=warn tries it nevertheless",
    )  # fmt: skip
    assert run_files(tmp_path) == []


def test_it_is_tried_nevertheless_where_the_recipe_says_so(tmp_path, monkeypatch):
    with_host(monkeypatch, 1e8, 1e8)
    args = [*TINY["mnist"], "train.length=1up", "schedule.warmup=0"]
    warned = podium_here("train", *args, "engine.memory_check=warn", "--out", tmp_path / "warn")
    assert (warned.returncode, warned.stderr.count("this training needs about")) == (0, 1)
    silent = podium_here("train", *args, "engine.memory_check=off", "--out", tmp_path / "off")
    assert (silent.returncode, silent.stderr.count("this training needs about")) == (0, 0)


def test_memory_that_others_have_taken_for_now_is_only_warned_of(tmp_path, monkeypatch):
    with_host(monkeypatch, 1e12, 1e3)
    done = podium_here("train", *TINY["mnist"], "train.length=1up", "schedule.warmup=0", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("GB are available on this host now") == 1


def test_what_passes_take_grows_with_the_micro_batch():
    small, large = (memory.estimate(built("cnn", f"batch.micro={micro}")) for micro in (4, 128))
    if small is None or large is None:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert large.passes > 4 * small.passes
    assert large.total - large.now > small.total - small.now


@pytest.mark.parametrize("workload", ["gpt2", "mnist"])
def test_passes_that_are_too_large_to_be_tried_are_extended_from_small_ones(workload, monkeypatch):
    """An estimate must not do what it warns of."""
    training = built(workload, "batch.micro=64", "valid.micro=64")
    whole = memory.estimate(training)
    tried = []
    run = memory._pass
    monkeypatch.setattr(memory, "_pass", lambda it, num, *, train=True: (tried.append(num), run(it, num, train=train)))
    monkeypatch.setattr(memory, "_affordable", lambda training, sample_bytes: 8)
    part = memory.estimate(training)
    if whole is None or part is None:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert max(tried) == 8
    assert part.passes == pytest.approx(whole.passes, rel=0.1)


def test_what_passes_take_past_the_allocator_of_torch_is_measured(monkeypatch):
    """Libraries have buffers of their own, which no request of torch's tells of."""
    training = built("mnist")
    without = memory.estimate(training)
    run, buffers = memory._pass, []

    def passes(training, num_samples, *, train=True):
        buffers[:] = [np.ones(200 << 20, np.uint8)] if train else []
        run(training, num_samples, train=train)
        buffers.clear()

    monkeypatch.setattr(memory, "_pass", passes)
    found = memory.estimate(training)
    if without is None or found is None:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert found.total - without.total == pytest.approx(200 << 20, rel=0.1)
    assert found.now - without.now < 20 << 20


def test_no_trial_takes_more_than_a_share_of_the_available_memory(monkeypatch):
    training = built("mnist")
    with_host(monkeypatch, 1e12, 4e9)
    assert memory._affordable(training, 10**7) == 100
    assert memory._affordable(training, 10**12) == 2


def test_losses_of_earlier_passes_keep_no_tensor_between_blocks_that_are_used_again():
    pending, total = PendingLosses(), torch.tensor(1.5) * 2
    kept = weakref.ref(total)
    pending.add(Loss(total, 4, {"accuracy": (torch.tensor(3), 4)}))
    del total
    assert kept() is None
    assert pending.collect().means() == {"loss": 0.75, "accuracy": 0.75}


def test_a_trial_leaves_the_model_and_random_numbers_as_they_are():
    training = built("cnn")
    before = {name: tensor.clone() for name, tensor in training.state.model.state_dict().items()}
    random = torch.get_rng_state()
    memory.estimate(training)
    after = training.state.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random, torch.get_rng_state())
    assert training.state.model.training
    assert all(param.grad is None for param in training.state.model.parameters())


def test_the_estimate_changes_no_bit_of_a_training(tiny, tmp_path, weights_alone):
    weights = {weights_alone([*tiny, f"engine.memory_check={mode}"]) for mode in ("error", "off")}
    assert len(weights) == 1
