"""All objects of a job: Job, JobSet, TrainJob or PyTorchJob, and what belongs to it. Pure.

The job's Secret is not among them: its values are written nowhere, `apply.py` makes it when a job is submitted.
"""

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from podium.recipe.loading import to_yaml
from podium.submit.kubernetes.job import NODE, Pods
from podium.submit.kubernetes.pod import CONTAINER, Tree, labels, pod_template, selector
from podium.submit.kubernetes.section import KubernetesSection
from podium.submit.site import Site

#: the exit code that says that a training was interrupted and can go on
INTERRUPTED = 75
API_VERSION = {
    "job": "batch/v1",
    "jobset": "jobset.x-k8s.io/v1alpha2",
    "trainjob": "trainer.kubeflow.org/v1alpha1",
    "pytorchjob": "kubeflow.org/v1",
}
KIND = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob", "pytorchjob": "PyTorchJob"}


class _Readable(SafeRepresenter):
    """Texts of several lines as they are."""


_Readable.add_representer(
    str,
    lambda out, text: out.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def as_yaml(objects: Sequence[Tree]) -> str:
    """Return manifests as one file, which `kubectl apply -f` takes as well."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Readable
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    out = io.StringIO()
    yaml.dump_all(objects, out)
    return out.getvalue()


def manifests(
    pods: Pods, site: Site, recipe: dict[str, Any], port: int, study: dict[str, Any] | None = None
) -> list[Tree]:
    """Return the job first, then what it needs; `port`: where hosts meet; `study`: the definition, if it is one."""
    section = site.kubernetes
    objects = {"job": _job, "jobset": _jobset, "trainjob": _trainjob, "pytorchjob": _pytorchjob}[pods.kind](pods, site)
    files = {"recipe.yaml": to_yaml(recipe), **({"study.yaml": to_yaml(study)} if study else {})}
    objects.append(_object("v1", "ConfigMap", pods, section, data=files))
    if pods.several and pods.kind == "job":
        objects.append(_service(pods, section, port))
    if pods.several and section.network_policy:
        objects.append(_network_policy(pods, section))
    return objects


def _object(version: str, kind: str, pods: Pods, section: KubernetesSection, **more: Any) -> Tree:
    namespace = {"namespace": section.namespace} if section.namespace else {}
    metadata = {"name": pods.name, **namespace, "labels": labels(pods, section)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def _carrier(pods: Pods, section: KubernetesSection, spec: Tree) -> Tree:
    return _object(API_VERSION[pods.kind], KIND[pods.kind], pods, section, spec=spec)


def _job_spec(pods: Pods, site: Site) -> Tree:
    """Return an indexed Job. Pods start again after 75, a limited number of times, and after evictions; after any
    other failure the job has failed."""
    section = site.kubernetes
    # A run of a study that fails leaves the others alone.
    failed = "FailIndex" if pods.num_runs else "FailJob"
    limits = {"backoffLimitPerIndex": section.requeues} if pods.num_runs else {}
    # An interruption ends all pods of a training, and each of them counts.
    limits["backoffLimit"] = section.requeues * pods.count
    return {
        "completionMode": "Indexed",
        "completions": pods.count,
        "parallelism": pods.at_once or pods.count,
        **limits,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": failed,
                    "onExitCodes": {
                        "containerName": CONTAINER[pods.kind],
                        "operator": "NotIn",
                        "values": [INTERRUPTED],
                    },
                },
            ]
        },
        "template": pod_template(pods, site),
    }


def _job(pods: Pods, site: Site) -> list[Tree]:
    spec = _job_spec(pods, site) | {"ttlSecondsAfterFinished": math.ceil(site.kubernetes.keep)}
    if pods.several:
        spec["template"]["spec"]["subdomain"] = pods.name
    return [_carrier(pods, site.kubernetes, spec)]


def _jobset_spec(pods: Pods, site: Site) -> Tree:
    """Return a set of one indexed Job, which starts its pods again itself: a set that restarts would begin anew."""
    return {
        "ttlSecondsAfterFinished": math.ceil(site.kubernetes.keep),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {"metadata": {"labels": labels(pods, site.kubernetes)}, "spec": _job_spec(pods, site)},
            }
        ],
    }


def _jobset(pods: Pods, site: Site) -> list[Tree]:
    return [_carrier(pods, site.kubernetes, _jobset_spec(pods, site))]


def _trainjob(pods: Pods, site: Site) -> list[Tree]:
    """Return a TrainJob and a runtime of its own, as those of the cluster know neither this pod nor these rules.

    The runtime names no framework: Podium starts its instances itself.
    """
    section = site.kubernetes
    template = _jobset_spec(pods, site)
    # The Kubeflow trainer looks for the step that trains by this label.
    template["replicatedJobs"][0]["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = (
        "trainer"
    )
    spec = {"mlPolicy": {"numNodes": pods.count}, "template": {"spec": template}}
    container = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    train = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": pods.name},
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "numNodes": pods.count,
            "resourcesPerNode": container["resources"],
        },
    }
    runtime = _object(API_VERSION["trainjob"], "TrainingRuntime", pods, section, spec=spec)
    return [_carrier(pods, section, train), runtime]


def _pytorchjob(pods: Pods, site: Site) -> list[Tree]:
    section = site.kubernetes
    template = pod_template(pods, site)
    del template["spec"]["restartPolicy"]  # the operator sets it
    each = {"restartPolicy": "ExitCode", "template": template}
    replicas: Tree = {"Master": {"replicas": 1, **each}}
    if pods.several:
        replicas["Worker"] = {"replicas": pods.count - 1, **copy.deepcopy(each)}
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": section.requeues * pods.count,
        "ttlSecondsAfterFinished": math.ceil(section.keep),
    }
    return [_carrier(pods, section, {"runPolicy": policy, "pytorchReplicaSpecs": replicas})]


def _service(pods: Pods, section: KubernetesSection, port: int) -> Tree:
    """Return the headless service that gives pods their names; also while they are not ready, as they meet early."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(pods.name),
        "ports": [{"name": "meeting", "port": port}],
    }
    return _object("v1", "Service", pods, section, spec=spec)


def _network_policy(pods: Pods, section: KubernetesSection) -> Tree:
    def own() -> Tree:
        return {"podSelector": {"matchLabels": selector(pods.name)}}

    spec = {**own(), "policyTypes": ["Ingress"], "ingress": [{"from": [own()]}]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", pods, section, spec=spec)
