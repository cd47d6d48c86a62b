"""Which instances leave a run when that is asked for, and why none may. Pure; used by `crew.py`."""

from collections.abc import Sequence

from podium.launch.plan import Limits
from podium.launch.roster import Roster


def seats_to_take(roster: Roster, seats: Sequence[int], limits: Limits, host: str, count: int) -> set[int] | None:
    """Return which of `seats` to take away, never that of the lead; None where the others could not go on.

    `host`: of which host, empty for any; `count`: below 0 for all of a host.
    """
    able = [seat for seat in reversed(seats[1:]) if host in ("", roster.host_of(seat))]
    if (count < 0 and host == roster.home) or (host and host not in roster.present()):
        return None
    taken = able if count < 0 else able[:count]
    fits = limits.can_train(len(seats) - len(taken)) and len(taken) <= limits.at_once
    return set(taken) if len(taken) >= count and fits else None


def why_needed(roster: Roster, seats: Sequence[int], limits: Limits, host: str, count: int) -> str:
    """Return why instances cannot be taken away."""
    known = roster.present()
    if host and host not in known:
        return f"{host} has no instances in this run, only {', '.join(known)}"
    num = sum(host in ("", roster.host_of(seat)) for seat in seats)
    if count > num:
        return f"{host or 'the run'} has only {num} {'instance' if num == 1 else 'instances'}"
    if limits.can_train(len(seats) - limits.at_once):
        return limits.too_many_leave()
    return (
        f"{roster.home} keeps the run and needs one instance, and {limits.fewest} must be left: "
        "`kill` of the launcher, or Ctrl-C, saves and stops the run"
    )
