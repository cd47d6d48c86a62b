"""One instance's side of a launch: take its place among the others, and say what went wrong when it ends badly.

Called by `commands/train.py` when the environment says that this process is one of several.
"""

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.addresses import resolved_address, use_interface
from podium.launch.environment import Place, num_host_cores, own_cores
from podium.launch.failures import FINAL, PEER_LOST, SILENT, Failure, find_cause, write_failure
from podium.launch.heartbeat import Heartbeat
from podium.launch.lifeline import end_with_launcher
from podium.launch.member import CrewMember
from podium.launch.point import MeetingPoint, early_log_folder
from podium.launch.sockets import give_up_after
from podium.recipe.sections.parallel import ParallelSection
from podium.topology import Topology, build_topology, share_of_cores, usable_cores
from podium.ui import console

#: What must be the same on all instances, and its name in messages.
_MUST_AGREE = {
    "podium": "versions of Podium",
    "torch": "versions of torch",
    "recipe_sha256": "recipes",
    "instruction_set": "instruction sets",
    "numerics_variables": "variables of the environment that change results",
    "kernels": "the kernels that engine.kernels leaves out",
    "device": "devices",
}
#: those whose values are told up to 60 characters; a checksum is told shorter
_IN_WORDS = ("numerics_variables", "kernels", "device")


@dataclass(frozen=True)
class InstanceTask:
    """What an instance has to do, and what it must know to meet the others."""

    #: what all instances must have alike
    facts: Mapping[str, Any]
    num_replicas: int
    parallel: ParallelSection
    timeout_s: float
    run: Callable[[Topology, Instances], None]
    #: where this instance computes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def take_place(place: Place, load_task: Callable[[], InstanceTask], secret: bytes | None = None) -> int:
    """Load a task and run it as one of the instances; return the exit code of this process.

    `secret`: what to show where instances meet, if it was given. Whatever goes wrong, in loading too, is reported once
    for all instances.
    """
    host = place.host or socket.gethostname()
    consoles = os.dup(1), os.dup(2)
    log = early_log = _quiet(place) if place.index else ""
    end_with_launcher(os.environ)
    code, message, shared, store, point, heartbeat = 0, "", False, None, None, None
    cores = place.host_cores or usable_cores()
    try:
        task = load_task()
        own = {**task.facts, "host": host, "local_count": place.local_count, "pid": os.getpid(), "cores": cores}
        place = replace(place, address=resolved_address(place))
        use_interface(place.address)
        point = MeetingPoint(place, secret)
        store = point.open(task.timeout_s)
        others = _come(store, place, own, task.timeout_s) if place.joins else _greet(store, place, own, task.timeout_s)
        all_cores = [other["cores"] for other in others]
        if place.joins:  # until it takes its share among those that are there
            own_share, num_cores = share_of_cores(cores, place.local_index, place.local_count), len(cores)
        else:
            own_share, num_cores = own_cores(place, all_cores), num_host_cores(place, all_cores)
        os.sched_setaffinity(0, own_share)
        parallel, sizes = task.parallel, _host_sizes(others)
        hosts = tuple(sizes)
        topology = build_topology(
            task.num_replicas, place.count, hosts, parallel.num_stages, parallel.stage_layers, tuple(sizes.values())
        )
        topology = replace(topology, host_cores=num_cores)
        # From here on there may be something to save, and threads that hear of the end of the launcher.
        end_with_launcher(os.environ, signal.SIGTERM)
        heartbeat = Heartbeat(place, point, others)
        if place.joins:
            instances = Instances.alone()
        else:
            instances = Instances.join(
                dist.PrefixStore("instances", store),
                place.index,
                place.count,
                task.timeout_s,
                topology.host_sizes,
                task.device,
            )
        if place.launch_folder is not None:
            instances.membership = CrewMember(place, store, heartbeat, topology, task.timeout_s, consoles, host)
        give_up_after(task.timeout_s)
        task.run(topology, instances)
        instances.close()
    except PodiumError as error:
        code, message = error.exit_code, str(error)
        shared = isinstance(error, Interrupted | _Disagreement)
    except BaseException as error:
        console.keep_traceback()
        code, message = _explained(error, heartbeat)
        log = str(console.log_path() or log)
    if heartbeat is not None:
        heartbeat.close(in_order=code == 0)
    failure = Failure(place.index, host, code, message, "" if code in FINAL else log, shared=shared)
    if place.launch_folder is None:
        if early_log and not failure.log:
            Path(early_log).unlink(missing_ok=True)
        code = _report_to_user(place, failure, store, consoles[1])
        if point is not None:
            point.close()
        return code
    return _report_to_launcher(place.launch_folder, failure)


def _report_to_launcher(launch_folder: str, failure: Failure) -> int:
    """Tell Podium's launcher how this instance ended; return the exit code."""
    if failure.exit_code == 0:
        return 0
    write_failure(Path(launch_folder), failure)
    # Final ends look like success to the launcher: the others end by themselves, in order.
    return 0 if failure.final else failure.exit_code


def _report_to_user(place: Place, failure: Failure, store: dist.Store | None, console_fd: int) -> int:
    """Tell the user, as the launcher is not Podium's: instance 0 speaks for all, others where they cannot reach it.

    Launchers such as srun pass on the largest exit code: that of an instance which lost another must not be it.
    """
    if failure.exit_code == 0:
        return 0
    speaks = place.index == 0 or store is None
    if store is not None:
        try:
            if failure.exit_code != PEER_LOST:
                store.set(f"failure/{place.index}", json.dumps(asdict(failure)))
            elif place.index == 0:
                failure = find_cause(_failures(store, place.count), {}, "") or failure
        except (RuntimeError, dist.DistError):  # instance 0 has ended, and spoken, or is cut off
            speaks = failure.exit_code not in (*FINAL, PEER_LOST)
    if speaks:
        # What instance 0 reports of itself holds for all instances.
        plain = failure.final and failure.instance == place.index == 0
        os.write(console_fd, f"podium: {failure.message if plain else failure.sentence()}\n".encode())
    if failure.exit_code == PEER_LOST:
        return 1
    return failure.exit_code if failure.final else TrainingFailed.exit_code


def _failures(store: dist.Store, count: int) -> list[Failure]:
    keys = [f"failure/{index}" for index in range(count)]
    return [Failure(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _quiet(place: Place) -> str:
    """Send the output of an instance other than 0 to a file, which joins the run's log once there is one."""
    path = early_log_folder(place) / f"podium-instance-{place.index}-{os.getpid()}.log"
    console.write_everything_to(path)
    return str(path)


def _explained(error: BaseException, heartbeat: Heartbeat | None) -> tuple[int, str]:
    text = str(error)
    if heartbeat is None or not isinstance(error, InstanceLost):
        return 1, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    silent = [] if error.instance is not None and heartbeat.is_dead(error.instance) else heartbeat.silent()
    if not silent:
        return PEER_LOST, "lost another instance"
    names = ", ".join(f"instance {index} on {host}" for index, host in silent)
    return SILENT, f"heard nothing from {names}"


# --- meeting --------------------------------------------------------------------------------------------------------


def _greet(store: dist.Store, place: Place, own: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Wait until every instance has introduced itself; raise the same UserError everywhere when they do not agree."""
    store.set(f"hello/{place.index}", json.dumps(own))
    keys = [f"hello/{index}" for index in range(place.count)]
    deadline = time.monotonic() + timeout_s
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except (RuntimeError, dist.DistError):
            missing = [str(index) for index, key in enumerate(keys) if not store.check([key])]
            raise UserError(f"instance {', '.join(missing)} did not start within {timeout_s:g} s") from None
    hellos = [json.loads(store.get(key)) for key in keys]
    store.set(f"read/{place.index}", "yes")
    try:
        check_hellos(hellos)
        check_order(hellos)
        check_devices(hellos)
    except UserError:
        if place.index == 0:  # the store may be its own, so it stays until all others have read
            with suppress(RuntimeError, dist.DistError):
                store.wait([f"read/{index}" for index in range(place.count)], timedelta(seconds=10))
        raise
    return hellos


def _come(store: dist.Store, place: Place, own: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Introduce an instance that comes to a run under way; return what those at its beginning have said."""
    hellos = [json.loads(store.get(f"hello/{index}")) for index in range(place.count)]
    check_hellos([*hellos, own])
    store.set(f"hello/{place.index}", json.dumps(own))
    return hellos


class _Disagreement(UserError):
    """A mistake that every instance finds, and reports in the same words."""


def check_hellos(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError when instances differ in what their bits depend on."""
    first = hellos[0]
    for index, hello in enumerate(hellos):
        for name, called in _MUST_AGREE.items():
            if hello[name] != first[name]:
                short = [str(value[name])[: 60 if name in _IN_WORDS else 16] for value in (first, hello)]
                raise _Disagreement(
                    f"{called} differ: {short[0]} on {first['host']} (instance 0), "
                    f"{short[1]} on {hello['host']} (instance {index})"
                )


def check_order(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless the instances of each host are consecutive, and as many as each of them was told."""
    hosts = [str(hello["host"]) for hello in hellos]
    ordered = [host for host, size in _host_sizes(hellos).items() for _ in range(size)]
    for index, hello in enumerate(hellos):
        if [hosts[index]] != ordered[index : index + 1] or hosts.count(hosts[index]) != hello["local_count"]:
            raise _Disagreement(
                f"instance {index} is out of place on {hosts[index]}: the instances of a host must be consecutive, and "
                "its launcher must have started all of them (with Slurm: --distribution=block)"
            )


def check_devices(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError where more instances than the recipe asks for have taken one device of their host."""
    taken: dict[tuple[str, str], list[int]] = {}
    for index, hello in enumerate(hellos):
        if hello["device_identity"]:
            taken.setdefault((str(hello["host"]), str(hello["device_identity"])), []).append(index)
    for (host, _), indices in taken.items():
        if len(indices) > (asked := hellos[0]["instances_per_device"]):
            num_devices = sum(on == host for on, _ in taken)
            raise _Disagreement(
                f"instances {', '.join(map(str, indices))} would share a device of {host}, whose "
                f"{hellos[indices[0]]['local_count']} instances find {num_devices} "
                f"{'device' if num_devices == 1 else 'devices'}: start fewer, or ask for it with "
                f"launch.instances_per_device={max(asked + 1, len(indices))}"
            )


def _host_sizes(hellos: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the hosts in order, and how many instances each has."""
    return Counter(str(hello["host"]) for hello in hellos)
