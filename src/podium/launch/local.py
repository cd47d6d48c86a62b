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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
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
from podium.cores import numa_nodes
from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.interrupt import stop_signals
from podium.launch.failures import PEER_LOST, Failure, cause, clear_failures, note_request, read_failures
from podium.launch.plan import LaunchPlan, LaunchSection
from podium.launch.sockets import give_up_after, listening_store
from podium.launch.ssh import Other, end_with_input
from podium.launch.turns import Turns
from podium.terminal import leave_closed_terminal
from podium.topology import ends_with_input, launch_environment, usable_cores

#: The agents tell each other that they live every second; five missed ones and a host counts as gone. A host by itself
#: has nobody to tell, and what it takes it takes from the training: 0.4 % of a core.
_KEEP_ALIVE_S, _KEEP_ALIVE_MISSES = 1, 5
_KEEP_ALIVE_ALONE_S = 24 * 3600
_MAX_CLOCK_GAP_S = 3.0
#: How often the launcher looks after its instances, and they change cores: as measured best of 0.02 to 0.3 s.
_WATCH_S = 0.1
#: How often hosts that wait for one another look at what else there is.
_LOOK_S = 0.25


def local_names() -> frozenset[str]:
    """Every name and address this host goes by."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names.update(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(names)


def launch(plan: LaunchPlan, section: LaunchSection, others: Mapping[str, Sequence[str]] | None = None) -> None:
    """Runs this host's instances to the end; raises what the run ended with.

    `others`: by host, the commands that start the parts of other hosts, which end with this one.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The agent would turn signals into an immediate end; instances must have the time to save.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    folder = Path(tempfile.mkdtemp(prefix="podium-launch-"))
    os.environ.update(launch_environment(str(folder), _host_name(plan), usable_cores()))
    started: list[Other] = []
    agents: list[_Agent] = []
    try:
        if ends_with_input(os.environ):
            end_with_input(plan.meeting, lambda: [pid for agent in agents for pid in agent.process_ids()], folder)
        store = _meet(plan, section)
        give_up_after(section.timeout)
        for host, command in (others or {}).items():
            started.append(Other(host, command))
        _assemble(plan, section, store, started)
        agent = _Agent(plan, section, store, folder)
        agents.append(agent)
        with _forwarding(agent):
            failure = _run(agent, plan, folder)
        if failure is not None:
            raise _as_error(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for other in started:
            other.end()


def _run(agent: "_Agent", plan: LaunchPlan, folder: Path) -> Failure | None:
    try:
        result = agent.run()
    except (RendezvousClosedError, _FinalError):
        ended_elsewhere = Failure(-1, "", 3, "the run was ended by another host; see the messages there")
        return _told(agent, plan, folder) or ended_elsewhere
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
        return _told(agent, plan, folder) or Failure(-1, "", 3, "an instance was lost")
    return next((note for note in failures if note.final), None)


def _told(agent: "_Agent", plan: LaunchPlan, folder: Path) -> Failure | None:
    """The cause of a bad end. A signal that came before the instances could hear it is one, too."""
    note = cause(read_failures(folder), agent.exit_codes, _host_name(plan))
    if agent.stopped_by and (note is None or note.exit_code == PEER_LOST):
        return Failure(-1, "", Interrupted.exit_code, f"stopped by {agent.stopped_by} before training began")
    return note


def _as_error(failure: Failure) -> PodiumError:
    kinds: dict[int, type[PodiumError]] = {2: UserError, 75: Interrupted}
    # What instance 0 has to say of mistakes and interruptions it says for all.
    plain = failure.exit_code in (2, 75) and failure.instance <= 0
    return kinds.get(failure.exit_code, TrainingFailed)(failure.message if plain else failure.sentence())


def _host_name(plan: LaunchPlan) -> str:
    return socket.gethostname() if plan.alone else plan.host


class _FinalError(Exception):
    """An instance ended in a way that starting anew would not change."""


class _Rendezvous(DynamicRendezvousHandler):
    """torch's own, but hosts keep the order they are named in, and its store for the instances listens on one address.

    By itself it goes by the spelling of addresses: instance 0, which keeps the run, could be on any host.
    """

    host_index: int

    def num_nodes_waiting(self) -> int:
        """Asked whenever the launcher looks after its instances; a host by itself need not go to the store for it."""
        return 0 if self.settings.max_nodes == 1 else super().num_nodes_waiting()

    def _get_world(self) -> tuple[int, int]:
        _, num_hosts = super()._get_world()
        return self.host_index, num_hosts

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return listening_store(master_addr, master_port)


class _Agent(LocalElasticAgent):
    """torch's own, but it says why it starts anew, and does not where that would change nothing."""

    def __init__(self, plan: LaunchPlan, section: LaunchSection, store: dist.Store, folder: Path) -> None:
        self.folder, self._host, self._restarts = folder, _host_name(plan), section.restarts
        self._timeout_s = section.timeout
        self._turns = Turns(numa_nodes()) if section.turns else None
        self.exit_codes: dict[int, int] = {}
        #: the name of a signal that was handed to the instances
        self.stopped_by = ""
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
            keep_alive_interval=_KEEP_ALIVE_ALONE_S if num_hosts == 1 else _KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVE_MISSES,
        )
        self.rendezvous.host_index = plan.host_index
        spec = WorkerSpec(
            role="podium",
            local_world_size=plan.topology.instances_per_host,
            entrypoint=plan.command[0],
            args=plan.command[1:],
            rdzv_handler=self.rendezvous,
            max_restarts=section.restarts,
            monitor_interval=_WATCH_S,
            local_addr=address,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "agent")), exit_barrier_timeout=section.timeout)

    def process_ids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        if self.stopped_by:
            raise _FinalError
        give_up_after(self._timeout_s)  # it may have made new connections

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.exit_codes = {instance: failure.exitcode for instance, failure in result.failures.items()}
        if self._turns and result.state == WorkerState.HEALTHY:
            self._turns.change(self.process_ids())
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        notes = read_failures(self.folder)
        if self.stopped_by or any(note.final for note in notes):
            self._stop_workers(worker_group)
            raise _FinalError
        known = cause(notes, self.exit_codes, self._host)
        why = known.sentence() if known else "an instance of another host was lost"
        number = self._restarts - self._remaining_restarts
        warn(f"{why}; starting anew from the last checkpoint ({number} of {self._restarts})")
        clear_failures(self.folder)
        super()._restart_workers(worker_group)


@contextmanager
def _forwarding(agent: _Agent) -> Iterator[None]:
    """Signals go to the instances, which save and end; a second SIGINT ends everything at once."""
    interrupted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        leave_closed_terminal()
        again = interrupted and number == signal.SIGINT
        interrupted = interrupted or number == signal.SIGINT
        agent.stopped_by = signal.Signals(number).name
        note_request(agent.folder)
        for pid in agent.process_ids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if again else number)
        if again:
            os._exit(130)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- where instances meet -------------------------------------------------------------------------------------------


def _assemble(plan: LaunchPlan, section: LaunchSection, store: dist.Store, others: Sequence[Other]) -> None:
    """Waits for all hosts, then compares their clocks: torch's agents take hosts with another time for dead."""
    if plan.alone:
        return
    hosts = plan.topology.hosts
    store.set(f"joined/{plan.host}", "yes")
    try:
        _wait_for_hosts(plan, section, store, others)
        # Everybody is let go by the last one to join, so everybody reads its clock at the same moment.
        store.set(f"clock/{plan.host}", str(time.time()))
        store.wait([f"clock/{host}" for host in hosts], timedelta(seconds=section.timeout))
        clocks = {host: float(store.get(f"clock/{host}")) for host in hosts}
        store.set(f"read/{plan.host}", "yes")
        if plan.keeps_store:
            store.wait([f"read/{host}" for host in hosts], timedelta(seconds=section.timeout))
    except (RuntimeError, dist.DistError):
        gone = "another host" if plan.keeps_store else hosts[0]
        raise UserError(f"{gone} has ended before all hosts had met: see what it says") from None
    except UserError as error:
        if plan.keeps_store:
            store.set("ended", str(error))
        raise
    check_clocks(clocks)


def _wait_for_hosts(plan: LaunchPlan, section: LaunchSection, store: dist.Store, others: Sequence[Other]) -> None:
    """Until all have joined; UserError as soon as it is known that one will not."""
    keys = {host: f"joined/{host}" for host in plan.topology.hosts}
    deadline = time.monotonic() + section.timeout
    missing = list(keys)
    while missing:
        with suppress(RuntimeError, dist.DistError):  # also when the store is gone, which the next look raises
            store.wait(list(keys.values()), timedelta(seconds=_LOOK_S))
        missing = [host for host, key in keys.items() if not store.check([key])]
        for other in others:
            other.joined = other.host not in missing
            other.check()
        if missing and store.check(["ended"]):
            raise UserError(store.get("ended").decode())
        if missing and time.monotonic() > deadline:
            late = f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'}"
            advice = "" if others else ": start the same command there with --join"
            raise UserError(f"{late} not joined within {section.timeout:g} s{advice}")


def check_clocks(clocks: Mapping[str, float]) -> None:
    """UserError when two hosts' clocks are further apart than the agents can bear."""
    late, early = max(clocks, key=lambda host: clocks[host]), min(clocks, key=lambda host: clocks[host])
    gap = clocks[late] - clocks[early]
    if gap > _MAX_CLOCK_GAP_S:
        raise UserError(f"the clocks of {late} and {early} are {gap:.0f} s apart: set them alike, by NTP for instance")


def _meet(plan: LaunchPlan, section: LaunchSection) -> dist.TCPStore:
    address, port = plan.meeting
    if plan.keeps_store:
        own = "127.0.0.1" if plan.alone else socket.gethostbyname(address)
        try:
            return listening_store(own, port)
        except OSError as error:
            raise UserError(
                f"port {port} of {own} cannot be used ({error.strerror}): choose another with launch.port"
            ) from None
    say(f"joining {address}:{port} as {plan.host}")
    try:
        timeout = timedelta(seconds=section.timeout)
        return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError):
        raise UserError(
            f"{address}:{port}, where the hosts meet, did not answer within {section.timeout:g} s"
        ) from None
