"""One instance's side of a launch: take its place among the others, and say what went wrong when it ends badly.

Called by `cli.py` when the environment says that this process is one of several.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from podium import console
from podium.engine.instances import InstanceLost, Instances
from podium.errors import PodiumError, UserError
from podium.launch.failures import PEER_LOST, SILENT, Failure, write_failure
from podium.launch.sockets import give_up_after
from podium.topology import Place, Topology, build_topology, share_of_cores, usable_cores

#: What must be the same on all instances, and how to call it.
_ALIKE = {
    "podium": "versions of Podium",
    "torch": "versions of torch",
    "recipe_sha256": "recipes",
    "instruction_set": "instruction sets",
}
_BEAT_S = 0.5
_PR_SET_PDEATHSIG = 1


def take_place(
    place: Place,
    facts: Mapping[str, Any],
    num_replicas: int,
    timeout_s: float,
    body: Callable[[Topology, Instances], None],
) -> int:
    """Runs `body` as one of the instances; returns the exit code of this process."""
    host = place.host or socket.gethostname()
    log = _quiet(place) if place.index else ""
    if place.launch_folder is not None:
        _end_with_launcher()
    code, message, watch = 0, "", None
    try:
        cores = place.host_cores or usable_cores()
        os.sched_setaffinity(0, share_of_cores(cores, place.local_index, place.local_count))
        _use_interface(place.address)
        store = _meet(place, timeout_s)
        others = _greet(store, place, {**facts, "host": host, "pid": os.getpid()}, timeout_s)
        topology = build_topology(num_replicas, place.count, _hosts(others, place.local_count))
        watch = Watch(place, others)
        instances = Instances.join(dist.PrefixStore("instances", store), place.index, place.count, timeout_s)
        give_up_after(timeout_s)
        body(topology, instances)
        instances.close()
    except PodiumError as error:
        code, message = error.exit_code, str(error)
    except BaseException as error:
        console.keep_traceback()
        code, message = _explained(error, watch)
        log = str(console.log_path() or log)
    finally:
        if watch is not None:
            watch.close()
    return _ended(place, Failure(place.index, host, code, message, "" if code in (2, 3, 75) else log))


def _end_with_launcher() -> None:
    """Where the launcher is killed outright, its instances are told to save and end instead of going on unseen."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(place: Place, failure: Failure) -> int:
    """Tells the launcher, or the user where the launcher is not Podium's."""
    if failure.exit_code == 0:
        return 0
    if place.launch_folder is None:
        if failure.exit_code not in (2, 3, 75) or place.index == 0:
            print(f"podium: {failure.sentence()}", file=sys.__stderr__)
        return failure.exit_code
    write_failure(Path(place.launch_folder), failure)
    # Final ends look like success to torch's agent, which would otherwise start the instances anew.
    return 0 if failure.final else failure.exit_code


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
    silent = watch.silent()
    if not silent:
        return PEER_LOST, "lost another instance"
    names = ", ".join(f"instance {index} on {host}" for index, host in silent)
    return SILENT, f"heard nothing from {names}"


# --- meeting --------------------------------------------------------------------------------------------------------


def _use_interface(address: str) -> None:
    """gloo listens on the interface that leads to where instances meet, and on no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: asks the system which of its addresses it would use
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _meet(place: Place, timeout_s: float) -> dist.Store:
    keeps = place.index == 0 and not place.store_kept
    try:
        store = dist.TCPStore(
            place.address, place.port, is_master=keeps, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, dist.DistError) as error:
        raise UserError(
            f"{place.address}:{place.port}, where the instances meet, cannot be used: {str(error).splitlines()[0]}"
        ) from None
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
    check_hellos(hellos)
    return hellos


def check_hellos(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Instances that differ in what bits depend on cannot work together."""
    first = hellos[0]
    for index, hello in enumerate(hellos):
        for name, called in _ALIKE.items():
            if hello[name] != first[name]:
                short = [str(value[name])[:16] for value in (first, hello)]
                raise UserError(
                    f"{called} differ: {short[0]} on {first['host']} (instance 0), "
                    f"{short[1]} on {hello['host']} (instance {index})"
                )


def _hosts(hellos: Sequence[Mapping[str, Any]], local_count: int) -> tuple[str, ...]:
    return tuple(str(hello["host"]) for hello in hellos[::local_count])


# --- keeping an eye on the others ------------------------------------------------------------------------------------


class Watch:
    """Every instance counts up a number at the store; whoever stops counting is silent.

    Numbers are compared with themselves some time later, so no clock is needed.
    """

    def __init__(self, place: Place, hellos: Sequence[Mapping[str, Any]]) -> None:
        self._index, self._hellos = place.index, hellos
        self._stop = threading.Event()
        # A connection of its own: the main thread may be waiting on the other one.
        plain = dist.TCPStore(
            place.address, place.port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
        self._store = dist.PrefixStore(f"attempt-{place.attempt}/watch", plain)
        self._thread = threading.Thread(target=self._beat, name="podium-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

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
        except (RuntimeError, dist.DistError):  # the store itself is out of reach: the link is cut
            own = self._hellos[self._index]["host"]
            silent = [index for index, hello in enumerate(self._hellos) if hello["host"] != own]
        return [(index, str(self._hellos[index]["host"])) for index in silent if self._lingers(index)]

    def _numbers(self) -> list[bytes]:
        keys = [f"beat/{index}" for index in range(len(self._hellos))]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _lingers(self, index: int) -> bool:
        """False for one that is known to be dead: that is for the launcher to tell.

        One of this host that was stopped is ended: it cannot hear a request to end, and the agent would wait for it.
        """
        if self._hellos[index]["host"] != self._hellos[self._index]["host"]:
            return True
        try:
            process = psutil.Process(self._hellos[index]["pid"])
            status = process.status()
            if status == psutil.STATUS_STOPPED:
                process.kill()
            return status != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(_BEAT_S):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
            except (RuntimeError, dist.DistError):
                return
