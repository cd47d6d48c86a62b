"""What launchers of other hosts say is taken only as far as it is what Podium says."""

import json

import pytest
import torch.distributed as dist

from podium.errors import UserError
from podium.launch.between_hosts import OtherHosts, Up, arrive, get_down, put_up
from podium.launch.board import Board
from podium.launch.processes import LocalInstances
from podium.launch.relay import Relay

FAILURE = {"instance": 2, "host": "b", "exit_code": 1, "message": "no"}


@pytest.mark.parametrize("text", ["", "[]", "3", '{"host": "b"}', '{"host": "b", "attempt": 0, "more": 1}'])
def test_what_another_version_says_counts_for_nothing(text):
    store = dist.HashStore()
    others = OtherHosts(store, 0)
    store.set(f"crew/up-{arrive(store)}", text)
    others.look()
    assert others.ups == {}
    store.set("crew/down", text)
    with pytest.raises(UserError, match="another version of Podium"):
        get_down(store)


def test_notes_on_failures_that_are_none_are_left_out():
    store = dist.HashStore()
    others = OtherHosts(store, 0)
    bad = [{}, {**FAILURE, "exit_code": None}, {**FAILURE, "instance": "x"}, {**FAILURE, "more": 1}]
    put_up(store, arrive(store), Up("b", 0, failures=[*bad, FAILURE]))
    others.look()
    assert [note.message for note in others.failures()] == ["no"]


def test_a_note_names_no_file_elsewhere(tmp_path):
    store = dist.HashStore()
    relay = Relay(Board(tmp_path, 0), 0, "b", LocalInstances(), store, lambda seat, place: None, {})
    notes = {"../outside": {}, "crew-0/../../outside": {}, "view": {"number": 0}, "begin-1": {}}
    store.set("crew/down", json.dumps({"attempt": 0, "notes": notes}))
    relay.look(0, 3)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["begin-1", "view"]
