"""Which device an instance takes, by what its launcher says and what the host has; devices are mocked, or pretended."""

import pytest
import torch

from podium.errors import UserError
from podium.launch.environment import find_place
from podium.launch.join import check_devices, check_hellos
from podium.machine import device as devices
from podium.machine.device import device_identity, num_devices, resolve_device
from tests.support import pretend
from tests.support.processes import podium_afresh
from tests.support.recipes import TINY


@pytest.fixture
def host(monkeypatch):
    """A host with as many devices as the test says, of which none is opened."""

    def with_devices(count, kind="cuda"):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        there = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
        monkeypatch.setattr(devices, "_properties", lambda device: None)

    return with_devices


def of_torchrun(host, local, size, num_hosts):
    return {
        "RANK": str(host * size + local), "WORLD_SIZE": str(num_hosts * size), "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "a", "MASTER_PORT": "1",
    }  # fmt: skip


def of_slurm(host, local, size, num_hosts):
    return {
        "SLURM_PROCID": str(host * size + local), "SLURM_NTASKS": str(num_hosts * size), "SLURM_LOCALID": str(local),
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": str(num_hosts),
        "SLURM_STEP_NODELIST": f"n[1-{num_hosts}]", "SLURM_STEP_TASKS_PER_NODE": f"{size}(x{num_hosts})",
    }  # fmt: skip


def of_kubernetes(host, local, size, num_hosts):
    """A pod's launcher is Podium's own, which sets what torch's does; the Job's index tells it which host it is."""
    return {**of_torchrun(host, local, size, num_hosts), "JOB_COMPLETION_INDEX": str(host)}


@pytest.mark.parametrize("launcher", [of_torchrun, of_slurm, of_kubernetes])
@pytest.mark.parametrize(("num_hosts", "size"), [(1, 4), (2, 1), (2, 3), (2, 4), (3, 7), (3, 8)])  # odd: slices (MIG)
def test_an_instance_takes_the_device_of_its_place_on_the_host(launcher, num_hosts, size, host):
    host(size)
    for number in range(num_hosts):
        places = [find_place(launcher(number, local, size, num_hosts)) for local in range(size)]
        assert [place.index for place in places] == list(range(number * size, (number + 1) * size))
        taken = [resolve_device("auto", place.local_index) for place in places]
        assert taken == [torch.device("cuda", index) for index in range(size)]


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_neighbouring_instances_share_where_the_recipe_asks_for_it(kind, host):
    host(2)
    assert [resolve_device(kind, place, 2).index for place in range(4)] == [0, 0, 1, 1]


def test_a_device_that_is_named_is_the_one_that_is_taken(host):
    host(3)
    assert resolve_device("cuda:2", 0) == torch.device("cuda:2")
    assert num_devices("cuda:2") == 1
    assert num_devices("cuda") == num_devices("auto") == 3
    assert num_devices("cpu") == 0
    with pytest.raises(UserError, match="this machine has 3 of cuda, counted from 0"):
        resolve_device("cuda:3")
    host(0)
    assert resolve_device("auto") == torch.device("cpu")
    assert num_devices("auto") == 0


def test_devices_that_a_launcher_shows_one_by_one_are_told_apart(host):
    host(1)
    seen = [device_identity(resolve_device("auto", local), {"CUDA_VISIBLE_DEVICES": str(local)}) for local in range(4)]
    assert seen == ["0", "1", "2", "3"]
    check_devices([hello(identity) for identity in seen])
    host(2)
    assert device_identity(torch.device("cuda:1"), {"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b"}) == "MIG-b"
    assert device_identity(torch.device("cuda:1"), {}) == "1"


def hello(identity, host="a", per_device=1, local_count=4):
    return {
        "host": host, "local_count": local_count, "device_identity": identity, "instances_per_device": per_device,
    }  # fmt: skip


def test_a_device_that_two_instances_have_taken_is_told_by_all():
    check_devices([hello(identity, host) for host in "ab" for identity in "0123"])
    check_devices([hello(identity, per_device=2) for identity in "0011"])
    check_devices([hello("", local_count=2)] * 2)  # processors
    with pytest.raises(UserError) as told:
        check_devices([hello(identity) for identity in "0120"])
    assert str(told.value) == (
        "instances 0, 3 would share a device of a, whose 4 instances find 3 devices: start fewer, or ask for it with "
        "launch.instances_per_device=2"
    )


def test_instances_with_devices_of_two_kinds_do_not_begin():
    alike = dict.fromkeys(("podium", "torch", "recipe_sha256", "instruction_set", "numerics_variables", "kernels"), "1")
    hellos = [{**alike, "host": host, "device": name} for host, name in (("a", "cuda A100"), ("b", "cuda V100"))]
    with pytest.raises(UserError, match=r"devices differ: cuda A100 on a \(instance 0\), cuda V100 on b"):
        check_hellos(hellos)


@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
@pytest.mark.slow
def test_the_number_of_devices_is_that_of_auto_and_is_shown(tmp_path):
    env = pretend.environment(3)
    recipe = [*TINY["mnist"], "batch.replicas=8", "batch.micro=4"]
    shown = podium_afresh(tmp_path, "topology", *recipe, "--instances", "auto", env=env).stdout
    assert "3 instances" in shown
    assert [f"pretend:{index}" in shown for index in range(4)] == [True, True, True, False]
    two = podium_afresh(tmp_path, "topology", *recipe, "launch.instances_per_device=2", "--instances", "auto", env=env)
    assert "6 instances" in two.stdout
    assert "3 × pretend Pretend 1" in podium_afresh(tmp_path, "doctor", env=env).stdout
    ended = podium_afresh(tmp_path, "train", *recipe, "--instances", "4", "--out", "run", env=env)
    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        "podium: 4 instances on this host, which has 3 devices for them: start fewer, or let them share with "
        "launch.instances_per_device=2"
    )
    assert not (tmp_path / "run").exists()
