"""The pure parts of a launch: what to start where, what to call the cause, who fits together."""

import os
import threading
from types import SimpleNamespace

import pytest

from podium.errors import UserError
from podium.launch.addresses import resolved_address
from podium.launch.assembly import check_clocks, open_service
from podium.launch.environment import Place, num_host_cores, own_cores
from podium.launch.failures import PEER_LOST, SILENT, Failure, find_cause
from podium.launch.heartbeat import Heartbeat
from podium.launch.join import check_hellos, check_order
from podium.launch.meeting import Meeting
from podium.launch.plan import plan_launch, ssh_commands
from podium.launch.point import MeetingPoint
from podium.launch.ssh import RemoteHost
from podium.recipe.loading import load_recipe
from podium.topology import build_topology
from tests.support.processes import until

COMMAND = ("python", "-m", "podium", "train", "mnist", "--out", "x y")


def test_one_host_meets_on_loopback_at_a_free_port():
    plan = plan_launch(build_topology(4, 2), frozenset({"here"}), 29400, COMMAND)
    assert plan.meeting == ("127.0.0.1", 0)
    assert plan.keeps_store


def test_hosts_meet_at_the_first_one():
    plan = plan_launch(build_topology(4, 4, ("a", "b")), frozenset({"b", "10.0.0.2"}), 29400, COMMAND)
    assert (plan.host, plan.host_index, plan.meeting, plan.keeps_store) == ("b", 1, ("a", 29400), False)


def test_a_host_that_was_given_its_number_needs_no_name():
    topology = build_topology(4, 4, ("a-0.a", "a-1.a"))
    plan = plan_launch(topology, frozenset({"somewhere"}), 29400, COMMAND, 1, started_again=True)
    assert (plan.host, plan.meeting, plan.started_again) == ("a-1.a", ("a-0.a", 29400), True)
    with pytest.raises(UserError, match="this is host 2, counted from 0, but --hosts names 2"):
        plan_launch(topology, frozenset(), 29400, COMMAND, 2)


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


def test_an_ssh_that_is_not_there_is_one_sentence():
    with pytest.raises(UserError, match=r"no-such-ssh, which would start b, cannot be run .*: set launch\.ssh"):
        RemoteHost("b", ["no-such-ssh", "b"], b"")


def test_a_host_that_ends_before_it_joins_is_told_with_its_last_words():
    other = RemoteHost("b", ["sh", "-c", "echo one; echo podium: two >&2; exit 7"], b"")
    with pytest.raises(UserError, match=r"b could not be started by ssh \(exit 7\): two"):
        until(other.check, "its end")  # raises before it is true
    other.end()


@pytest.mark.parametrize("text", ["", " ", "''", "' '", "ssh -i 'key"])
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
        ([failure(0, PEER_LOST)], {0: 70, 1: 2}, 1),  # it ended before it could leave a note
    ],
)
def test_the_cause_is_told_and_not_what_followed_from_it(notes, codes, told):
    assert find_cause(notes, codes, "h").instance == told


def test_a_killed_instance_is_named_with_its_signal():
    assert find_cause([], {3: -9}, "node7").sentence() == "instance 3 on node7: was killed by SIGKILL"


HELLO = {
    "podium": "1",
    "torch": "2",
    "recipe_sha256": "abc",
    "instruction_set": "AVX2",
    "numerics_variables": "none",
    "kernels": "none",
    "device": "cpu",
    "host": "a",
}


@pytest.mark.parametrize(
    ("key", "part"),
    [("podium", "versions of Podium differ"), ("torch", "versions of torch differ"),
     ("recipe_sha256", "recipes differ"),
     ("instruction_set", "instruction sets differ"),
     ("numerics_variables", "variables of the environment that change results differ"),
     ("kernels", "the kernels that engine.kernels leaves out differ: none on a (instance 0), other on b"),
     ("device", "devices differ")],
)  # fmt: skip
def test_instances_that_do_not_fit_together_are_told_where_they_differ(key, part):
    with pytest.raises(UserError) as caught:
        check_hellos([HELLO, HELLO, {**HELLO, key: "other", "host": "b"}])
    assert part in str(caught.value)
    assert "on b (instance 2)" in str(caught.value)


def test_a_first_host_without_an_address_is_one_sentence():
    with pytest.raises(UserError, match=r"nowhere\.invalid, where the hosts meet, cannot be resolved"):
        open_service(Meeting(address="nowhere.invalid", port=29400, secret=b"of this run"))


def test_clocks_apart_are_one_sentence():
    check_clocks({"a": 100.0, "b": 102.0})
    with pytest.raises(UserError, match="the clocks of b and a are 60 s apart"):
        check_clocks({"a": 100.0, "b": 160.0})


@pytest.mark.parametrize(
    ("hosts", "local_counts", "misplaced"),
    [
        ("aabb", (2, 2, 2, 2), None),
        ("abbb", (1, 3, 3, 3), None),
        ("abab", (2, 2, 2, 2), 1),
        ("aab", (1, 1, 1), 0),  # two launchers on one host
        ("aaab", (3, 3, 3, 2), 3),
    ],
)
def test_the_instances_of_a_host_come_one_after_the_other(hosts, local_counts, misplaced):
    hellos = [{"host": host, "local_count": count} for host, count in zip(hosts, local_counts, strict=True)]
    if misplaced is None:
        check_order(hellos)
    else:
        with pytest.raises(UserError, match=f"instance {misplaced} is out of place"):
            check_order(hellos)


def place(index, count=4, local_count=2, address="node1"):
    return Place(index, count, index % local_count, local_count, address, 20000, launcher_has_store=False)


@pytest.mark.parametrize(
    ("cores", "taken", "in_all"),
    [
        ([(0, 1, 2, 3)] * 4, [(0, 1), (2, 3), (0, 1), (2, 3)], [4] * 4),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)], [4] * 4),  # the launcher has bound them
        ([(0,)] * 4, [(0,)] * 4, [1] * 4),
    ],
)
def test_cores_are_shared_unless_the_launcher_has_shared_them_out(cores, taken, in_all):
    assert [own_cores(place(index), cores) for index in range(4)] == taken
    # engine.threads: auto goes by all cores of the host, the same in all of its instances
    assert [num_host_cores(place(index), cores) for index in range(4)] == in_all


def knows(monkeypatch, names, slurm=""):
    def look_up(name):
        if name not in names:
            raise OSError(f"{name} is not known")
        return names[name]

    monkeypatch.setattr("socket.gethostbyname", look_up)
    monkeypatch.setattr("subprocess.run", lambda command, **_: SimpleNamespace(stdout=slurm))


def test_where_instances_meet_is_looked_up_by_name_and_then_in_slurm(monkeypatch):
    knows(monkeypatch, {"node1": "10.0.0.5", "10.0.0.9": "10.0.0.9"}, slurm="   NodeAddr=10.0.0.9 NodeHostName=x\n")
    assert resolved_address(place(0)) == "10.0.0.5"
    assert resolved_address(place(0, address="node7")) == "10.0.0.9"


def test_a_host_that_takes_its_name_for_loopback_is_no_place_to_meet_others(monkeypatch):
    knows(monkeypatch, {"node1": "127.0.1.1", "127.0.0.1": "127.0.0.1"}, slurm="NodeAddr=node1")
    assert resolved_address(place(0, count=2)) == "127.0.1.1"
    assert resolved_address(place(0, address="127.0.0.1")) == "127.0.0.1"
    with pytest.raises(UserError, match=r"node1, where the instances meet, resolves to 127\.0\.1\.1"):
        resolved_address(place(0))
    knows(monkeypatch, {})
    with pytest.raises(UserError, match="cannot be resolved"):
        resolved_address(place(0, address="node7"))


def test_nothing_talks_to_the_store_once_the_heartbeat_is_closed():
    """A thread inside of it while the interpreter ends would abort the process after all is done."""
    place = Place(
        0, 1, 0, 1, "127.0.0.1", 0, launcher_has_store=False, meets_at="folder", folder=f"launch-test-{os.getpid()}"
    )
    point = MeetingPoint(place, None)
    point.open(30)
    heartbeat = Heartbeat(place, point, [{"host": "here", "pid": os.getpid()}])
    assert "podium-heartbeat" in {thread.name for thread in threading.enumerate()}
    heartbeat.close()
    assert "podium-heartbeat" not in {thread.name for thread in threading.enumerate()}
    point.close()
