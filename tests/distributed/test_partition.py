"""Blocks on devices, and the order in which devices take micro-batches: the plans of a pipeline."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from podium.distributed.pipeline.partition import layers_of, split_blocks
from podium.distributed.pipeline.schedule import Action, actions, max_in_flight
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.topology import build_topology
from podium.training.build import build_training
from tests.support.recipes import TINY

BERT = ["Embedding", *(f"Encoder {number}" for number in range(12)), "Pooler", "Classifier"]
LAYERS = range(1, 13)
SCHEDULES = ["interleaved", "grouped", "sequential"]


def test_the_published_split_has_embedding_and_heads_on_device_0():
    split = split_blocks(BERT, LAYERS, (0, 4, 4, 4))
    assert split.num_devices == 4
    assert [list(part) for part in split.parts] == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    lines = split.lines()
    assert lines[:3] == ["Embedding → device 0", "Encoder 0 → device 1", "Encoder 1 → device 1"]
    assert lines[5:6] + lines[-2:] == ["Encoder 4 → device 2", "Pooler → device 0", "Classifier → device 0"]
    assert split.blocks_of(0) == [0, 13, 14]
    assert split.parts_of(0) == [0, 4]
    assert split.parts_of(2) == [2]


def test_a_number_of_stages_is_balanced_with_the_ends_on_device_0():
    even = split_blocks(BERT, LAYERS, 2, [0.0] + [1.0] * 12 + [0.0, 0.0])
    assert [len(part) for part in even.parts] == [7, 6, 2]
    # A head that costs as much as three layers: device 0 has that and two, the others five each.
    heavy = split_blocks(BERT, LAYERS, 3, [0.0] + [1.0] * 12 + [0.0, 3.0])
    assert [len(heavy.blocks_of(device)) - 3 * (device == 0) for device in range(3)] == [2, 5, 5]
    heavier = split_blocks(BERT, LAYERS, 4, [0.0] + [1.0] * 12 + [0.0, 30.0])
    assert [len(part) for part in heavier.parts] == [1, 4, 4, 4, 2]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(2, 4))
def test_no_other_split_has_a_cheaper_costliest_device(costs, num_devices):
    names = [str(number) for number in range(len(costs))]
    layers = range(1, len(costs) - 1)
    if len(layers) < num_devices - 1:
        return
    split = split_blocks(names, layers, num_devices, costs)
    assert sorted(block for device in range(num_devices) for block in split.blocks_of(device)) == list(
        range(len(costs))
    )

    def costliest(counts):
        other = split_blocks(names, layers, counts)
        return max(sum(costs[block] for block in other.blocks_of(device)) for device in range(num_devices))

    chosen = [sum(costs[block] for block in split.blocks_of(device)) for device in range(num_devices)]
    every = [
        counts
        for counts in itertools.product(range(len(layers) + 1), repeat=num_devices)
        if sum(counts) == len(layers) and all(counts[1:])
    ]
    assert max(chosen) == min(map(costliest, every))


def test_layers_are_the_blocks_of_one_kind():
    assert layers_of([nn.Embedding(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh(), nn.ReLU()]) == range(1, 3)
    assert layers_of([nn.Linear(2, 2)] * 3) == range(3)
    # A last one that derives from the others is one of them.
    last = NonDynamicallyQuantizableLinear(2, 2)
    assert layers_of([nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2), last]) == range(1, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 16])
def test_every_order_can_be_carried_out_and_adds_up_in_one_order(schedule, num_devices, num_micro_batches):
    orders = actions(schedule, num_devices, num_micro_batches)
    done: set[Action] = set()
    places = [0] * num_devices
    in_flight = most_in_flight = 0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for device, order in enumerate(orders):
            if places[device] == len(order):
                continue
            action = order[places[device]]
            kind, part, index = action
            needed = [Action("forward", part - 1, index)] if kind == "forward" and part else []
            if kind == "backward":
                needed = [Action("forward", part, index)]
                needed += [Action("backward", part + 1, index)] if part < num_devices else []
            if all(other in done for other in needed):
                assert part % num_devices == device
                done.add(action)
                in_flight += {"forward": 1, "backward": -1}[kind] if part == 0 else 0
                most_in_flight = max(most_in_flight, in_flight)
                places[device] += 1
                moved = True
        assert moved, "nobody can go on"
    assert len(done) == 2 * (num_devices + 1) * num_micro_batches
    assert most_in_flight <= max_in_flight(schedule, num_devices, num_micro_batches)
    for order in orders:
        for kind in ("forward", "backward"):
            for part in range(num_devices + 1):
                taken = [action.micro_batch for action in order if (action.kind, action.part) == (kind, part)]
                assert taken == sorted(taken)


def test_schedules_keep_what_they_promise_of_memory():
    assert max_in_flight("sequential", 4, 32) == 1
    assert max_in_flight("interleaved", 4, 32) == 6
    assert max_in_flight("grouped", 4, 32) == 32
    (first, *_) = actions("grouped", 2, 4)
    kinds = [action.kind for action in first]
    assert kinds == ["forward"] * 8 + ["backward"] * 8


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (["parallel.stages=[1,2]"], ["[1, 2] has 3 layers, but the model has 4", "conv1 to output"]),
        (["parallel.stages=[0,4]"], ["leaves device 0 without a first block"]),
        (["parallel.stages=[2,2,0]"], ["leaves device 2 without a layer"]),
        (["parallel.stages=5"], ["parallel.stages = 5 is too many for a model of 4 layers: at most 4"]),
        (["parallel.stages=2", "engine.compile=true"], ["parallel.stages", "engine.compile=false"]),
        (["parallel.stages=2", "engine.reduction=fast"], ["parallel.stages", "engine.reduction=exact"]),
    ],
)
def test_stages_that_a_model_has_not_are_one_sentence(extra, parts):
    recipe = load_recipe(TINY["mnist"][0], [*TINY["mnist"][1:], *extra])
    topology = build_topology(1, recipe.parallel.num_stages, num_stages=recipe.parallel.num_stages)
    with pytest.raises(UserError) as caught:
        build_training(recipe, topology)
    for part in parts:
        assert part in str(caught.value)
