"""What there is to see of a run at one moment. `screen.py` shows it in a terminal, `web.py` in a browser.

Everything comes from plain files in the run folder, so it works wherever that can be read. Instances count their
writings: who has added none for a while is silent, whatever the clocks of the hosts say.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import UserError
from podium.monitor.tails import RecordTail, log_tail
from podium.runs.folder import Run
from podium.runs.live import InstanceState, read_instances
from podium.ui.visible import visible

#: shares of the time that are no difference between instances
_ALIKE = 0.05
_LOG_LINES = 200
#: how often the lock of the run is looked at, which a training that begins just then would find taken
_ASK_EVERY_S = 2.0


@dataclass(frozen=True)
class InstanceRow:
    """One instance: what it does, how fast it is, what it waits for."""

    index: int
    host: str
    doing: str
    update: int
    #: samples per second of its own, while it does not wait for others
    rate: float | None
    #: of the time: passes and optimiser, waiting for instances, waiting for input
    compute: float
    waits: float
    input_wait: float
    cpu_percent: float | None
    memory_bytes: float | None
    #: seconds since it wrote something, 0 while it writes as it should
    silent_s: float = 0.0


@dataclass(frozen=True)
class View:
    """What is shown."""

    name: str
    #: running, done, interrupted, failed, killed, silent, not started
    state: str
    #: what that means, where it needs words
    sentence: str
    update: int = 0
    total_updates: int = 0
    epoch: float | None = None
    samples_per_second: float | None = None
    left_s: float | None = None
    #: (update, value) by metric
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[InstanceRow] = ()
    #: who waits for whom
    waiting: str = ""
    #: figures of the hosts: measured ones, and why others are unknown
    figures: Sequence[tuple[str, Mapping[str, float], Mapping[str, str]]] = ()
    log: Sequence[str] = ()


class Watcher:
    """Looks at a run again and again."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._records = RecordTail(run.metrics_file)
        #: by instance: number of its last writing, and when it was first seen here
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        self._here = _host(run) in ("", socket.gethostname())
        self._killed, self._asked_at = False, float("-inf")

    def look(self) -> View:
        self._records.read()
        summary, states = _summary(self._run), read_instances(self._run)
        silent = {state.instance: self._silent_s(state) for state in states}
        state, sentence = self._state(summary, states, silent)
        lead = next((one for one in states if one.instance == 0), None)
        going = state == "running"
        last = self._records.last
        update = max(int(last.get("update", 0)), lead.update if lead and going else 0, int(summary.get("updates", 0)))
        total = lead.total_updates if lead else int(summary.get("total_updates", 0))
        rate = lead.samples_per_second if lead and going else last.get("train/samples_per_second")
        left = (total - update) * lead.global_batch / rate if lead and going and rate else None
        rows = [_row(one, silent[one.instance], going=going) for one in states]
        return View(
            visible(self._run.path.resolve().name),
            state,
            sentence,
            update,
            total,
            last.get("epoch"),
            rate or None,
            left,
            self._records.curves,
            last,
            rows,
            who_waits(rows) if going else "",
            [(one.host, one.values, one.unknown) for one in states if "cpu_percent" in one.values],
            log_tail(self._run.instance_log(0), _LOG_LINES),
        )

    def _silent_s(self, state: InstanceState) -> float:
        key, now = (state.pid, state.number), self._clock()
        if self._seen.get(state.instance, ((0, 0), 0.0))[0] != key:
            self._seen[state.instance] = key, now
        waited = now - self._seen[state.instance][1]
        return waited if waited > 4 * state.every_s + 2 and not state.ended else 0.0

    def _state(
        self, summary: Mapping[str, Any], states: Sequence[InstanceState], silent: Mapping[int, float]
    ) -> tuple[str, str]:
        written = str(summary.get("state", "not started"))
        if written != "running":
            return visible(written)[:20], ""
        if self._here:  # a lock of this host tells at once
            if self._is_killed(states):
                return "killed", f"nobody trains in this folder any more: `podium resume {self._run.path}` continues"
            return "running", ""
        if states and all(silent.values()):
            seconds = min(silent.values())
            return "silent", (
                f"no instance has written for {seconds:.0f} s: the run was killed, or its files do not reach this host"
            )
        return "running", ""

    def _is_killed(self, states: Sequence[InstanceState]) -> bool:
        """Return whether the lock is free; not looked at while instances write."""
        now = self._clock()
        fresh = [now - self._seen[one.instance][1] < one.every_s + 1 and not one.ended for one in states]
        if not self._killed and any(fresh) and self._asked_at >= 0:
            return False
        if now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            self._killed = self._run.state() == "killed"
        return self._killed


def who_waits(rows: Sequence[InstanceRow]) -> str:
    """Return in words who waits for whom, and who for input."""
    silent = [row for row in rows if row.silent_s]
    if silent:
        names = ", ".join(f"{row.index} (on {row.host})" for row in silent[:8])
        return f"silent for {max(row.silent_s for row in silent):.0f} s: instance {names}; all others wait for it"
    said = []
    if len(rows) > 1 and any(row.compute or row.waits for row in rows):
        slowest, most = min(rows, key=lambda row: row.waits), max(rows, key=lambda row: row.waits)
        if most.waits - slowest.waits > _ALIKE:
            waiting = f"instance {most.index} waits" if len(rows) == 2 else "the others wait"
            said.append(
                f"{waiting} for instance {slowest.index} (on {slowest.host}): {most.waits:.0%} of the time "
                f"in instance {most.index}, {slowest.waits:.0%} in instance {slowest.index}"
            )
        else:
            said.append(
                f"no instance holds the others up: each waits {slowest.waits:.0%} to {most.waits:.0%} of the time"
            )
    hungry = max(rows, key=lambda row: row.input_wait, default=None)
    if hungry is not None and hungry.input_wait > _ALIKE:
        said.append(f"instance {hungry.index} waits for its input {hungry.input_wait:.0%} of the time")
    return "; ".join(said)


def _row(state: InstanceState, silent_s: float, *, going: bool) -> InstanceRow:
    doing = "ended" if state.ended else "silent" if silent_s else state.phase.replace("_", " ") if going else "gone"
    return InstanceRow(
        state.instance,
        visible(state.host),
        visible(doing),
        state.update,
        state.own_samples_per_second,
        state.window.share("train"),
        state.window.share("communication"),
        state.window.share("input_wait"),
        state.values.get("process_cpu_percent"),
        state.values.get("process_memory_bytes"),
        silent_s,
    )


def _summary(run: Run) -> Mapping[str, Any]:
    try:
        return run.summary()
    except UserError:  # damaged, which is not for somebody who only looks
        return {}


def _host(run: Run) -> str:
    try:
        return str(run.environment().get("host", ""))
    except UserError:
        return ""
