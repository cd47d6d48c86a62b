"""`podium join` and `podium leave`: instances and hosts that come to a training under way, or leave it."""

import os
import socket
import sys
from pathlib import Path

from podium.errors import UserError
from podium.launch import agent
from podium.launch.listing import Launcher, Whereabouts, launchers_here, whereabouts
from podium.launch.meeting import Meeting
from podium.launch.plan import LaunchPlan
from podium.launch.requests import ask
from podium.launch.secret import meeting_purpose, take_secret, users_secret
from podium.launch.store import nobody_listens
from podium.recipe.loading import Recipe, recipe_with
from podium.recipe.overrides import parse_override
from podium.runs import own_code
from podium.runs.folder import Run, open_run
from podium.topology import Topology, usable_cores
from podium.ui.console import say

_LOOK_S = 5.0


def join(path: Path, count: int | None, address: str | None, host: str | None, secret_file: Path | None) -> None:
    """Add instances to a run that trains on this machine, or this machine's cores to one that trains on others."""
    run, secret = open_run(path), take_secret(secret_file, os.environ)
    here = _first_here(run.path)
    if here is not None and address is None and host is None:
        say(ask(here.board, "join", count or 1, "", run.recipe().launch.timeout))
        return
    where = whereabouts(run.path)
    recipe = _recipe(run, where)
    meeting = _meeting(run, where, address, secret)
    if nobody_listens(meeting, _LOOK_S):
        raise UserError(f"nobody listens at {meeting}: the training has ended, or waits for `podium resume`")
    threads = int(run.environment().get("threads_per_replica") or 1)
    count = count or max(1, len(usable_cores()) // threads)
    overrides = where.overrides if where is not None else ()
    words = ("resume", str(run.path), *overrides, *own_code.CHOICE.flags())
    topology = Topology(recipe.batch.num_replicas, 1, (host or socket.gethostname(),))
    command = (sys.executable, "-m", "podium", *words)
    plan = LaunchPlan(topology, 0, (meeting.address, meeting.port), command, is_visitor=True)
    agent.visit(plan, recipe.launch, meeting, run.path, count)


def leave(path: Path, count: int | None, host: str | None) -> None:
    """Take instances, or a host with all of its instances, away from a run that goes on without them."""
    run = open_run(path)
    launchers = launchers_here(run.path)
    first, own = _first_here(run.path), next((one for one in launchers if not one.keeps), None)
    timeout_s = run.recipe().launch.timeout
    if own is not None and (host == own.host or (host is None and first is None)):
        ask(own.board, "leave", -1 if count is None else count, "", timeout_s)
        many = "" if count is None else f"{count} instance{'' if count == 1 else 's'} of "
        say(f"the first host has been asked to let {many}{own.host} go")
    elif first is None:
        raise UserError(_not_here(run, own, host))
    elif count is None and host is None:
        raise UserError("give --host, a host that leaves with all of its instances, or --instances, how many leave")
    else:
        say(ask(first.board, "leave", -1 if count is None else count, host or "", timeout_s))


def _not_here(run: Run, own: Launcher | None, host: str | None) -> str:
    """Return why nobody here can be asked to let instances go."""
    where = whereabouts(run.path)
    if where is None:
        return _nowhere(run)
    if own is not None:
        return f"this machine is {own.host}, and cannot have {host} leave: ask there or on {where.host}, the first host"
    return f"no launcher of {run.path} is on this machine; its first host is {where.host}"


def _nowhere(run: Run) -> str:
    """Return why a run is not found that no launcher lists."""
    state = run.summary().get("state")
    if state == "done":
        return f"{run.path} is complete: no training is under way"
    if state == "running":
        return (
            f"{run.path} has not begun its updates, or trains in a single process, which nobody can come to; if it was "
            "killed, `podium resume` continues it"
        )
    return f"{run.path} does not train now: `podium resume` continues it"


def _first_here(run: Path) -> Launcher | None:
    return next((one for one in launchers_here(run) if one.keeps), None)


def _recipe(run: Run, where: Whereabouts | None) -> Recipe:
    """Return the recipe as it is trained: its launch may have changed some keys."""
    recipe = run.recipe()
    changed = dict(parse_override(text, type(recipe)) for text in (where.overrides if where is not None else ()))
    return recipe_with(recipe, changed) if changed else recipe


def _meeting(run: Run, where: Whereabouts | None, address: str | None, secret: bytes | None) -> Meeting:
    if address is None and where is None:
        raise UserError(_nowhere(run))
    text = address or (where.meeting if where is not None else "")
    if not text:
        assert where is not None
        raise UserError(
            f"{run.path} trains on {where.host} alone, if it still does, where nobody listens to others: start it "
            "there with its name, --hosts NAME --instances A..B"
        )
    name, colon, port = text.rpartition(":")
    if not (colon and name and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"--at {text}: expected an address and a port, such as 10.0.0.1:29400")
    try:
        socket.gethostbyname(name)
    except (OSError, UnicodeError):
        raise UserError(f"{name}, where the hosts of the run meet, cannot be resolved to an address") from None
    if secret is None and where is None:
        raise UserError("the run's folder does not name its hosts: give the secret with --secret-file or PODIUM_SECRET")
    if secret is None and where is not None:
        secret = users_secret(meeting_purpose(where.hosts, int(port)))
    assert secret is not None
    return Meeting(address=name, port=int(port), secret=secret)
