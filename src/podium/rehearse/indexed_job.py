"""Carries out an indexed Job of Kubernetes as its controller would: a pod for each index, and the pod failure policy.

Written here, as the controller comes with a whole control plane. It starts pods by what it is given: processes of this
machine in a rehearsal.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

_POLL_S = 0.05


class Pod(Protocol):
    """Something that runs the command of a pod."""

    def exit_code(self) -> int | None:
        """Return how it ended, None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM to its first process."""
        ...

    def kill(self) -> None:
        """End all that runs in it, at once."""
        ...


@dataclass
class Attempt:
    """A pod of an index: there may be several, one after the other."""

    index: int
    number: int
    pod: Pod
    started: float
    #: whether it is to end for a reason of the cluster's: evicted, preempted, its node lost
    disrupted: bool = False
    #: when it is killed, if it has not ended by then
    deadline: float | None = None
    code: int | None = None


@dataclass
class IndexedJob:
    """A Job and its pods. `step` does what there is to do; call it again and again."""

    spec: Mapping[str, Any]
    start: Callable[[int, int], Pod]
    #: seconds before the pods of an index start again; Kubernetes waits ten, then doubles
    backoff_s: float = 10.0
    attempts: list[Attempt] = field(default_factory=list)
    state: Literal["running", "done", "failed", "deleted"] = "running"
    reason: str = ""
    message: str = ""
    failures: int = 0
    #: indexes that no pod is started for again
    given_up: set[int] = field(default_factory=set)
    _not_before: dict[int, float] = field(default_factory=dict)

    @property
    def active(self) -> list[Attempt]:
        """Pods that run."""
        return [one for one in self.attempts if one.code is None]

    @property
    def _ended(self) -> list[Attempt]:
        return [one for one in self.attempts if one.code]

    @property
    def succeeded(self) -> set[int]:
        """Indexes that are done."""
        return {one.index for one in self.attempts if one.code == 0}

    def step(self) -> None:
        """Take note of pods that have ended, and start those that are missing."""
        for one in self.active:
            if one.deadline is not None and time.monotonic() > one.deadline:
                one.pod.kill()
            one.code = one.pod.exit_code()
            if one.code:
                self._failed(one)
        if self.state != "running":
            self._end_all()
        elif len(self.succeeded) == self.spec["completions"]:
            self.state = "done"
        elif len(self.succeeded | self.given_up) == self.spec["completions"]:
            self.state, self.reason, self.message = "failed", "FailedIndexes", "Job has failed indexes"
        else:
            self._start_missing()

    def wait(self, until: Callable[[], bool] = lambda: False, timeout_s: float = 3600.0) -> None:
        """Go on until the job has ended, with all of its pods, or `until` says so."""
        deadline = time.monotonic() + timeout_s
        while (self.state == "running" or self.active) and not until():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def evict(self, index: int) -> None:
        """End the pod of an index as an eviction or a preemption does: it has its grace period to save."""
        for one in self.active:
            if one.index == index:
                one.disrupted = True
                self._terminate(one)

    def lose_node(self, index: int) -> None:
        """End the pod of an index as the loss of its node does: nobody gets a word in."""
        for one in self.active:
            if one.index == index:
                one.disrupted = True
                one.pod.kill()

    def delete(self) -> None:
        """End the job for good; its pods have their grace period."""
        self.state = "deleted" if self.state == "running" else self.state
        self._end_all()

    def _end_all(self) -> None:
        for one in self.active:
            if one.deadline is None:
                self._terminate(one)

    def _terminate(self, one: Attempt) -> None:
        one.deadline = time.monotonic() + self.spec["template"]["spec"]["terminationGracePeriodSeconds"]
        one.pod.terminate()

    def _failed(self, one: Attempt) -> None:
        action = self._action(one)
        if action == "FailJob" and self.state == "running":
            self.state, self.reason = "failed", "PodFailurePolicy"
            self.message = f"the pod of index {one.index} failed with exit code {one.code}"
        elif action == "FailIndex":
            self.given_up.add(one.index)
        elif action == "Count":
            self.failures += 1
            counted = sum(other.index == one.index and self._action(other) == "Count" for other in self._ended)
            if counted > self.spec.get("backoffLimitPerIndex", counted):
                self.given_up.add(one.index)
            if self.failures > self.spec["backoffLimit"] and self.state == "running":
                self.state, self.reason = "failed", "BackoffLimitExceeded"
                self.message = "the job has reached the limit of its backoff"
        self._not_before[one.index] = time.monotonic() + self.backoff_s

    def _action(self, one: Attempt) -> str:
        """Return what the first rule that fits says; Count where none does."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            fits = one.disrupted if codes is None else (one.code in codes["values"]) == (codes["operator"] == "In")
            if fits:
                return str(rule["action"])
        return "Count"

    def _start_missing(self) -> None:
        settled = {one.index for one in self.active} | self.succeeded | self.given_up
        for index in range(self.spec["completions"]):
            room = len(self.active) < self.spec["parallelism"]
            if room and index not in settled and time.monotonic() >= self._not_before.get(index, 0.0):
                number = sum(one.index == index for one in self.attempts)
                self.attempts.append(Attempt(index, number, self.start(index, number), time.monotonic()))
