"""The pod of a training: least rights, a root that cannot be written, and what it needs of the node. Pure."""

import math
from typing import Any

from podium.submit.kubernetes.job import RECIPE_FOLDER, RUNS, Pods
from podium.submit.kubernetes.section import KubernetesSection, VolumeSection
from podium.submit.site import Site

Tree = dict[str, Any]
#: name of the container that trains, as Kubeflow's operators expect it
CONTAINER = {"job": "podium", "jobset": "podium", "trainjob": "node", "pytorchjob": "pytorch"}
#: Kubeflow's PyTorchJob takes codes below 128 for permanent failures; this one, of SIGTERM, for a reason to start again
_RESTART_CODE = 143
#: what a PyTorchJob's pods run: it numbers them by RANK, which Podium would take for that of an instance, and starts
#: again what ends with 128 or more. A shell waits for its child again after each signal that it has handed on.
_PYTORCHJOB = f"""\
export PODIUM_HOST_INDEX="${{RANK:-0}}"
unset RANK WORLD_SIZE
child="" heard=""
trap 'heard=yes; [ -z "$child" ] || kill -TERM "$child"' TERM
"$@" &
child=$!
[ -z "$heard" ] || kill -TERM "$child"
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
done
if [ "$code" = 75 ]; then exit {_RESTART_CODE}; fi
exit "$code"
"""


def pod_template(pods: Pods, site: Site) -> Tree:
    """Return the template of a job's pods."""
    section = site.kubernetes
    return {"metadata": {"labels": labels(pods, section)}, "spec": _pod_spec(pods, site)}


def labels(pods: Pods, section: KubernetesSection) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return {**section.labels, **selector(pods.name), "app.kubernetes.io/managed-by": "podium"}


def selector(name: str) -> dict[str, str]:
    """Return the labels by which the objects of a job are found."""
    return {"app.kubernetes.io/name": "podium", "app.kubernetes.io/instance": name}


def _pod_spec(pods: Pods, site: Site) -> Tree:
    section = site.kubernetes
    spec: Tree = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(section.grace),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": section.user,
            "runAsGroup": section.group,
            "fsGroup": section.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pods, site)],
        "volumes": _volumes(pods, section),
    }
    if section.host_ipc:
        spec["hostIPC"] = True
    if section.node_selector:
        spec["nodeSelector"] = dict(section.node_selector)
    if section.tolerations:
        spec["tolerations"] = [
            {"operator": "Exists" if one.value is None else "Equal", **one.model_dump(exclude_none=True)}
            for one in section.tolerations
        ]
    if section.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in section.pull_secrets]
    for key, value in {
        "priorityClassName": section.priority_class,
        "runtimeClassName": section.runtime_class,
        "serviceAccountName": section.service_account,
    }.items():
        if value is not None:
            spec[key] = value
    return spec


def _container(pods: Pods, site: Site) -> Tree:
    section = site.kubernetes
    assert site.container is not None, "the target checks that there is an image"
    command = list(pods.command)
    if pods.kind == "pytorchjob":
        command = ["/bin/sh", "-c", _PYTORCHJOB, "podium", *command]
    added = {"add": ["IPC_LOCK"]} if section.ipc_lock else {}
    return {
        "name": CONTAINER[pods.kind],
        "image": site.container.image,
        **({"imagePullPolicy": section.pull_policy} if section.pull_policy else {}),
        "command": command,
        "env": _environment(pods, site),
        "resources": _resources(pods, site),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **added},
        },
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            {"name": "temporary", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *_mounts(section),
        ],
    }


def _environment(pods: Pods, site: Site) -> list[Tree]:
    plain = {"HOME": "/tmp", "USER": "podium", "PYTHONUNBUFFERED": "1", **site.environment}
    found = [{"name": name, "value": value} for name, value in plain.items()]
    found += [_from_secret(name, pods.name, name) for name in pods.secret_variables]
    return found + [_from_secret(name, *text.split("/")) for name, text in site.kubernetes.secrets.items()]


def _from_secret(name: str, secret: str, key: str) -> Tree:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _resources(pods: Pods, site: Site) -> Tree:
    """Return the same as request and limit: such pods are evicted last, and may have cores of their own."""
    amounts: dict[str, str] = {"memory": site.kubernetes.memory}
    if site.node.cores:
        amounts["cpu"] = str(site.node.cores)
    if pods.devices:
        amounts[site.kubernetes.device] = str(pods.devices)
    return {"requests": dict(amounts), "limits": amounts}


def _volumes(pods: Pods, section: KubernetesSection) -> list[Tree]:
    return [
        {"name": "recipe", "configMap": {"name": pods.name}},
        {"name": "temporary", "emptyDir": {"sizeLimit": section.temporary}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": section.shared_memory}},
        {"name": "runs", **(_source(section.runs) if section.runs else {"emptyDir": {}})},
        *({"name": f"data-{index}", **_source(volume)} for index, volume in enumerate(section.data)),
    ]


def _source(volume: VolumeSection) -> Tree:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only}}
    assert volume.folder is not None
    if volume.nfs is not None:
        return {"nfs": {"server": volume.nfs, "path": volume.folder, "readOnly": volume.read_only}}
    return {"hostPath": {"path": volume.folder, "type": "Directory"}}


def _mounts(section: KubernetesSection) -> list[Tree]:
    runs = section.runs or VolumeSection(path=RUNS, folder="/")
    named = [("runs", runs), *((f"data-{index}", volume) for index, volume in enumerate(section.data))]
    return [
        {
            "name": name,
            "mountPath": volume.path,
            **({"readOnly": True} if volume.read_only else {}),
            **({"subPath": volume.folder.strip("/")} if volume.claim and volume.folder else {}),
        }
        for name, volume in named
    ]
