"""Audits: gradients computed a second time are those of the first, and one bit that is not is found and named."""

import gc
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.distributed.digest import weights_sha256
from podium.distributed.instances import Instances
from podium.engine.audit import Audits, assignment, audited
from podium.errors import TrainingFailed, UserError
from podium.recipe.loading import load_recipe
from podium.replica_tree import deal
from podium.runs.folder import Run
from podium.topology import build_topology
from podium.training.build import Training, build_training, check_audit
from podium.training.chain import chained
from podium.training.feeding import build_engine, samples_of_updates
from tests.support.crew import Crew
from tests.support.own import WORKLOAD, write_own
from tests.support.processes import assert_user_error, podium_here, sentence
from tests.support.recipes import TINY

MNIST = [*TINY["mnist"], "batch.micro=2", "batch.replicas=4", "batch.accumulation=2"]
NUM_UPDATES = 4


@pytest.fixture(scope="module")
def crew():
    crew = Crew(3, __name__)
    yield crew
    crew.close()


def trained(recipe: list[str], instances: Instances | None = None, before_update=lambda training, update: None) -> str:
    """The weights after a few updates."""
    name, *overrides = recipe
    instances = instances or Instances.alone()
    loaded = load_recipe(name, overrides)
    hosts = tuple(f"host-{number}" for number in range(instances.count))
    training = build_training(
        loaded, build_topology(loaded.batch.num_replicas, instances.count, hosts), instances, fresh=True
    )
    engine = build_engine(training)
    with samples_of_updates(training, 0, NUM_UPDATES) as every:
        for update, samples in enumerate(every):
            before_update(training, update)
            engine.update(update, samples, 1e-2)
            training.state.progress.update += 1
    engine.collect()
    return weights_sha256(training.state.model)


def flip(training: Training, name: str) -> None:
    """Change one bit in the memory of a weight."""
    weight = dict(training.state.model.named_parameters())[name]
    weight.detach().view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 21)


def a_name(recipe: list[str]) -> str:
    """The first weight of the model."""
    return next(iter(dict(build_training(load_recipe(recipe[0], recipe[1:])).state.model.named_parameters())))


# --- which, and by whom -----------------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(1, 24), st.data())
def test_audits_are_those_of_the_same_replica_on_any_number_of_instances(seed, update, num_replicas, data):
    count = data.draw(st.integers(1, num_replicas))
    alone = assignment(seed, 0.5, update, num_replicas, 1)
    found = assignment(seed, 0.5, update, num_replicas, count)
    assert (alone is None) == (found is None)
    if found is None or alone is None:
        return
    assert alone.replica == found.replica
    assert found.replica in deal(num_replicas, count)[found.owner]
    assert 0 <= found.auditor < count
    assert (found.auditor != found.owner) == (count > 1)


def test_the_share_is_that_of_the_updates_and_everybody_is_audited():
    chosen = [assignment(3, 0.05, update, 8, 4) for update in range(20_000)]
    due = [each for each in chosen if each is not None]
    assert len(due) == audited(3, 0.05, 20_000)
    assert 0.04 < len(due) / 20_000 < 0.06
    assert audited(3, 0.0, 1000) == 0
    assert audited(3, 1.0, 1000) == 1000
    assert {each.replica for each in due} == set(range(8))
    assert {(each.owner, each.auditor) for each in due} == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert np.ptp(np.bincount([each.replica for each in due])) < 80


# --- equal, and not ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_second_computation_is_equal_and_changes_nothing(tiny):
    """Dropout, batch norm, masks drawn while reading: all is that of the replica's place."""
    recipe = [*tiny, "batch.micro=2", "batch.replicas=3", "batch.accumulation=2"]
    assert trained([*recipe, "engine.audit=1"]) == trained(recipe)


def test_a_gradient_with_another_bit_is_found_and_named():
    name, calls = a_name(MNIST), []

    def before_update(training: Training, update: int) -> None:
        if update == 0:
            weight = dict(training.state.model.named_parameters())[name]
            weight.register_hook(lambda grad: wrong(grad, update_of(training)))

    def update_of(training: Training) -> int:
        return training.state.progress.update

    def wrong(grad: torch.Tensor, update: int) -> torch.Tensor:
        calls.append(update)
        if update != 2 or calls.count(2) > 8:  # the passes of 4 replicas; what follows is the audit
            return grad
        grad = grad.clone()
        grad.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return grad

    with pytest.raises(TrainingFailed) as failed:
        trained([*MNIST, "engine.audit=1"], before_update=before_update)
    text = str(failed.value)
    assert text.startswith(f"the audit of update 3 found another gradient of {name} in replica ")
    assert "when instance 0 on host-0 computed it a second time" in text
    assert text.endswith("nothing of this update is saved")


def audited_together(instances: Instances, name: str, index: int | None, update: int) -> str:
    """The weights, or what an audit says where a bit of the memory of one instance flips before an update."""

    def before_update(training: Training, now: int) -> None:
        if instances.index == index and now == update:
            flip(training, name)

    try:
        return trained([*MNIST, "engine.audit=1"], instances, before_update)
    except TrainingFailed as error:
        return str(error)


@pytest.mark.slow
def test_a_flipped_bit_in_the_memory_of_one_of_two_instances_is_found_by_the_other(crew):
    crew.join(2)
    name = a_name(MNIST)
    assert crew.run(audited_together, name, None, 0) == [trained(MNIST)] * 2
    said = crew.run(audited_together, name, 1, 2)
    assert said[0] == said[1]
    assert said[0].startswith("the audit of update 3 found another gradient of ")
    assert "instance 0 on host-0" in said[0]
    assert "instance 1 on host-1" in said[0]
    assert f"their weights differ in {name}, so memory has failed, that of one of them" in said[0]


@pytest.mark.slow
def test_of_three_instances_the_odd_one_is_told(crew):
    crew.join(3)
    name = a_name(MNIST)
    for index in range(3):
        said = crew.run(audited_together, name, index, 0)
        assert len({*said}) == 1
        if f"instance {index} on" in said[0]:  # it took part in the audit of this update, or in a later one
            assert f"so memory has failed, that of instance {index} on host-{index}" in said[0]
            return
    pytest.fail("no audit")


def drifted(instances: Instances, name: str, index: int) -> str:
    def before_update(training: Training, now: int) -> None:
        if instances.index == index and now == 1:
            flip(training, name)
        if now == 2:
            chained(training)

    try:
        return trained(MNIST, instances, before_update)
    except TrainingFailed as error:
        return str(error)


@pytest.mark.slow
def test_instances_that_have_drifted_apart_are_told_at_the_next_record(crew):
    crew.join(3)
    said = crew.run(drifted, name := a_name(MNIST), 1)
    assert len({*said}) == 1
    assert said[0].startswith(
        f"after update 2, {name} is not on instance 1 on host-1 what it is on the others: memory or a processor there"
    )
    crew.join(2)
    assert f"{name} differs between instances 0 on host-0, 1 on host-1" in crew.run(drifted, name, 1)[0]


# --- in a training ----------------------------------------------------------------------------------------------------

#: a layer of a user's model: a bit of its weight flips in the memory of the second instance, in a late pass
FAULTY = """
import os
import torch


class Faulty(nn.Linear):
    passes = 0

    def forward(self, x):
        self.passes += 1
        if os.environ.get("RANK") == "1" and self.passes == 25:
            self.weight.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)
        return super().forward(x)


class Squares"""


@pytest.mark.slow
def test_a_training_ends_with_3_and_keeps_the_checkpoints_before(podium, tmp_path):
    recipe = write_own(
        tmp_path, WORKLOAD.replace("\nclass Squares", FAULTY).replace("nn.Linear(3, hidden)", "Faulty(3, hidden)")
    )
    words = ["engine.updates_per_call=1000", "engine.audit=1", "valid.every=0"]
    done = podium("train", recipe, *words, "--instances", 2, "--out", "run", timeout=200)
    assert done.returncode == 3, done.stderr
    told = sentence(done.stderr)
    assert "found another gradient of" in told
    assert "instance 0 on" in told
    assert "instance 1 on" in told
    assert "their weights differ in 0.weight, so memory has failed" in told
    assert Run(tmp_path / "run").summary()["state"] == "failed"
    saved = sorted(int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [4, 8]
    assert 8 < int(told.partition("the audit of update ")[2].split()[0]) < 12


def test_parameters_keep_no_audits_of_an_engine_that_is_gone():
    training = build_training(load_recipe(MNIST[0], [*MNIST[1:], "engine.audit=1"]), fresh=True)
    made: list[weakref.ref] = []

    def remembered(*args: object) -> Audits:
        audits = Audits(*args)  # type: ignore[arg-type]
        made.append(weakref.ref(audits))
        return audits

    with mock.patch("podium.engine.update.Audits", remembered):
        engine = build_engine(training)
    assert made[0]() is not None
    del engine
    gc.collect()
    assert made[0]() is None
    assert list(training.state.model.parameters())


def test_a_summary_tells_how_many_updates_were_audited(tmp_path):
    done = podium_here("train", *MNIST, "train.length=10up", "engine.audit=0.5", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "there is one instance, which checks itself" in done.stderr
    assert Run(tmp_path / "run").summary()["audited_updates"] == audited(1, 0.5, 10) > 0


def test_what_audits_cannot_do_is_told_before_a_run_is_made(tmp_path):
    done = podium_here("train", *MNIST, "engine.reduction=fast", "engine.audit=0.1", "--out", tmp_path / "run")
    assert_user_error(done, "engine.reduction = fast does not leave by themselves: set it to 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["parallel.stages=2"], "parallel.stages does not leave by themselves"),
        (
            ["parallel.shard=parameters", "engine.reduction=fast", "engine.layout=default"],
            "parallel.shard = parameters",
        ),
    ],
)
def test_what_audits_cannot_do_is_one_sentence(words, part):
    name, *overrides = [*MNIST, *words, "engine.audit=0.1"]
    with pytest.raises(UserError) as refused:
        check_audit(load_recipe(name, overrides), 1)
    assert str(refused.value).startswith("engine.audit = 0.1 computes the gradients of one replica again, which")
    assert part in str(refused.value)


def test_replicas_that_run_side_by_side_are_not_audited():
    name, *overrides = [*TINY["cnn"], "batch.replicas=2", "workload.model.norm.span=2", "engine.audit=0.1"]
    with pytest.raises(UserError, match=r"norm\.span = 2 does not leave by themselves"):
        build_training(load_recipe(name, overrides))
