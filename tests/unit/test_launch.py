"""The pure parts of a launch: what to start where, what to call the cause, who fits together."""

import pytest

from podium.errors import UserError
from podium.launch.failures import PEER_LOST, SILENT, Failure, cause
from podium.launch.instance import check_hellos
from podium.launch.local import check_clocks
from podium.launch.plan import plan_launch, ssh_commands
from podium.recipe import load_recipe
from podium.topology import build_topology

COMMAND = ("python", "-m", "podium", "train", "mnist", "--out", "x y")


def test_one_host_meets_on_loopback_at_a_free_port():
    plan = plan_launch(build_topology(4, 2), frozenset({"here"}), 29400, COMMAND)
    assert plan.meeting == ("127.0.0.1", 0)
    assert plan.keeps_store


def test_hosts_meet_at_the_first_one():
    plan = plan_launch(build_topology(4, 4, ("a", "b")), frozenset({"b", "10.0.0.2"}), 29400, COMMAND)
    assert (plan.host, plan.host_index, plan.meeting, plan.keeps_store) == ("b", 1, ("a", 29400), False)


@pytest.mark.parametrize(("names", "part"), [({"c"}, "is not one of"), ({"a", "b"}, "is more than one of")])
def test_a_host_that_is_not_exactly_one_of_the_named_is_an_error(names, part):
    with pytest.raises(UserError, match=part):
        plan_launch(build_topology(4, 4, ("a", "b")), frozenset(names), 29400, COMMAND)


def test_other_hosts_are_started_by_ssh_in_the_same_folder_with_the_same_command():
    plan = plan_launch(build_topology(4, 4, ("a", "b")), frozenset({"a"}), 29400, COMMAND)
    ((host, command),) = ssh_commands(plan, "ssh -i 'my key'", "/data/my runs", COMMAND).items()
    assert host == "b"
    assert command[:3] + command[-2:-1] == ["ssh", "-i", "my key", "b"]
    joined = "PODIUM_END_WITH_INPUT=yes python -m podium train mnist --out 'x y' --join"
    assert command[-1] == f"cd '/data/my runs' && exec env {joined}"


def test_only_the_first_host_starts_others():
    plan = plan_launch(build_topology(4, 4, ("a", "b")), frozenset({"b"}), 29400, COMMAND)
    with pytest.raises(UserError, match="a starts the other hosts"):
        ssh_commands(plan, "ssh", "/data", COMMAND)


@pytest.mark.parametrize("text", ["''", "' '", "ssh -i 'key"])
def test_launch_ssh_is_a_command(text):
    with pytest.raises(UserError, match=r"launch\.ssh.*expected a command with its options"):
        load_recipe("mnist", [f"launch.ssh={text}"])


def failure(instance, code, when=0.0):
    return Failure(instance, "h", code, f"message {instance}", when=when)


@pytest.mark.parametrize(
    ("notes", "codes", "told"),
    [
        ([failure(0, PEER_LOST), failure(1, 2)], {0: 70}, 1),
        ([failure(0, PEER_LOST), failure(2, SILENT)], {1: -9, 0: 70, 2: 71}, 2),
        ([failure(0, PEER_LOST)], {0: 70, 1: -9}, 1),
        ([failure(0, PEER_LOST), failure(1, 1)], {0: 70, 1: 1}, 1),
        ([failure(0, PEER_LOST)], {0: 70, 1: -15}, 0),
    ],
)
def test_the_cause_is_told_and_not_what_followed_from_it(notes, codes, told):
    assert cause(notes, codes, "h").instance == told


def test_a_killed_instance_is_named_with_its_signal():
    assert cause([], {3: -9}, "node7").sentence() == "instance 3 on node7: was killed by SIGKILL"


HELLO = {"podium": "1", "torch": "2", "recipe_sha256": "abc", "instruction_set": "AVX2", "host": "a"}


@pytest.mark.parametrize(
    ("key", "part"),
    [("podium", "versions of Podium differ"), ("torch", "versions of torch differ"),
     ("recipe_sha256", "recipes differ"),
     ("instruction_set", "instruction sets differ")],
)  # fmt: skip
def test_instances_that_do_not_fit_together_are_told_where_they_differ(key, part):
    with pytest.raises(UserError) as caught:
        check_hellos([HELLO, HELLO, {**HELLO, key: "other", "host": "b"}])
    assert part in str(caught.value)
    assert "on b (instance 2)" in str(caught.value)


def test_clocks_apart_are_one_sentence():
    check_clocks({"a": 100.0, "b": 102.0})
    with pytest.raises(UserError, match="the clocks of b and a are 60 s apart"):
        check_clocks({"a": 100.0, "b": 160.0})
