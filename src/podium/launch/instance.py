"""One instance's side of a launch: take its place among the others, and say what went wrong when it ends badly.

Called by `cli.py` when the environment says that this process is one of several.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from podium import console
from podium.engine.instances import Instances
from podium.engine.lost import InstanceLost
from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.failures import FINAL, PEER_LOST, SILENT, Failure, cause, write_failure
from podium.launch.sockets import give_up_after, listening_store
from podium.parallel import ParallelSection
from podium.topology import Place, Topology, build_topology, share_of_cores, usable_cores

#: What must be the same on all instances, and how to call it.
_ALIKE = {
    "podium": "versions of Podium",
    "torch": "versions of torch",
    "recipe_sha256": "recipes",
    "instruction_set": "instruction sets",
}
_BEAT_S = 0.5
_STORE_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


def take_place(
    place: Place,
    facts: Mapping[str, Any],
    num_replicas: int,
    parallel: ParallelSection,
    timeout_s: float,
    body: Callable[[Topology, Instances], None],
) -> int:
    """Runs `body` as one of the instances; returns the exit code of this process."""
    host = place.host or socket.gethostname()
    console_fd = os.dup(2)
    log = early_log = _quiet(place) if place.index else ""
    if place.launch_folder is not None:
        _end_with_launcher()
    code, message, shared, store, watch = 0, "", False, None, None
    cores = place.host_cores or usable_cores()
    own = {**facts, "host": host, "pid": os.getpid(), "cores": cores}
    try:
        place = replace(place, address=resolved_address(place))
        _use_interface(place.address)
        store = _meet(place, timeout_s)
        others = _greet(store, place, own, timeout_s)
        all_cores = [other["cores"] for other in others]
        os.sched_setaffinity(0, own_cores(place, all_cores))
        topology = build_topology(
            num_replicas, place.count, _hosts(others, place.local_count), parallel.num_stages, parallel.stage_layers
        )
        topology = replace(topology, host_cores=num_host_cores(place, all_cores))
        watch = Watch(place, others)
        instances = Instances.join(
            dist.PrefixStore("instances", store), place.index, place.count, timeout_s, place.local_count
        )
        give_up_after(timeout_s)
        body(topology, instances)
        instances.close()
    except PodiumError as error:
        code, message = error.exit_code, str(error)
        shared = isinstance(error, Interrupted | _Disagreement)
    except BaseException as error:
        console.keep_traceback()
        code, message = _explained(error, watch)
        log = str(console.log_path() or log)
    if watch is not None:
        watch.close(in_order=code == 0)
    failure = Failure(place.index, host, code, message, "" if code in FINAL else log, shared=shared)
    if place.launch_folder is None:
        if early_log and not failure.log:
            Path(early_log).unlink(missing_ok=True)
        return _ended_alone(place, failure, store, console_fd)
    return _ended(place.launch_folder, failure)


def _end_with_launcher() -> None:
    """Where the launcher is killed outright, its instances are told to save and end instead of going on unseen."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(launch_folder: str, failure: Failure) -> int:
    """Tells Podium's launcher how this instance ended."""
    if failure.exit_code == 0:
        return 0
    write_failure(Path(launch_folder), failure)
    # Final ends look like success to torch's agent, which would otherwise start the instances anew.
    return 0 if failure.final else failure.exit_code


def _ended_alone(place: Place, failure: Failure, store: dist.Store | None, console_fd: int) -> int:
    """Tells the user, as the launcher is not Podium's: instance 0 speaks for all, others where they cannot reach it.

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
                failure = cause(_failures(store, place.count), {}, "") or failure
        except (RuntimeError, dist.DistError):  # instance 0 has ended, and spoken, or is cut off
            speaks = failure.exit_code not in (*FINAL, PEER_LOST)
    if speaks:
        # What instance 0 has to say of itself it says for all.
        plain = failure.final and failure.instance == place.index == 0
        os.write(console_fd, f"podium: {failure.message if plain else failure.sentence()}\n".encode())
    if failure.exit_code == PEER_LOST:
        return 1
    return failure.exit_code if failure.final else TrainingFailed.exit_code


def _failures(store: dist.Store, count: int) -> list[Failure]:
    keys = [f"failure/{index}" for index in range(count)]
    return [Failure(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _quiet(place: Place) -> str:
    """Instance 0 speaks; all others write into a file, that of the run once it is there."""
    folder = place.launch_folder or tempfile.gettempdir()
    path = Path(folder) / f"podium-instance-{place.index}-{os.getpid()}.log"
    console.write_everything_to(path)
    return str(path)


def _explained(error: BaseException, watch: "Watch | None") -> tuple[int, str]:
    text = str(error)
    if watch is None or not isinstance(error, InstanceLost):
        return 1, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    silent = [] if error.instance is not None and watch.is_dead(error.instance) else watch.silent()
    if not silent:
        return PEER_LOST, "lost another instance"
    names = ", ".join(f"instance {index} on {host}" for index, host in silent)
    return SILENT, f"heard nothing from {names}"


# --- meeting --------------------------------------------------------------------------------------------------------


def resolved_address(place: Place) -> str:
    """The address of the host where instances meet. Slurm may know it where the name service does not."""
    name = place.address
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = ""
    # A host often takes its own name for loopback, which is of no use to the others.
    useless = place.count > place.local_count and found.startswith("127.") and name not in (found, "localhost")
    if found and not useless:
        return found
    if address := _slurm_address(name):
        return address
    why = f"is {found} to itself, where no other host reaches it" if found else "is not a name that is known here"
    raise UserError(f"{name}, where the instances meet, {why}: correct the name service, or /etc/hosts")


def _slurm_address(name: str) -> str:
    """The address that Slurm's configuration has for a host, or nothing."""
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["scontrol", "show", "node", name], capture_output=True, text=True, timeout=30).stdout
        match = re.search(r"\bNodeAddr=(\S+)", shown)
        if match and match[1] != name:
            return socket.gethostbyname(match[1])
    return ""


def num_host_cores(place: Place, cores: Sequence[Sequence[int]]) -> int:
    """How many cores the instances of this host have together, whether the launcher has told them apart or not."""
    first = place.index - place.local_index
    return len(set().union(*map(set, cores[first : first + place.local_count])))


def own_cores(place: Place, cores: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The cores an instance takes, from those that every instance may use: an equal share of what it has in common
    with the others of its host, or all it has where the launcher has told the instances apart already."""
    first = place.index - place.local_index
    mine = tuple(cores[place.index])
    if any(set(other) != set(mine) for other in cores[first : first + place.local_count]):
        return mine
    return share_of_cores(mine, place.local_index, place.local_count)


def _use_interface(address: str) -> None:
    """gloo listens on the interface that leads to where instances meet, and on no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: asks the system which of its addresses it would use
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _meet(place: Place, timeout_s: float) -> dist.Store:
    try:
        if place.index == 0 and not place.store_kept:
            store = listening_store(place.address, place.port)
        else:
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, RuntimeError, dist.DistError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"{place.address}:{place.port}, where the instances meet, cannot be used: {reason}") from None
    return dist.PrefixStore(f"attempt-{place.attempt}", store)


def _greet(store: dist.Store, place: Place, own: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Waits until every instance has said what it is; the same UserError everywhere when they do not fit."""
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
        check_order(hellos, place.local_count)
    except UserError:
        if place.index == 0:  # it may keep the store, so it stays until all others have read
            with suppress(RuntimeError, dist.DistError):
                store.wait([f"read/{index}" for index in range(place.count)], timedelta(seconds=10))
        raise
    return hellos


class _Disagreement(UserError):
    """Every instance finds it, and says the same."""


def check_hellos(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Instances that differ in what bits depend on cannot work together."""
    first = hellos[0]
    for index, hello in enumerate(hellos):
        for name, called in _ALIKE.items():
            if hello[name] != first[name]:
                short = [str(value[name])[:16] for value in (first, hello)]
                raise _Disagreement(
                    f"{called} differ: {short[0]} on {first['host']} (instance 0), "
                    f"{short[1]} on {hello['host']} (instance {index})"
                )


def check_order(hellos: Sequence[Mapping[str, Any]], local_count: int) -> None:
    """Instances of a host follow one another, equally many on each."""
    hosts = [str(hello["host"]) for hello in hellos]
    ordered = [host for host in dict.fromkeys(hosts) for _ in range(local_count)]
    if hosts != ordered:
        index = next(index for index, host in enumerate(hosts) if [host] != ordered[index : index + 1])
        raise _Disagreement(
            f"instance {index} is out of place on {hosts[index]}: hosts carry equally many instances, one host after "
            "the other (with Slurm: --ntasks-per-node and --distribution=block)"
        )


def _hosts(hellos: Sequence[Mapping[str, Any]], local_count: int) -> tuple[str, ...]:
    return tuple(str(hello["host"]) for hello in hellos[::local_count])


# --- keeping an eye on the others ------------------------------------------------------------------------------------


class Watch:
    """Every instance counts up a number at the store; whoever stops counting is silent.

    Numbers are compared with themselves some time later, so no clock is needed.
    """

    def __init__(self, place: Place, hellos: Sequence[Mapping[str, Any]]) -> None:
        self._index, self._hellos, self._keeper = place.index, hellos, (place.address, place.port)
        self._stop = threading.Event()
        # A connection of its own: the main thread may be waiting on the other one.
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        plain = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store = dist.PrefixStore(f"attempt-{place.attempt}/watch", plain)
        self._thread = threading.Thread(target=self._beat, name="podium-watch", daemon=True)
        self._thread.start()

    def close(self, *, in_order: bool = True) -> None:
        """No more counting; where it is not the end of the run, others are told that this one is not just silent."""
        self._stop.set()
        # A thread inside the store when the interpreter ends takes the process down with it.
        self._thread.join(2 * _STORE_TIMEOUT_S)
        if not in_order:
            with suppress(RuntimeError, dist.DistError):
                self._store.set(f"ending/{self._index}", "yes")

    def silent(self) -> list[tuple[int, str]]:
        """(instance, host) of those that do not count any more, though nothing says that they are dead."""
        try:
            self._store.set(f"ending/{self._index}", "yes")
            before = self._numbers()
            time.sleep(4 * _BEAT_S)
            after = self._numbers()
            silent = [
                index
                for index in range(len(self._hellos))
                if index != self._index and before[index] == after[index] and not self._store.check([f"ending/{index}"])
            ]
        except (
            RuntimeError,
            dist.DistError,
        ):  # the store itself is out of reach: who keeps it has ended, or is cut off
            if self._refused():
                return []
            own = self._hellos[self._index]["host"]
            silent = [index for index, hello in enumerate(self._hellos) if hello["host"] != own]
        found = [index for index in silent if not self.is_dead(index)]
        for index in found:
            self._end_if_stopped(index)
        return [(index, str(self._hellos[index]["host"])) for index in found]

    def _refused(self) -> bool:
        """Whether the host of the store answers that nobody listens there any more."""
        try:
            with socket.create_connection(self._keeper, timeout=2):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def _numbers(self) -> list[bytes]:
        keys = [f"beat/{index}" for index in range(len(self._hellos))]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def is_dead(self, index: int) -> bool:
        """True for one of this host whose process has ended: that is for the launcher to tell."""
        return self._status(index) in (None, psutil.STATUS_ZOMBIE)

    def _end_if_stopped(self, index: int) -> None:
        """One of this host that was stopped cannot hear a request to end, and the agent would wait for it."""
        if self._status(index) == psutil.STATUS_STOPPED:
            with suppress(psutil.Error):
                psutil.Process(self._hellos[index]["pid"]).kill()

    def _status(self, index: int) -> str | None:
        """psutil's word for what the process does; None: there is none, empty: it is another host's."""
        if self._hellos[index]["host"] != self._hellos[self._index]["host"]:
            return ""
        try:
            return str(psutil.Process(self._hellos[index]["pid"]).status())
        except psutil.Error:
            return None

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(_BEAT_S):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
            except (RuntimeError, dist.DistError):
                return
