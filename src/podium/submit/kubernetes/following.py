"""Follows a job from pod to pod: those that take the place of interrupted ones continue its log."""

import time
from collections.abc import Sequence
from typing import Any

from podium.submit.kubernetes.cluster import Cluster
from podium.submit.kubernetes.manifests import API_VERSION, KIND
from podium.submit.kubernetes.states import job_state
from podium.submit.records import JobRecord

_LOOK_S = 1.0
_INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICA = "training.kubeflow.org/replica-type"


def first_pods(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those pods that had or have the first place, the oldest first: they speak for all."""
    return [pod for pod in pods if _is_first(pod["metadata"])]


def _is_first(metadata: dict[str, Any]) -> bool:
    if _REPLICA in (metadata.get("labels") or {}):
        return str(metadata["labels"][_REPLICA]).lower() == "master"
    return str((metadata.get("annotations") or {}).get(_INDEX, "0")) == "0"


def is_over(cluster: Cluster, job: JobRecord) -> bool:
    """Return whether a job has ended, or is gone."""
    kind = job.facts["kind"]
    found = cluster.get(API_VERSION[kind], KIND[kind], job.id)
    return found is None or job_state(kind, found, [])[0] in ("done", "failed", "cancelled")


def wait_a_moment() -> None:
    """Wait until it is time to look again."""
    time.sleep(_LOOK_S)
