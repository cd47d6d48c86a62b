"""Starts and watches the instances of this host with torch's elastic agent, used from Python.

The agent starts the processes, sees them end, and starts all of them anew when one is lost; hosts meet through its
rendezvous. What is added: sockets bound to one address only, signals handed to the instances so that they can save,
one sentence about what went wrong, and no restart after an end that is final.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from podium.console import say, warn
from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.failures import Failure, cause, clear_failures, read_failures
from podium.launch.plan import LaunchPlan, LaunchSection
from podium.launch.sockets import give_up_after
from podium.topology import launch_environment, usable_cores

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: The agents tell each other that they live every second; five missed ones and a host counts as gone.
_KEEP_ALIVE_S, _KEEP_ALIVE_MISSES = 1, 5
_MAX_CLOCK_GAP_S = 3.0


def local_names() -> frozenset[str]:
    """Every name and address this host goes by."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names.update(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(names)


def launch(plan: LaunchPlan, section: LaunchSection) -> None:
    """Runs this host's instances to the end; raises what the run ended with."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The agent would turn signals into an immediate end; instances must have the time to save.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    folder = Path(tempfile.mkdtemp(prefix="podium-launch-"))
    os.environ.update(launch_environment(str(folder), _host_name(plan), usable_cores()))
    try:
        store = _meet(plan, section)
        give_up_after(section.timeout)
        _assemble(plan, section, store)
        agent = _Agent(plan, section, store, folder)
        with _forwarding(agent):
            failure = _run(agent, plan, folder)
        if failure is not None:
            raise _as_error(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(agent: "_Agent", plan: LaunchPlan, folder: Path) -> Failure | None:
    try:
        result = agent.run()
    except (RendezvousClosedError, _FinalError):
        note = cause(read_failures(folder), agent.exit_codes, _host_name(plan))
        return note or Failure(-1, "", 3, "the run was ended by another host; see the messages there")
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousStateError, dist.DistError):
        note = cause(read_failures(folder), agent.exit_codes, _host_name(plan))
        reason = f" ({note.sentence()})" if note else ""
        others = ", ".join(host for host in plan.topology.hosts if host != plan.host)
        raise TrainingFailed(f"the connection to {others} was lost{reason}; `podium resume` continues") from None
    finally:
        with suppress(Exception):
            agent.rendezvous.shutdown()
    failures = read_failures(folder)
    if result.is_failed():
        return cause(failures, agent.exit_codes, _host_name(plan)) or Failure(-1, "", 3, "an instance was lost")
    return next((note for note in failures if note.final), None)


def _as_error(failure: Failure) -> PodiumError:
    kinds: dict[int, type[PodiumError]] = {2: UserError, 75: Interrupted}
    # Interruptions and mistakes are everybody's: no instance needs naming unless it is its own trouble.
    plain = failure.exit_code in (2, 75) and failure.instance <= 0
    return kinds.get(failure.exit_code, TrainingFailed)(failure.message if plain else failure.sentence())


def _host_name(plan: LaunchPlan) -> str:
    return socket.gethostname() if plan.alone else plan.host


class _FinalError(Exception):
    """An instance ended in a way that starting anew would not change."""


class _Rendezvous(DynamicRendezvousHandler):
    """torch's own, but its store for the instances listens on one address only."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return _listening_store(master_addr, master_port)


class _Agent(LocalElasticAgent):
    """torch's own, but it says why it starts anew, and does not where that would change nothing."""

    def __init__(self, plan: LaunchPlan, section: LaunchSection, store: dist.Store, folder: Path) -> None:
        self._folder, self._host, self._restarts = folder, _host_name(plan), section.restarts
        self._timeout_s = section.timeout
        self.exit_codes: dict[int, int] = {}
        address = "127.0.0.1" if plan.alone else socket.gethostbyname(plan.host)
        num_hosts = len(plan.topology.hosts)
        self.rendezvous = _Rendezvous.from_backend(
            run_id="podium",
            store=store,
            backend=C10dRendezvousBackend(store, "podium"),
            min_nodes=num_hosts,
            max_nodes=num_hosts,
            local_addr=address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=section.timeout),
                last_call=timedelta(seconds=1),
                close=timedelta(seconds=5),
                heartbeat=timedelta(seconds=5),
            ),
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVE_MISSES,
        )
        spec = WorkerSpec(
            role="podium",
            local_world_size=plan.topology.instances_per_host,
            entrypoint=plan.command[0],
            args=plan.command[1:],
            rdzv_handler=self.rendezvous,
            max_restarts=section.restarts,
            monitor_interval=0.1,
            local_addr=address,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "agent")), exit_barrier_timeout=section.timeout)

    def process_ids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        give_up_after(self._timeout_s)  # it may have made new connections

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.exit_codes = {instance: failure.exitcode for instance, failure in result.failures.items()}
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        notes = read_failures(self._folder)
        if any(note.final for note in notes):
            self._stop_workers(worker_group)
            raise _FinalError
        known = cause(notes, self.exit_codes, self._host)
        why = known.sentence() if known else "an instance of another host was lost"
        number = self._restarts - self._remaining_restarts
        warn(f"{why}; starting anew from the last checkpoint ({number} of {self._restarts})")
        clear_failures(self._folder)
        super()._restart_workers(worker_group)


@contextmanager
def _forwarding(agent: _Agent) -> Iterator[None]:
    """Signals go to the instances, which save and end; a second SIGINT ends everything at once."""
    interrupted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        again = interrupted and number == signal.SIGINT
        interrupted = interrupted or number == signal.SIGINT
        for pid in agent.process_ids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if again else number)
        if again:
            os._exit(130)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- where instances meet -------------------------------------------------------------------------------------------


def _assemble(plan: LaunchPlan, section: LaunchSection, store: dist.Store) -> None:
    """Waits for all hosts, then compares their clocks: torch's agents take hosts with another time for dead."""
    if plan.alone:
        return
    hosts = plan.topology.hosts
    store.set(f"joined/{plan.host}", "yes")
    try:
        store.wait([f"joined/{host}" for host in hosts], timedelta(seconds=section.timeout))
    except (RuntimeError, dist.DistError):
        missing = [host for host in hosts if not store.check([f"joined/{host}"])]
        late = f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'}"
        raise UserError(
            f"{late} not joined within {section.timeout:g} s: start the same command there with --join"
        ) from None
    # Everybody is let go by the last one to join, so everybody reads its clock at the same moment.
    store.set(f"clock/{plan.host}", str(time.time()))
    store.wait([f"clock/{host}" for host in hosts], timedelta(seconds=section.timeout))
    check_clocks({host: float(store.get(f"clock/{host}")) for host in hosts})


def check_clocks(clocks: Mapping[str, float]) -> None:
    """UserError when two hosts' clocks are further apart than the agents can bear."""
    late, early = max(clocks, key=lambda host: clocks[host]), min(clocks, key=lambda host: clocks[host])
    gap = clocks[late] - clocks[early]
    if gap > _MAX_CLOCK_GAP_S:
        raise UserError(f"the clocks of {late} and {early} are {gap:.0f} s apart: set them alike, by NTP for instance")


def _meet(plan: LaunchPlan, section: LaunchSection) -> dist.TCPStore:
    address, port = plan.meeting
    if plan.keeps_store:
        return _listening_store("127.0.0.1" if plan.alone else socket.gethostbyname(address), port)
    say(f"joining {address}:{port} as {plan.host}")
    try:
        timeout = timedelta(seconds=section.timeout)
        return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError):
        raise UserError(
            f"{address}:{port}, where the hosts meet, did not answer within {section.timeout:g} s"
        ) from None


def _listening_store(address: str, port: int) -> dist.TCPStore:
    """A store that listens on `address` alone; torch by itself would listen on all addresses of the host."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} of {address} cannot be used ({error.strerror}): choose another with launch.port"
        ) from None
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=False, master_listen_fd=listener.detach()
    )


def start_by_ssh(commands: list[list[str]]) -> list[subprocess.Popen]:
    """Starts the other hosts' parts; they end with this one."""
    return [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) for command in commands]
