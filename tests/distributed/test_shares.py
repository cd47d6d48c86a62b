"""Shares of the optimiser's state: balanced, disjoint, together the whole."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from podium.checkpoints.tensor_file import read_checked, tensors_in, write_tensors
from podium.contract import by_dimension
from podium.distributed.instances import Instances
from podium.distributed.sharding import optimiser_state
from podium.distributed.sharding.fully_sharded import check_fully_sharded
from podium.distributed.sharding.gather_tensors import GatheredTensors, aligned_order
from podium.distributed.sharding.optimiser_state import Shares, copies_of, owners
from podium.errors import UserError
from podium.optim.optimisers import Optimiser, build_optimiser
from podium.optim.state_tensors import state_tensors
from podium.recipe.sections.optim import OptimSection
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY


@given(sizes=st.lists(st.integers(0, 10**6), max_size=60), log2_count=st.integers(0, 4))
def test_shares_are_balanced_to_one_tensor(sizes, log2_count):
    count = 2**log2_count
    owner = owners(sizes, count)
    totals = [sum(size for size, index in zip(sizes, owner, strict=True) if index == place) for place in range(count)]
    assert sum(totals) == sum(sizes)
    assert max(totals) <= sum(sizes) / count + max(sizes, default=0)


def state_bytes(optimiser: Optimiser) -> int:
    return sum(tensor.nbytes for slots in optimiser.state.values() for tensor in slots.values())


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop", "lars", "lamb"])
@pytest.mark.parametrize("count", [2, 4])
def test_every_instance_has_the_bytes_of_its_share_alone(name, count):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    section = OptimSection(name=name, lr=0.1)
    whole = build_optimiser(section, model, by_dimension(model))
    named = dict(model.named_parameters())
    parts = [
        build_optimiser(section, model, by_dimension(model), Shares(named, Instances(index, count, None)).held)
        for index in range(count)
    ]
    assert [state_bytes(part) for part in parts] == [state_bytes(whole) // count] * count
    names = [key for part in parts for key in state_tensors(part) if key != "step"]
    assert sorted(names) == sorted(key for key in state_tensors(whole) if key != "step")


def test_a_file_may_be_written_as_its_tensors_come(tmp_path):
    tensors = {"b": torch.randn(3, 4).t(), "a": torch.arange(5, dtype=torch.uint8), "c": torch.randn(())}
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    at_once = write_tensors(tmp_path / "at-once", tensors)
    assert write_tensors(tmp_path / "fetched", like, ((name, tensors[name]) for name in aligned_order(like))) == at_once
    read = tensors_in(read_checked(tmp_path / "fetched")[0])
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_parts_of_one_instance_are_the_whole():
    own = {"x": torch.zeros(2, 2), "y": torch.ones(3, dtype=torch.bfloat16)}
    parts = GatheredTensors(Instances.alone(), own)
    assert {name: (t.shape, t.dtype) for name, t in parts.like.items()} == {
        n: (t.shape, t.dtype) for n, t in own.items()
    }
    parts.scatter({"x": torch.full((2, 2), 7.0), "y": torch.zeros(3)})
    assert {name: tensor.tolist() for name, tensor in parts.gathered()} == {"x": [[7.0, 7.0]] * 2, "y": [0.0] * 3}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"reduction": "exact"}, "engine.reduction=fast"),
        ({"optimiser": "lamb"}, "optim.name=lamb.*whole tensors"),
        ({"compile": True}, "engine.compile=true"),
        ({"loss_scale": "auto"}, "precision.loss_scale=auto"),
    ],
)
def test_what_cannot_be_spread_is_one_sentence(changed, sentence):
    usual = {"reduction": "fast", "optimiser": "adamw", "compile": False, "loss_scale": 1.0}
    model = nn.Linear(2, 2)
    check_fully_sharded(model, *usual.values())
    with pytest.raises(UserError, match=sentence):
        check_fully_sharded(model, *(usual | changed).values())


# --- spare copies -----------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 16), data=st.data())
def test_copies_are_held_by_others(count, data):
    owner = data.draw(st.integers(0, count - 1))
    every = [copies_of(owner, num_spares, count) for num_spares in range(count + 2)]
    assert every[0] == [owner]
    assert [len(set(holders)) for holders in every] == [*range(1, count + 1), count, count]
    assert all(holders[:-1] == before for before, holders in pairwise(every[:count]))


@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5), room=st.integers(1, 40), data=st.data())
def test_shares_are_cut_into_pieces_that_hold_every_byte_once(shapes, room, data):
    tensors = [torch.randn(shape).permute(data.draw(st.permutations(range(len(shape))))) for shape in shapes]
    with mock.patch.object(optimiser_state, "EXCHANGE_BYTES", room):
        pieces = optimiser_state._pieces([optimiser_state._bytes(tensor) for tensor in tensors])
    assert all(0 < sum(map(len, parts)) <= room for parts in pieces)
    assert all(sum(map(len, parts)) == room for parts in pieces[:-1])
    for parts in pieces:
        for part in parts:
            part.zero_()  # views, of the tensors themselves
    assert not any(tensor.any() for tensor in tensors)
    assert sum(len(part) for parts in pieces for part in parts) == sum(4 * tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.stages=2"],
        ["parallel.shard=parameters", "engine.reduction=fast"],
        ["engine.reduction=fast", "parallel.shard=optimiser"],
    ],
)
def test_copies_that_nobody_could_use_are_refused(words, tmp_path):
    done = podium_here("train", *TINY["mnist"], *words, "launch.spare_copies=1", "--out", tmp_path / "run")
    named = words[0].replace("=", " = ") if "stages" not in words[0] else "parallel.stages"
    assert_user_error(done, "launch.spare_copies = 1 cannot be combined with", named)
    assert not (tmp_path / "run").exists()
