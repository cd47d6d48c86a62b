"""What the objects of a cluster say about a job, in Podium's words. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from podium.submit.kubernetes.manifests import INTERRUPTED
from podium.submit.target import State

Tree = Mapping[str, Any]
#: by what carries the job: conditions that say that it has ended
_ENDS: dict[str, dict[str, State]] = {
    "job": {"Complete": "done", "SuccessCriteriaMet": "done", "Failed": "failed", "FailureTarget": "failed"},
    "jobset": {"Completed": "done", "Failed": "failed"},
    "trainjob": {"Complete": "done", "Failed": "failed"},
    "pytorchjob": {"Succeeded": "done", "Failed": "failed"},
}


def job_state(kind: str, job: Tree, pods: Sequence[Tree]) -> tuple[State, str]:
    """Return how a job is doing, and why."""
    if job["metadata"].get("deletionTimestamp"):
        return "cancelled", "its pods are saving"
    for condition in job.get("status", {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in _ENDS[kind]:
            state = _ENDS[kind][condition["type"]]
            return state, "" if state == "done" else _why(condition)
    if condition_is(job, "Suspended"):
        return "waiting", "it is suspended"
    if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
        return "running", _progress(job)
    return "waiting", next((reason for pod in reversed(pods) if (reason := _waits_for(pod))), "")


def condition_is(thing: Tree, kind: str) -> bool:
    """Return whether an object is in the condition called `kind`."""
    conditions = thing.get("status", {}).get("conditions") or []
    return any(one.get("type") == kind and one.get("status") == "True" for one in conditions)


def exit_code(pod: Tree) -> int | None:
    """Return the exit code of a pod's container, None while it runs or where it never did."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        ended = (status.get("state") or {}).get("terminated")
        if ended:
            return int(ended["exitCode"])
    return None


def times_started_again(pods: Sequence[Tree], count: int) -> int:
    """Return how often a job of `count` pods has started again, as far as its pods are still there."""
    ended = [pod for pod in pods if exit_code(pod) in (INTERRUPTED, 143) or condition_is(pod, "DisruptionTarget")]
    return -(-len(ended) // count)


def runs_done(job: Tree) -> str:
    """Return how many runs of a study have ended, of how many."""
    status, of = job.get("status", {}), job.get("spec", {}).get("completions", 0)
    failed = f", {num} failed" if (num := num_indexes(status.get("failedIndexes") or "")) else ""
    return f"{status.get('succeeded', 0)} of {of} runs done{failed}"


def num_indexes(text: str) -> int:
    """Return how many indexes a list such as 1,3-5 has."""
    spans = (part.partition("-") for part in text.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def pod_lines(pods: Sequence[Tree]) -> tuple[str, ...]:
    """Return a line for each pod: its name, node and state."""
    lines = []
    for pod in pods:
        status, code = pod.get("status", {}), exit_code(pod)
        words = [status.get("phase", "Pending").lower(), f"exit code {code}" if code is not None else _waits_for(pod)]
        words += ["evicted"] if condition_is(pod, "DisruptionTarget") else []
        where = pod.get("spec", {}).get("nodeName", "")
        lines.append(f"{pod['metadata']['name']}  {where}  {', '.join(word for word in words if word)}".rstrip())
    return tuple(lines)


def _why(condition: Tree) -> str:
    return ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))[:300]


def _waits_for(pod: Tree) -> str:
    """Return why a pod does not run yet, in the cluster's words."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating"):
            return _why(waiting)
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _why(condition)
    return ""


def _progress(job: Tree) -> str:
    """Return what a TrainJob's own status says about how far it is."""
    told = job.get("status", {}).get("trainerStatus") or {}
    percent, left_s = told.get("progressPercentage"), told.get("estimatedRemainingSeconds")
    words = [f"{percent} %"] if percent is not None else []
    words += [f"{left_s} s left"] if left_s is not None else []
    return ", ".join(words)
