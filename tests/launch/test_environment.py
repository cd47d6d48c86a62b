"""Where a process stands: a function of what its launcher has put into the environment."""

from pathlib import Path

import pytest

from podium.errors import UserError
from podium.launch.environment import find_host_index, find_place, first_slurm_host, place_environment
from podium.launch.meeting import Meeting

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "gpu004",
}


def test_place_from_torchs_launcher():
    place = find_place(TORCHRUN)
    assert (place.index, place.count, place.local_index, place.local_count) == (3, 4, 1, 2)
    assert (place.address, place.port, place.launcher_has_store, place.attempt) == ("10.0.0.1", 29500, True, 2)


def test_place_from_slurm():
    place = find_place(SLURM)
    assert (place.index, place.count, place.local_index, place.local_count) == (5, 8, 1, 4)
    assert (place.address, place.host, place.launcher_has_store) == ("gpu003", "gpu004", False)


@pytest.mark.parametrize(("first", "size"), [(0, 2), (2, 2), (4, 1)])
def test_slurm_nodes_may_have_different_numbers_of_tasks(first, size):
    uneven = {**SLURM, "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    for local_index in range(size):
        place = find_place({**uneven, "SLURM_PROCID": str(first + local_index), "SLURM_LOCALID": str(local_index)})
        assert (place.local_index, place.local_count) == (local_index, size)


def test_tasks_of_one_slurm_node_meet_in_a_folder_and_those_of_several_show_a_secret_for_their_step():
    several, one = find_place(SLURM), find_place({**SLURM, "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": "2"})
    assert (several.meets_at, several.folder) == ("service", "")
    assert (one.meets_at, one.folder, one.local_count) == ("folder", "launch-slurm-77-0-2", 8)
    purposes = {find_place({**SLURM, **changed}).purpose for changed in ({}, {"SLURM_STEP_ID": "1"},
                {"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"})}  # fmt: skip
    assert len(purposes) == 4


@pytest.mark.parametrize(
    "meeting", [Meeting(folder=Path("/a folder")), Meeting(address="10.0.0.1", port=29400, secret=b"of this run")]
)
def test_place_from_podiums_launcher(meeting):
    env = place_environment(meeting, 3, 4, 1, 2, attempt=2)
    assert env.pop("PODIUM_SECRET", "").encode() == meeting.secret
    assert "of this run" not in "".join(env.values())
    place = find_place(env)
    assert (place.index, place.count, place.local_index, place.local_count) == (3, 4, 1, 2)
    assert (place.address, place.port, place.launcher_has_store, place.attempt) == (
        meeting.address, meeting.port, True, 2)  # fmt: skip
    assert (place.meets_at, place.folder) == (("folder", "/a folder") if meeting.folder else ("service", ""))


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("env", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, BATCH])
def test_a_person_and_a_batch_script_have_no_place(env):
    assert find_place(env) is None


def test_an_incomplete_environment_is_one_sentence():
    with pytest.raises(UserError, match="environment is incomplete"):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("env", "index"),
    [({}, None), ({"JOB_COMPLETION_INDEX": "3"}, 3), ({"PODIUM_HOST_INDEX": "1", "JOB_COMPLETION_INDEX": "3"}, 1)],
)
def test_the_number_of_a_host_is_that_of_its_pod(env, index):
    assert find_host_index(env) == index


def test_a_number_of_a_host_that_is_none_is_one_sentence():
    with pytest.raises(UserError, match="PODIUM_HOST_INDEX is '-1': expected the number of this host"):
        find_host_index({"PODIUM_HOST_INDEX": "-1"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[003-007,9],login", "gpu003"), ("n[1,5]x", "n1x"), ("rack1-n[02]", "rack1-n02")],
)
def test_first_host_of_slurms_compressed_list(hosts, first):
    assert first_slurm_host(hosts) == first
