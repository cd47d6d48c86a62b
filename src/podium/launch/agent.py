"""Starts the instances of this host, watches them, and replaces one that is lost, or starts all of them again.

Written here: torch's elastic agent meets through a store that asks nobody who they are, and unpickles what it finds
there. Hosts meet at a service of our own (`service.py`); on one host nothing listens on any port. Signals are handed to
the instances so that they can save; one sentence says what went wrong; nothing restarts after an end that is final.
"""

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.agreement import Agreement, EndedElsewhere, HostLost
from podium.launch.assembly import HostMissing, assemble_hosts, open_service, open_store
from podium.launch.core_rotation import CoreRotation
from podium.launch.crew import Crew
from podium.launch.environment import JOINS, ends_with_input, launch_environment, place_environment
from podium.launch.failures import (
    FINAL,
    PEER_LOST,
    Failure,
    clear_failures,
    find_cause,
    read_failures,
    record_stop_request,
)
from podium.launch.meeting import Meeting
from podium.launch.plan import LaunchPlan
from podium.launch.private_folder import launch_folder
from podium.launch.processes import LocalInstances
from podium.launch.secret import new_secret, read_secret_line, users_secret
from podium.launch.ssh import RemoteHost, end_with_input
from podium.launch.store import is_open
from podium.machine.cores import numa_nodes
from podium.machine.signals import stop_signals_heard
from podium.recipe.sections.launch import LaunchSection
from podium.topology import usable_cores
from podium.ui.console import warn

#: How often the launcher checks its instances, and they rotate cores: measured best between 0.02 and 0.3 s.
_WATCH_S = 0.1
#: the same while instances wait for the launcher
_HURRIED_S = 0.01


def launch(
    plan: LaunchPlan,
    section: LaunchSection,
    others: Mapping[str, Sequence[str]] | None = None,
    secret: bytes | None = None,
) -> None:
    """Run this host's instances to the end; raise what the run ended with.

    `others`: by host, the commands that start the parts of other hosts, which end with this one. `secret`: the one that
    the user has given.
    """
    with launch_folder() as folder, ExitStack() as closing, _lost_hosts_come_back(plan):
        meeting = _meeting(plan, folder, secret, starts_others=bool(others))
        host = _Host(plan, section, meeting, folder)
        if ends_with_input(os.environ):
            end_with_input(lambda: is_open(meeting, 5), host.instances.process_ids, folder)
        if plan.keeps_store:
            patience_s = section.timeout if plan.started_again else 0.0
            closing.callback(open_service(meeting, patience_s).close)
        store = None if plan.alone else open_store(plan, meeting, section)
        remote: list[RemoteHost] = []
        for name, command in (others or {}).items():
            remote.append(RemoteHost(name, command, meeting.secret))
            closing.callback(remote[-1].end)
        if store is not None:
            assemble_hosts(plan, section, store, remote)
        with _forwarding(host):
            failure = host.run(Agreement(plan, store, section.timeout))
        if failure is not None:
            raise _as_error(failure)


def _meeting(plan: LaunchPlan, folder: Path, given: bytes | None, *, starts_others: bool) -> Meeting:
    """Return where this launch meets: in the folder, which is enough of a secret on one host, or at the first host."""
    if plan.alone:
        return Meeting(folder=folder)
    address, port = plan.meeting
    if ends_with_input(os.environ):
        secret = read_secret_line(0)
    elif given is not None:
        secret = given
    else:
        secret = new_secret() if starts_others else users_secret(f"hosts {' '.join(plan.topology.hosts)} port {port}")
    return Meeting(address=address, port=port, secret=secret)


@contextmanager
def _lost_hosts_come_back(plan: LaunchPlan) -> Iterator[None]:
    """Take a host that is missing for an interruption where hosts are started again, and for an error elsewhere."""
    try:
        yield
    except HostMissing as error:
        if plan.started_again:
            raise Interrupted(str(error)) from None
        raise


def _as_error(failure: Failure) -> PodiumError:
    kinds: dict[int, type[PodiumError]] = {2: UserError, 75: Interrupted}
    # What instance 0 reports of mistakes and interruptions holds for all instances.
    plain = failure.exit_code in (2, 75) and failure.instance <= 0
    return kinds.get(failure.exit_code, TrainingFailed)(failure.message if plain else failure.sentence())


class _Host:
    """This host's part of a run."""

    def __init__(self, plan: LaunchPlan, section: LaunchSection, meeting: Meeting, folder: Path) -> None:
        self._plan, self._section, self._meeting, self.folder = plan, section, meeting, folder
        self._name = socket.gethostname() if plan.alone else plan.host
        self._rotation = CoreRotation(numa_nodes()) if section.turns else None
        self.instances = LocalInstances()
        self._exit_codes: dict[int, int] = {}
        self._crew: Crew | None = None
        #: how many instances were lost and replaced, or had all restart
        self._num_lost = 0
        self._last_loss: Failure | None = None
        #: the name of a signal that was handed to the instances
        self.stopped_by = ""

    def run(self, agreement: Agreement) -> Failure | None:
        """Start the instances as often as need be; return what the run ended with, None for a good end."""
        try:
            attempt = 0
            while True:
                agreement.meet(attempt, lambda: bool(self.stopped_by))
                if self.stopped_by:
                    break
                self._start(attempt)
                if self._ended_well(agreement, attempt):
                    return self._leave(agreement)
                if self._is_final():
                    break
                if self._num_lost >= self._section.restarts:
                    cause = self._cause_of_end() or Failure(-1, "", TrainingFailed.exit_code, "an instance was lost")
                    agreement.end()
                    return cause
                attempt += 1
                self._restart(agreement, attempt)
            self._stop()  # their notes say how they end
            agreement.end()
            return self._cause_of_end()
        except EndedElsewhere:
            self.instances.wait(self._section.timeout)  # those that save have heard of it
            self._stop()
            agreement.end()
            elsewhere = "another host ended the run; see the messages there"
            code = (Interrupted if self._plan.started_again else TrainingFailed).exit_code
            return self._cause_of_end() or Failure(-1, "", code, elsewhere)
        except HostLost:
            known = find_cause(read_failures(self.folder), self._exit_codes, self._name) or self._last_loss
            reason = f" ({known.sentence()})" if known else ""
            others = ", ".join(host for host in self._plan.topology.hosts if host != self._plan.host)
            kind = Interrupted if self._plan.started_again else TrainingFailed
            raise kind(f"the connection to {others} was lost{reason}; `podium resume` continues") from None
        finally:
            self._stop()

    def _stop(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self.instances.stop()

    def _start(self, attempt: int) -> None:
        plan, self._exit_codes = self._plan, {}
        if plan.alone:
            self._crew = Crew(
                self.folder,
                attempt,
                self._name,
                self.instances,
                plan.topology.num_instances,
                self._section.timeout,
                lambda seat, place: self._start_processes(attempt, {seat: place}, {JOINS: "yes"}),
            )
        self._start_processes(attempt, {index: place for place, index in enumerate(plan.instances)}, {})

    def _start_processes(self, attempt: int, places: Mapping[int, int], extra: Mapping[str, str]) -> None:
        """Start an instance at each of these places of the host, by index."""
        plan = self._plan
        count, local_count = plan.topology.num_instances, len(plan.instances)
        common = {**os.environ, **launch_environment(str(self.folder), self._name, usable_cores()), **extra}
        environments = {
            index: {**common, **place_environment(self._meeting, index, count, place, local_count, attempt)}
            for index, place in places.items()
        }
        self.instances.start(plan.command, environments)
        if self.stopped_by:  # while they were being started
            self.instances.send(signal.Signals[self.stopped_by])

    def _ended_well(self, agreement: Agreement, attempt: int) -> bool:
        """Wait for the instances to end; return False as soon as one has failed, here or on another host."""
        while True:
            codes = self.instances.exit_codes()
            self._exit_codes = {index: code for index, code in codes.items() if code}
            if agreement.is_lost(attempt) or not self._goes_on():
                return False
            if self._crew.has_ended() if self._crew else not any(code is None for code in codes.values()):
                return True
            if self._rotation:
                self._rotation.rotate(self.instances.process_ids())
            time.sleep(_HURRIED_S if self._crew and self._crew.is_changing else _WATCH_S)

    def _goes_on(self) -> bool:
        """Return whether the run goes on as it is, or with the instances that are left."""
        if self._crew is None or (self._exit_codes and self.stopped_by):
            return not self._exit_codes
        num_lost = self._crew.look(self._num_lost, self._section.restarts)
        self._num_lost += num_lost or 0
        return num_lost is not None

    def _leave(self, agreement: Agreement) -> Failure | None:
        if self._crew is not None:
            self._crew.close()
        final = [failure for failure in read_failures(self.folder) if failure.final]
        agreement.end(in_order=True) if final else agreement.finish()
        return find_cause(final, {}, self._name)

    def _is_final(self) -> bool:
        noted = any(failure.final for failure in read_failures(self.folder))
        return bool(self.stopped_by) or noted or any(code in FINAL for code in self._exit_codes.values())

    def _restart(self, agreement: Agreement, number: int) -> None:
        """Say why, and end what is left of the instances."""
        agreement.report_loss(number - 1)
        self._last_loss = find_cause(read_failures(self.folder), self._exit_codes, self._name)
        unknown = "an instance was lost" if self._plan.alone else "an instance of another host was lost"
        if self._crew is not None:
            unknown = self._crew.reason or unknown
        self._num_lost += 1
        warn(
            f"{self._last_loss.sentence() if self._last_loss else unknown}; restarting from the last checkpoint "
            f"({self._num_lost} of {self._section.restarts})"
        )
        self._stop()
        clear_failures(self.folder)

    def _cause_of_end(self) -> Failure | None:
        """Return the cause of a bad end. A signal that came before the instances could hear it is one, too."""
        failure = find_cause(read_failures(self.folder), self._exit_codes, self._name)
        if self.stopped_by and (failure is None or failure.exit_code == PEER_LOST):
            return Failure(-1, "", Interrupted.exit_code, f"stopped by {self.stopped_by} before training began")
        return failure


@contextmanager
def _forwarding(host: _Host) -> Iterator[None]:
    """Hand signals to the instances, which save and end; a second SIGINT ends everything at once."""
    interrupted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        again = interrupted and number == signal.SIGINT
        interrupted = interrupted or number == signal.SIGINT
        host.stopped_by = signal.Signals(number).name
        record_stop_request(host.folder)
        host.instances.send(signal.SIGKILL if again else signal.Signals(number))
        if again:
            shutil.rmtree(host.folder, ignore_errors=True)
            os._exit(130)

    with stop_signals_heard(forward):
        yield
