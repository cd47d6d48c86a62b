"""`podium train RECIPE --pretend`: what it says of a pod, what it tries, and what it refuses."""

import json
import math

import pytest
import torch

from podium.commands.placing import place_instances
from podium.data.sources import generated
from podium.errors import UserError
from podium.optim.schedules import build_schedule
from podium.pretend.model_bytes import anatomy
from podium.pretend.pod import build_pod, rates
from podium.pretend.small import NUM_UPDATES, small_recipe, with_stand_in
from podium.recipe.loading import load_recipe, recipe_from_tree
from podium.recipe.shipped import shipped_recipes
from podium.training.build import build_task, build_training
from podium.workloads.registry import workload_class
from tests.support.processes import podium_ended, podium_here
from tests.support.recipes import TINY

PODS = [name for name, _ in shipped_recipes() if "_pod" in name]
#: one of each kind: a pipeline, statistics shared between replicas; with few layers, which take less time
TRAINED = {
    "bert/pretrain_base_512_pod4": [
        *(
            "workload.model.size=custom",
            "workload.model.layers=3",
            "workload.model.hidden=32",
            "workload.model.heads=4",
        ),
        "parallel.stages=[1,2]",
    ],
    "cnn/mlperf_pod16_bs20": ["workload.model.size=18", "--hosts", "4"],
}
_NOTHING_OWN = {"optim": None, "schedule": None}


def pod_of(recipe, *, instances=None):
    most = recipe.batch.num_replicas * recipe.parallel.num_stages
    return build_pod(recipe, place_instances(recipe, str(instances or most), None), _NOTHING_OWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", PODS)
def test_every_shipped_pod_has_its_numbers_and_a_small_form_that_keeps_them(name, monkeypatch):
    monkeypatch.setattr(generated, "_MAX_POOL_BYTES", 1 << 16)  # values are not looked at
    recipe, replaced = with_stand_in(load_recipe(name))
    assert "is not here" in replaced
    pod = pod_of(recipe)
    small = small_recipe(recipe, pod.lengths, pod.lr)
    assert recipe_from_tree(small.tree()) == small
    assert small.batch.num_replicas == recipe.batch.num_replicas
    assert small.parallel == recipe.parallel
    assert small.precision.mode == recipe.precision.mode
    assert pod.anatomy is not None
    assert len(pod.anatomy.devices) == recipe.parallel.num_stages
    assert sum(device.work for device in pod.anatomy.devices) == pytest.approx(1)
    lengths = build_task(small).lengths
    assert lengths.total_updates == pod.lengths.total_updates
    schedule = build_schedule(
        small.schedule, small.optim.lr, lengths.total_updates, lengths.updates_per_epoch, lengths.global_batch
    )
    places = [*range(NUM_UPDATES), *(update for update, _ in rates(pod))]
    assert [schedule.lr(place) for place in places] == [pod.schedule.lr(place) for place in places]


@pytest.mark.parametrize("name", ["bert/pretrain_large_512_pod64", "cnn/resnet50_pod4"])
def test_the_small_form_is_small_and_cut_at_the_same_places(name, monkeypatch):
    monkeypatch.setattr(generated, "_MAX_POOL_BYTES", 1 << 16)
    recipe, _ = with_stand_in(load_recipe(name))
    pod = pod_of(recipe)
    small = small_recipe(recipe, pod.lengths, pod.lr)
    workload = workload_class(small.workload.name)(small.workload.model, small.workload.data)
    little = anatomy(small, workload, recipe.parallel.num_stages)
    assert little.num_params < pod.anatomy.num_params / 100
    assert little.split == pod.anatomy.split


@pytest.mark.parametrize("name", ["mnist", "neuron", "gpt2", "bert"])
def test_bytes_of_a_model_are_those_that_a_training_has(name):
    """Weights, gradients and state are counted on tensors without memory; here are the same with memory."""
    recipe = load_recipe(
        TINY[name][0],
        [*TINY[name][1:], "workload.data.source=generated", "engine.kernels=off", "engine.layout=default"],
    )
    training = build_training(recipe)
    found = anatomy(recipe, training.task.workload, 1).devices[0]
    model, optimiser = training.state.model, training.state.optimiser
    params = sum(param.numel() * param.element_size() for param in model.parameters())
    assert found.gradients == params
    assert found.weights == params + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert found.optimiser == sum(
        t.numel() * t.element_size() for slots in optimiser.state.values() for t in slots.values()
    )
    assert found.sums == params * math.ceil(math.log2(recipe.batch.num_replicas))
    batch = training.task.workload.example(recipe.batch.micro_batch)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), id):
        training.task.workload.loss(model, batch)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    most = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    assert most <= found.activations <= 1.25 * most  # what a block passes on to the next is counted for both


def test_halves_and_shards_take_what_they_say():
    few = ["workload.data.source=generated", "optim.name=adamw", "optim.momentum=null", "batch.replicas=4"]
    recipe = load_recipe("mnist", few)
    workload = workload_class("mnist")(recipe.workload.model, recipe.workload.data)
    whole = anatomy(recipe, workload, 4).devices[0]
    shared = anatomy(load_recipe("mnist", [*few, "parallel.shard=optimiser"]), workload, 4).devices[0]
    assert (shared.weights, shared.optimiser) == (whole.weights, whole.optimiser // 4)
    half = anatomy(load_recipe("mnist", [*few, "precision=16.16"]), workload, 4).devices[0]
    assert (half.weights, half.optimiser) == (whole.weights // 2, whole.optimiser // 2)
    assert whole.step == 0 < half.step


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if "bert" in name else pytest.mark.slow) for name in TRAINED]
)
def test_a_pod_is_tried_here(name, tmp_path):
    done = podium_ended(tmp_path, "train", name, "--pretend", "--out", tmp_path / "tried", *TRAINED[name])
    assert done.returncode == 0, done.stderr
    assert "the same weights" in done.stdout
    assert "nothing measured" in done.stdout
    records = (tmp_path / "tried/trial-1/metrics.jsonl").read_text().splitlines()
    assert sum("valid/loss" in json.loads(line) for line in records) == 1
    assert json.loads(records[-1])["update"] == NUM_UPDATES


def test_what_a_pod_refuses_is_refused_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, sentence in {
        ("cnn/mlperf_pod64_lars", "--instances", "3"): "norm.span = 2 cannot lie in 3 instances",
        ("bert/pretrain_large_128_pod64", "--instances", "63"): "63 is not a multiple of 4 stages",
        ("bert/pretrain_large_128_pod64", "parallel.stages=[3,7,7]"): "has 17 layers, but the model has 24",
        ("mnist", "--hosts", "0"): "--hosts 0: expected their names, or how many: 1 to 65,536",
        ("mnist", "engine.graph=true", "batch.replicas=2"): "2 instances: it is for one",
        ("mnist", "--until", "3up"): "leave --join, --continue and --until out",
        ("neuron", "schedule.warmup=900ep"): "schedule.warmup = 900ep: expected at most",
        ("mnist", "workload.init_from=nowhere"): "workload.init_from.path = nowhere does not exist",
    }.items():
        done = podium_here("train", *words, "--pretend")
        assert done.returncode == 2, words
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_samples_that_are_here_are_used(tmp_path):
    recipe = load_recipe("mnist", [f"workload.data.path={tmp_path}"])
    assert with_stand_in(recipe) == (recipe, "")
    with pytest.raises(UserError, match=str(tmp_path)):
        pod_of(recipe)


def test_rates_of_groups_stay_what_they_are():
    groups = 'optim.groups=[{"params": "*.bias", "lr": 0.5}]'
    recipe = load_recipe("mnist", ["workload.data.source=generated", groups])
    pod = pod_of(recipe)
    small = small_recipe(recipe, pod.lengths, pod.lr).optim
    assert small.lr_scale(small.groups[0]) == recipe.optim.lr_scale(recipe.optim.groups[0])
