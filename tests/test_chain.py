"""The chain of digests: what a link depends on, and what it does not."""

import json

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from podium.chain import LOSS_MARKS, MARK_DIGITS, Chain, are_told, first_other_mark, linked, loss_marks
from podium.distributed.digest import joined_digest, tensor_digests, tensor_xxh3
from podium.engine.saved_state import check_saved
from podium.engine.state import Progress
from podium.errors import UserError
from podium.runs.facts import parse_record
from podium.runs.folder import Run
from podium.runs.metrics import JsonLines


def record(update: int, **fields: object) -> dict:
    return {"update": update, "epoch": update / 10, "samples": 8 * update, "train/loss": 0.5, **fields}


def test_a_digest_is_that_of_the_values_in_whatever_layout_they_lie():
    values = torch.randn(4, 3, 5, 5)
    assert tensor_xxh3(values.to(memory_format=torch.channels_last)) == tensor_xxh3(values)
    assert tensor_xxh3(torch.randn(6, 8)[::2, 1::3]) != tensor_xxh3(values)
    assert tensor_xxh3(values.half()) != tensor_xxh3(values)
    assert tensor_xxh3(values.view(4, 3, 25)) != tensor_xxh3(values)
    for shape in ((), (0,), (1,)):
        for dtype in (torch.bool, torch.bfloat16, torch.int64):
            assert len(tensor_xxh3(torch.zeros(shape, dtype=dtype))) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_sees_a_single_bit(dtype):
    values = torch.zeros(1000, dtype=dtype)
    before = tensor_xxh3(values)
    values.view(torch.uint8)[-1] ^= 1
    assert tensor_xxh3(values) != before


def test_the_digest_of_a_model_does_not_depend_on_who_holds_its_tensors():
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict()
    whole = joined_digest(tensor_digests(state.items()))
    first = tensor_digests((name, state[name]) for name in state if name.startswith("2"))
    second = tensor_digests((name, state[name]) for name in state if not name.startswith("2"))
    assert joined_digest({**first, **second}) == joined_digest({**second, **first}) == whole
    state["other"] = state.pop("0.bias")
    assert joined_digest(tensor_digests(state.items())) != whole


def test_a_tensor_with_two_names_has_both_and_views_of_one_memory_are_told_apart():
    table = torch.arange(12.0).view(3, 4)
    digests = tensor_digests([("a", table), ("b", table), ("c", table.t()), ("d", table[:1])])
    assert digests["a"] == digests["b"]
    assert len({*digests.values()}) == 3


def test_a_link_depends_on_all_before_it_and_a_record_made_again_follows_the_same_one():
    chain = Chain().extended(5, "aa").extended(10, "bb")
    assert chain.link == linked(linked("", 5, "aa"), 10, "bb")
    assert chain.extended(10, "bb") == chain
    assert Chain().extended(5, "ab").extended(10, "bb").link != chain.link
    assert Chain().extended(6, "aa").extended(10, "bb").link != chain.link


def test_checkpoints_keep_the_chain_and_earlier_ones_have_none():
    progress = Progress(update=5, chain=Chain().extended(5, "0" * 16))
    saved = json.loads(json.dumps(progress.state()))
    check_saved({"progress": saved, "schedule": {}})
    assert Progress.from_state(saved).chain == progress.chain
    del saved["chain"]
    check_saved({"progress": saved, "schedule": {}})
    assert Progress.from_state(saved).chain == Chain()


@pytest.mark.parametrize("chain", [{"link": "x"}, {"link": 3}, {"update": -1}, {"other": ""}, []])
def test_a_chain_that_is_none_is_a_damaged_checkpoint(chain):
    saved = json.loads(json.dumps(Progress().state())) | {"chain": chain}
    with pytest.raises(UserError, match="the state of the checkpoint is damaged"):
        check_saved({"progress": saved, "schedule": {}})


def test_readers_of_numbers_see_no_digests_and_a_resume_keeps_them(tmp_path):
    digests = {"weights/xxh3": "0123456789abcdef", "weights/chain": "f" * 16}
    lines = JsonLines(Run(tmp_path), after=0)
    for update in (5, 10):
        lines.write(record(update, **digests))
    lines.close()
    JsonLines(Run(tmp_path), after=5).close()
    assert Run(tmp_path).records() == [record(5)]
    assert Run(tmp_path).records(digests=True) == [record(5, **digests)]


@pytest.mark.parametrize("value", ["", "0123", 5, None, "g" * 16, ["0" * 16]])
def test_a_record_whose_digest_is_none_is_damaged(value):
    assert parse_record(json.dumps(record(5)).encode()) is not None
    assert parse_record(json.dumps(record(5, **{"weights/chain": value})).encode()) is None


@given(data=st.data(), per_update=st.integers(1, 6), num=st.integers(1, 12))
def test_marks_name_the_first_update_with_other_losses_in_whatever_order_they_are(data, per_update, num):
    losses = data.draw(st.lists(st.floats(0, 100, width=32), min_size=per_update * num, max_size=per_update * num))
    ours = [(loss, 1) for loss in losses]
    other, record = list(ours), {"update": 40}
    updates = [other[start : start + per_update] for start in range(0, len(other), per_update)]
    mixed = [part for update in updates for part in data.draw(st.permutations(update))]
    assert loss_marks(mixed, per_update) == loss_marks(ours, per_update)
    place = data.draw(st.integers(0, len(losses) - 1))
    other[place] = (losses[place] + 1, 1)
    told, theirs = ({**record, LOSS_MARKS: loss_marks(each, per_update)} for each in (ours, other))
    assert len(told[LOSS_MARKS]) == MARK_DIGITS * num
    assume(told != theirs)  # one of 65,536 marks is the same by chance
    assert are_told(LOSS_MARKS, told, theirs)
    assert first_other_mark(LOSS_MARKS, told, told) is None
    assert first_other_mark(LOSS_MARKS, told, theirs) == 40 - num + 1 + place // per_update


def test_losses_that_are_not_those_of_whole_updates_have_no_marks():
    assert loss_marks([(1.0, 1)] * 5, 2) == ""
    assert not are_told(LOSS_MARKS, {"update": 3, LOSS_MARKS: ""}, {"update": 3, LOSS_MARKS: ""})
    assert first_other_mark(LOSS_MARKS, {"update": 3, LOSS_MARKS: "0000"}, {"update": 3}) is None
