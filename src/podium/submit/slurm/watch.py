"""What Slurm says about a job, in Podium's words."""

from collections.abc import Mapping, Sequence
from typing import Any

from podium.machine.bounded_files import parse_mapping
from podium.submit.shell import Shell
from podium.submit.target import State, Status

#: Slurm's state -> ours; what a run itself says decides between done, interrupted and failed once a job has ended
_STATES: dict[str, State] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "CONFIGURING": "waiting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "CANCELLED": "cancelled",
}
_OF_RUNS: dict[str, State] = {
    "done": "done",
    "interrupted": "interrupted",
    "failed": "failed",
    "running": "interrupted",
}


def job_states(shell: Shell, number: str) -> list[tuple[str, str, str]]:
    """Return state, reason and nodes of a job, or of each element of an array; nothing once Slurm has forgotten it."""
    said = shell.run(["squeue", "-h", "-t", "all", "-j", number, "-o", "%T|%r|%N"])
    lines = [line.split("|") for line in said.text.splitlines()]
    return [(line[0], line[1], line[2]) for line in lines if len(line) == 3]


def status_of(
    states: Sequence[tuple[str, str, str]], summary: Mapping[str, Any], attempts: bytes, *, cancelled: bool = False
) -> Status:
    """Return the status of a job from what Slurm says, its run's summary and the record of its attempts; `cancelled`:
    somebody did not want it to go on."""
    begun = [line for line in attempts.splitlines() if b'"nodes"' in line]
    updates, total = summary.get("updates"), summary.get("total_updates")
    state, reason, where = _state(states)
    if state is None:
        state = _OF_RUNS.get(str(summary.get("state")), "failed" if begun else "unknown")
        state = "cancelled" if cancelled and state in ("interrupted", "unknown") else state
        code = _last_code(attempts)
        reason = "" if code is None else f"exit code {code}"
    return Status(
        state,
        reason,
        where,
        updates if isinstance(updates, int) else None,
        total if isinstance(total, int) else None,
        max(0, len(begun) - 1),
    )


def status_of_study(states: Sequence[tuple[str, str, str]], runs: Sequence[str]) -> Status:
    """Return the status of an array from what Slurm says and the states of the study's runs."""
    state, reason, where = _state(states)
    if state is None:
        ended: State = "failed" if "failed" in runs else "interrupted"
        state = "done" if runs and set(runs) <= {"finished", "pruned"} else ended
    counts = tuple(f"{runs.count(one)} runs {one}" for one in dict.fromkeys(runs))
    return Status(state, reason, where, lines=counts)


def _state(states: Sequence[tuple[str, str, str]]) -> tuple[State | None, str, str]:
    known = [(_STATES[state], reason, where) for state, reason, where in states if state in _STATES]
    for wanted in ("running", "waiting", "cancelled"):
        for state, reason, where in known:
            if state == wanted:
                return state, "" if reason == "None" else reason, where
    return None, "", ""


def _last_code(attempts: bytes) -> int | None:
    for line in reversed(attempts.splitlines()):
        try:
            code = parse_mapping(line).get("code")
        except ValueError:
            continue
        if isinstance(code, int):
            return code
    return None
