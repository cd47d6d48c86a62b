"""Starts and watches the instances of this host with torch's elastic agent, used from Python.

The agent starts the processes, sees them end, and restarts all of them when one is lost; hosts meet through its
rendezvous. What is added: sockets bound to one address only, signals handed to the instances so that they can save,
one sentence about what went wrong, and no restart after an end that is final.
"""

import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

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

from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.assembly import assemble_hosts, open_store
from podium.launch.core_rotation import CoreRotation
from podium.launch.environment import ends_with_input, launch_environment
from podium.launch.failures import (
    FINAL,
    PEER_LOST,
    Failure,
    clear_failures,
    find_cause,
    read_failures,
    record_stop_request,
)
from podium.launch.plan import LaunchPlan
from podium.launch.sockets import give_up_after, listening_store
from podium.launch.ssh import RemoteHost, end_with_input
from podium.machine.cores import numa_nodes
from podium.machine.signals import stop_signals
from podium.recipe.sections.launch import LaunchSection
from podium.topology import usable_cores
from podium.ui.console import warn
from podium.ui.terminal import leave_closed_terminal

#: The agents send each other a sign of life every second; after five missed ones a host counts as gone. A single host
#: has nobody to send it to, and sending takes 0.4 % of a core from the training.
_KEEP_ALIVE_S, _KEEP_ALIVE_MISSES = 1, 5
_KEEP_ALIVE_ALONE_S = 24 * 3600
#: How often the launcher checks its instances, and they rotate cores: measured best between 0.02 and 0.3 s.
_WATCH_S = 0.1


def launch(plan: LaunchPlan, section: LaunchSection, others: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run this host's instances to the end; raise what the run ended with.

    `others`: by host, the commands that start the parts of other hosts, which end with this one.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The agent would turn signals into an immediate end; instances need time to save.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    folder = Path(tempfile.mkdtemp(prefix="podium-launch-"))
    os.environ.update(launch_environment(str(folder), _host_name(plan), usable_cores()))
    remote: list[RemoteHost] = []
    agents: list[_Agent] = []
    try:
        if ends_with_input(os.environ):
            end_with_input(plan.meeting, lambda: [pid for agent in agents for pid in agent.process_ids()], folder)
        store = open_store(plan, section)
        give_up_after(section.timeout)
        for host, command in (others or {}).items():
            remote.append(RemoteHost(host, command))
        assemble_hosts(plan, section, store, remote)
        agent = _Agent(plan, section, store, folder)
        agents.append(agent)
        with _forwarding(agent):
            failure = _run(agent, plan, folder)
        if failure is not None:
            raise _as_error(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for host_part in remote:
            host_part.end()


def _run(agent: "_Agent", plan: LaunchPlan, folder: Path) -> Failure | None:
    try:
        result = agent.run()
    except (RendezvousClosedError, _FinalError):
        ended_elsewhere = Failure(-1, "", 3, "another host ended the run; see the messages there")
        return _cause_of_end(agent, plan, folder) or ended_elsewhere
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousStateError, dist.DistError):
        failure = find_cause(read_failures(folder), agent.exit_codes, _host_name(plan))
        reason = f" ({failure.sentence()})" if failure else ""
        others = ", ".join(host for host in plan.topology.hosts if host != plan.host)
        raise TrainingFailed(f"the connection to {others} was lost{reason}; `podium resume` continues") from None
    finally:
        with suppress(Exception):
            agent.rendezvous.shutdown()
    if result.is_failed():
        return _cause_of_end(agent, plan, folder) or Failure(-1, "", 3, "an instance was lost")
    final = [failure for failure in read_failures(folder) if failure.final]
    return find_cause(final, {}, _host_name(plan))


def _cause_of_end(agent: "_Agent", plan: LaunchPlan, folder: Path) -> Failure | None:
    """Return the cause of a bad end. A signal that came before the instances could hear it is one, too."""
    failure = find_cause(read_failures(folder), agent.exit_codes, _host_name(plan))
    if agent.stopped_by and (failure is None or failure.exit_code == PEER_LOST):
        return Failure(-1, "", Interrupted.exit_code, f"stopped by {agent.stopped_by} before training began")
    return failure


def _as_error(failure: Failure) -> PodiumError:
    kinds: dict[int, type[PodiumError]] = {2: UserError, 75: Interrupted}
    # What instance 0 reports of mistakes and interruptions holds for all instances.
    plain = failure.exit_code in (2, 75) and failure.instance <= 0
    return kinds.get(failure.exit_code, TrainingFailed)(failure.message if plain else failure.sentence())


def _host_name(plan: LaunchPlan) -> str:
    return socket.gethostname() if plan.alone else plan.host


class _FinalError(Exception):
    """An instance ended in a way that a restart would not change."""


class _Rendezvous(DynamicRendezvousHandler):
    """torch's own, but hosts keep the order they are named in, and its store for the instances listens on one address.

    Left alone it goes by the spelling of addresses: instance 0, which writes the run, could be on any host.
    """

    host_index: int

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait; asked at every check of the instances, so a single host skips the store."""
        return 0 if self.settings.max_nodes == 1 else super().num_nodes_waiting()

    def _get_world(self) -> tuple[int, int]:
        _, num_hosts = super()._get_world()
        return self.host_index, num_hosts

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return listening_store(master_addr, master_port)


class _Agent(LocalElasticAgent):
    """torch's own, but it says why it restarts, and does not where a restart would change nothing."""

    def __init__(self, plan: LaunchPlan, section: LaunchSection, store: dist.Store, folder: Path) -> None:
        self.folder, self._host, self._restarts = folder, _host_name(plan), section.restarts
        self._alone, self._timeout_s = plan.alone, section.timeout
        self._rotation = CoreRotation(numa_nodes()) if section.turns else None
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
        give_up_after(self._timeout_s)  # there may be new connections

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.exit_codes = {instance: failure.exitcode for instance, failure in result.failures.items()}
        if self._rotation and result.state == WorkerState.HEALTHY:
            self._rotation.rotate(self.process_ids())
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failures = read_failures(self.folder)
        final = any(failure.final for failure in failures) or any(code in FINAL for code in self.exit_codes.values())
        if self.stopped_by or final:
            self._stop_workers(worker_group)
            raise _FinalError
        known = find_cause(failures, self.exit_codes, self._host)
        unknown = "an instance was lost" if self._alone else "an instance of another host was lost"
        number = self._restarts - self._remaining_restarts
        warn(
            f"{known.sentence() if known else unknown}; restarting from the last checkpoint "
            f"({number} of {self._restarts})"
        )
        clear_failures(self.folder)
        super()._restart_workers(worker_group)


@contextmanager
def _forwarding(agent: _Agent) -> Iterator[None]:
    """Hand signals to the instances, which save and end; a second SIGINT ends everything at once."""
    interrupted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        leave_closed_terminal()
        again = interrupted and number == signal.SIGINT
        interrupted = interrupted or number == signal.SIGINT
        agent.stopped_by = signal.Signals(number).name
        record_stop_request(agent.folder)
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
