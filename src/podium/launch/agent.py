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

import torch.distributed as dist

from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.launch.agreement import Agreement, EndedElsewhere, HostLost
from podium.launch.assembly import HostMissing, assemble_hosts, open_service, open_store
from podium.launch.between_hosts import OtherHosts, attempt_under_way, is_under_way, set_under_way
from podium.launch.board import Board
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
from podium.launch.listing import Listing
from podium.launch.meeting import Meeting
from podium.launch.plan import LaunchPlan
from podium.launch.private_folder import launch_folder
from podium.launch.processes import LocalInstances
from podium.launch.relay import Relay
from podium.launch.secret import meeting_purpose, new_secret, read_secret_line, users_secret
from podium.launch.ssh import RemoteHost, end_with_input
from podium.launch.store import is_open
from podium.machine.cores import numa_nodes
from podium.machine.signals import stop_signals_heard
from podium.recipe.sections.launch import LaunchSection
from podium.topology import usable_cores
from podium.ui.console import say, warn

#: How often the launcher checks its instances, and they rotate cores: measured best between 0.02 and 0.3 s.
_WATCH_S = 0.1
#: the same while instances wait for the launcher
_HURRIED_S = 0.01


def launch(
    plan: LaunchPlan,
    section: LaunchSection,
    others: Mapping[str, Sequence[str]] | None = None,
    secret: bytes | None = None,
    run: Path | None = None,
) -> None:
    """Run this host's instances to the end; raise what the run ended with.

    `others`: by host, the commands that start the parts of other hosts, which end with this one. `secret`: the one that
    the user has given. `run`: the folder of the run, by which other commands find this launch.
    """
    with launch_folder() as folder, ExitStack() as closing, _lost_hosts_come_back(plan):
        meeting = _meeting(plan, folder, secret, starts_others=bool(others))
        host = _Host(plan, section, meeting, folder, Listing(run, folder, meeting, plan))
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
        comes_late = store is not None and not plan.keeps_store and is_under_way(store)
        if store is not None and not comes_late:
            assemble_hosts(plan, section, store, remote)
        with _forwarding(host), host.listing:
            if comes_late:
                assert store is not None
                host.visit(store, len(plan.instances))
                return
            failure = host.run(Agreement(plan, store, section.timeout), store)
        if failure is not None:
            raise _as_error(failure)


def visit(plan: LaunchPlan, section: LaunchSection, meeting: Meeting, run: Path, count: int) -> None:
    """Bring this host's cores to a run that is under way on others, until it ends or this host is asked to leave."""
    with launch_folder() as folder:
        host = _Host(plan, section, meeting, folder, Listing(run, folder, meeting, plan))
        store = open_store(plan, meeting, section)
        with _forwarding(host), host.listing:
            host.visit(store, count)


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
        secret = new_secret() if starts_others else users_secret(meeting_purpose(plan.topology.hosts, port))
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

    def __init__(
        self, plan: LaunchPlan, section: LaunchSection, meeting: Meeting, folder: Path, listing: Listing
    ) -> None:
        self._plan, self._section, self._meeting, self.folder = plan, section, meeting, folder
        self.listing = listing
        self._name = socket.gethostname() if plan.alone else plan.host
        self._rotation = CoreRotation(numa_nodes()) if section.turns else None
        self.instances = LocalInstances()
        self._exit_codes: dict[int, int] = {}
        self._store: dist.Store | None = None
        self._crew: Crew | Relay | None = None
        #: how many instances were lost and replaced, or had all restart
        self._num_lost = 0
        self._last_loss: Failure | None = None
        #: the name of a signal that was handed to the instances
        self.stopped_by = ""
        #: whether a signal ends this host's part alone
        self.is_visitor = False

    def run(self, agreement: Agreement, store: dist.Store | None) -> Failure | None:
        """Start the instances as often as need be; return what the run ended with, None for a good end."""
        self._store = store
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

    def visit(self, store: dist.Store, count: int) -> None:
        """Take part with `count` instances at most, until the run ends or this host has left it."""
        self._store, self.is_visitor, asked = store, True, False
        try:
            attempt = attempt_under_way(store)
            if attempt is None:
                raise UserError("the training has not begun, or its instances cannot go on without one another")
            while attempt is not None:
                self._crew = relay = self._new_relay(attempt, {}, count)
                while not relay.has_ended():
                    if self.stopped_by and not asked:
                        asked = True
                        relay.ask_to_leave(-1)
                    if relay.look(0, 0) is None:
                        break
                    if self._rotation:
                        self._rotation.rotate(self.instances.process_ids())
                    time.sleep(_HURRIED_S if relay.is_changing else _WATCH_S)
                self._stop()
                attempt = relay.next_attempt
            self._tell_end_of_visit(relay)
        except (HostLost, dist.DistError):
            kind = Interrupted if self._plan.started_again else TrainingFailed
            raise kind(f"the connection to {self._meeting} was lost") from None
        finally:
            self._stop()

    def _tell_end_of_visit(self, relay: Relay) -> None:
        final = [failure for failure in read_failures(self.folder) if failure.final]
        if relay.refusal and not relay.was_taken_in:
            raise UserError(relay.refusal)
        if cause := find_cause(final, {}, self._name):
            raise _as_error(cause)
        if self.stopped_by and self._plan.started_again:
            raise Interrupted(f"stopped by {self.stopped_by}; {relay.refusal}")
        say(relay.refusal or "the training has ended")

    def _stop(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self.instances.stop()

    def _start(self, attempt: int) -> None:
        plan, self._exit_codes = self._plan, {}
        places = {index: place for place, index in enumerate(plan.instances)}
        if plan.keeps_store:
            topology = plan.topology
            hosts = {index: topology.host_of(index) for index in range(topology.num_instances)}
            self._crew = Crew(
                Board(self.folder, attempt),
                dict.fromkeys(hosts, self._name) if plan.alone else hosts,
                self._name,
                self.instances,
                plan.limits,
                self._section.timeout,
                lambda seat, place: self._start_another(attempt, seat, place),
                None if self._store is None else OtherHosts(self._store, attempt),
            )
        else:
            assert self._store is not None
            self._crew = self._new_relay(attempt, places, 0)
        self.listing.attempt = attempt
        self._start_processes(attempt, places, {})

    def _new_relay(self, attempt: int, places: Mapping[int, int], wants: int) -> Relay:
        assert self._store is not None
        return Relay(
            Board(self.folder, attempt),
            attempt,
            self._name,
            self.instances,
            self._store,
            lambda seat, place: self._start_another(attempt, seat, place),
            places,
            wants,
        )

    def _start_another(self, attempt: int, seat: int, place: int) -> None:
        self._start_processes(attempt, {seat: place}, {JOINS: "yes"})

    def _start_processes(self, attempt: int, places: Mapping[int, int], extra: Mapping[str, str]) -> None:
        """Start an instance at each of these places of the host, by index."""
        plan = self._plan
        count, local_count = plan.topology.num_instances, max(len(plan.instances), *(1 + at for at in places.values()))
        common = {**os.environ, **launch_environment(str(self.folder), self._name, usable_cores()), **extra}
        environments = {
            index: {**common, **place_environment(self._meeting, index, count, place, local_count, attempt)}
            for index, place in places.items()
        }
        self.instances.start(plan.command, environments)
        if self.stopped_by and self.stopped_by in signal.Signals.__members__:  # while they were being started
            self.instances.send(signal.Signals[self.stopped_by])

    def _ended_well(self, agreement: Agreement, attempt: int) -> bool:
        """Wait for the instances to end; return False as soon as one has failed, here or on another host."""
        while True:
            codes = self.instances.exit_codes()
            self._exit_codes = {index: code for index, code in codes.items() if code}
            if agreement.is_lost(attempt) or not self._goes_on():
                return False
            assert self._crew is not None
            if self._crew.has_ended():
                return True
            if self._rotation:
                self._rotation.rotate(self.instances.process_ids())
            time.sleep(_HURRIED_S if self._crew.is_changing else _WATCH_S)

    def _goes_on(self) -> bool:
        """Return whether the run goes on as it is, or with the instances that are left."""
        crew = self._crew
        assert crew is not None
        if self._exit_codes and self.stopped_by:
            return False
        num_lost = crew.look(self._num_lost, self._section.restarts, stopping=bool(self.stopped_by))
        self._num_lost += num_lost or 0
        if isinstance(crew, Crew):
            self._watch_over(crew)
            if num_lost is None and crew.has_ended_elsewhere:
                raise EndedElsewhere
        return num_lost is not None

    def _watch_over(self, crew: Crew) -> None:
        """Let others find this run once it trains; have it save and end where too few are left."""
        if crew.is_given_up and not self.stopped_by:
            self.stopped_by = "the launcher"
            record_stop_request(self.folder)
            self.instances.send(signal.SIGTERM)
        if not self.listing.is_told and crew.is_settled:
            self.listing.tell()
            if self._store is not None:
                set_under_way(self._store, self.listing.attempt)

    def _leave(self, agreement: Agreement) -> Failure | None:
        if self._crew is not None:
            self._crew.close()
        if isinstance(self._crew, Crew):
            agreement.leave_out(self._crew.gone)
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
        unknown = (self._crew.reason if self._crew is not None else "") or unknown
        self.listing.is_told = False
        if isinstance(self._crew, Crew):
            self._crew.restarts = True
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
        if host.is_visitor and not again:
            return  # the run goes on without this host
        record_stop_request(host.folder)
        host.instances.send(signal.SIGKILL if again else signal.Signals(number))
        if again:
            shutil.rmtree(host.folder, ignore_errors=True)
            os._exit(130)

    with stop_signals_heard(forward):
        yield
