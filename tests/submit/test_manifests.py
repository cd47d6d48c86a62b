"""What is handed to Kubernetes: valid by the published schemas, with least rights, and with no secret in it."""

import os
import stat
import subprocess
from pathlib import Path

import kubeflow.training.models as training_models
import kubeflow_trainer_api.models as trainer_models
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.submit.kubernetes.job import host_names, plan_pods
from podium.submit.kubernetes.manifests import KIND, as_yaml, manifests
from podium.submit.kubernetes.target import KubernetesTarget
from podium.submit.kubernetes.words import pod_name
from podium.submit.site import site_from_tree
from podium.submit.target import Request, Wishes

RECIPE = load_recipe("mnist", ["batch.replicas=4"])
PORT = RECIPE.launch.port
KINDS = sorted(KIND)
SITE = {
    "node": {"devices": 2, "cores": 8},
    "container": {"runtime": "docker", "image": "podium:1"},
    "secrets": ["WANDB_API_KEY"],
    "environment": {"HOSTILE": "$(id) `id` '\"; id"},
    "kubernetes": {
        "namespace": "training",
        "runs": {"path": "/runs", "claim": "runs", "folder": "/mine"},
        "data": [
            {"path": "/data", "nfs": "server", "folder": "/export", "read_only": True},
            {"path": "/scratch", "folder": "/mnt/scratch"},
        ],
        "tolerations": [{"key": "example.com/gpu", "effect": "NoSchedule"}, {"key": "team", "value": "a"}],
        "node_selector": {"example.com/card": "a100"},
        "labels": {"kueue.x-k8s.io/queue-name": "queue"},
        "secrets": {"TRACKIO_TOKEN": "trackio/token"},
        "pull_secrets": ["registry"],
        "priority_class": "batch",
        "service_account": "podium",
    },
}
#: typed models of the operators' published OpenAPI schemas, by kind
MODELS = {
    "JobSet": trainer_models.JobsetV1alpha2JobSet,
    "TrainJob": trainer_models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": trainer_models.TrainerV1alpha1TrainingRuntime,
}
VERSIONS = ("1.31", "1.34", "1.37")


def objects_of(kind: str, **changed: object) -> list[dict]:
    site = site_from_tree({**SITE, "kubernetes": {**SITE["kubernetes"], "kind": kind, **changed}})
    return manifests(plan_pods("Neuron_quick-001", RECIPE, site, Wishes(nodes=(2, 2))), site, RECIPE.tree(), PORT)


def pod_specs(thing: object) -> list[dict]:
    """Every specification of a pod in a tree."""
    if isinstance(thing, list):
        return [spec for one in thing for spec in pod_specs(one)]
    if not isinstance(thing, dict):
        return []
    if "containers" in thing:
        return [thing]
    return [spec for one in thing.values() for spec in pod_specs(one)]


def known_keys(model: type, tree: dict) -> None:
    """This client leaves pods untyped, so it is asked level by level."""
    assert set(tree) <= set(model.attribute_map.values())


def check(manifest: dict) -> None:
    """By the published schema of its kind, which knows every key that there is."""
    kind = manifest["kind"]
    if kind in MODELS:
        assert MODELS[kind].from_dict(manifest).to_dict() == manifest
    elif kind == "PyTorchJob":
        spec = manifest["spec"]
        known_keys(training_models.KubeflowOrgV1PyTorchJobSpec, spec)
        known_keys(training_models.KubeflowOrgV1RunPolicy, spec["runPolicy"])
        for one in spec["pytorchReplicaSpecs"].values():
            known_keys(training_models.KubeflowOrgV1ReplicaSpec, one)
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
    for spec in pod_specs(manifest):  # the operators' schemas leave pods to Kubernetes
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_is_valid_by_its_published_schema(kind):
    objects = objects_of(kind)
    assert objects[0]["kind"] == KIND[kind]
    for manifest in objects:
        check(manifest)
        broken = {**manifest, "spec" if "spec" in manifest else "data": {"no-such-key": []}}
        with pytest.raises(Exception):  # noqa: B017 (each validator has its own)
            check(broken)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_the_least_rights_and_write_only_where_they_must(kind):
    (spec, *more) = pod_specs(objects_of(kind))
    assert all(other == spec for other in more)
    (container,) = spec["containers"]
    assert spec["securityContext"] | {"runAsNonRoot": True, "runAsUser": 10001} == spec["securityContext"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostIPC", "hostNetwork", "hostPID"} & set(spec)
    assert container["resources"]["limits"] == {"memory": "16Gi", "cpu": "8", "nvidia.com/gpu": "2"}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes[mounted["/tmp"]]["emptyDir"] == {"sizeLimit": "20Gi"}
    assert volumes[mounted["/runs"]]["persistentVolumeClaim"]["claimName"] == "runs"
    assert {mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")} == {
        "/etc/podium", "/data",
    }  # fmt: skip


def test_the_nodes_memory_is_shared_and_kept_only_when_asked():
    (spec,) = pod_specs(objects_of("job", host_ipc=True, ipc_lock=True))
    assert spec["hostIPC"] is True
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_only_interruptions_and_evictions_start_a_pod_again(kind):
    def failure_policies(thing):
        if isinstance(thing, list):
            return [found for one in thing for found in failure_policies(one)]
        if not isinstance(thing, dict):
            return []
        own = [thing] if "podFailurePolicy" in thing else []
        return own + [found for one in thing.values() for found in failure_policies(one)]

    (spec,) = failure_policies(objects_of(kind, requeues=7))
    evicted, failed = spec["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (failed["action"], failed["onExitCodes"]["operator"], failed["onExitCodes"]["values"]) == (
        "FailJob", "NotIn", [75])  # fmt: skip
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 7 * 2
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_blocks_with_the_recipe_in_lines_of_its_own(kind):
    text = as_yaml(objects_of(kind))
    assert "[{" not in text
    assert "  recipe.yaml: |\n" in text
    assert list(YAML(typ="safe").load_all(text)) == objects_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_is_in_no_manifest_but_by_reference(kind, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-not-to-be-seen")
    text = as_yaml(objects_of(kind))
    assert "not-to-be-seen" not in text
    assert "kind: Secret\n" not in text
    (spec, *_) = pod_specs(objects_of(kind))
    references = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in spec["containers"][0]["env"]
                  if "valueFrom" in one}  # fmt: skip
    assert references == {
        "PODIUM_SECRET": {"name": "neuron-quick-001", "key": "PODIUM_SECRET"},
        "WANDB_API_KEY": {"name": "neuron-quick-001", "key": "WANDB_API_KEY"},
        "TRACKIO_TOKEN": {"name": "trackio", "key": "token"},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_are_named_as_the_name_service_has_them(kind):
    (spec, *_) = pod_specs(objects_of(kind))
    words = spec["containers"][0]["command"]
    assert words[words.index("--hosts") + 1] == ",".join(host_names("neuron-quick-001", kind, 2))
    assert host_names("a", "job", 2) == ("a-0.a", "a-1.a")
    assert host_names("a", "trainjob", 2) == ("a-node-0-0.a", "a-node-0-1.a")
    assert host_names("a", "pytorchjob", 2) == ("a-master-0", "a-worker-0")
    assert "engine.threads=4" in words  # 8 cores for 2 instances: in a pod, `auto` would count those of the whole node


@pytest.mark.parametrize(
    "text", ["a;id", "$(id)", "`id`", "a\nb", "-o", "../../etc", "A B", "é" * 90, "", "0", "x" * 300]
)
def test_any_name_becomes_one_that_kubernetes_and_its_name_service_take(text):
    import re

    name = pod_name(text)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-99999") <= 63


def test_long_names_that_begin_alike_stay_different():
    assert pod_name("x" * 80 + "-001") != pod_name("x" * 80 + "-002")


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"namespace": "a;id"}, "a name of Kubernetes"),
        ({"memory": "lots"}, "an amount of memory"),
        ({"labels": {"a b": "c"}}, "a key of Kubernetes"),
        ({"runs": {"path": "runs", "claim": "a"}}, "from / on"),
        ({"runs": {"path": "/a:b", "claim": "a"}}, "without a colon"),
        ({"runs": {"path": "/runs"}}, "a volume needs claim, or folder"),
        ({"runs": {"path": "/runs", "nfs": "-oProxyCommand=id", "folder": "/a"}}, "a host name"),
        ({"secrets": {"TOKEN": "value"}}, "wandb/api-key"),
        ({"user": 0}, "kubernetes.user"),
    ],
)
def test_a_site_that_cannot_be_meant_is_one_sentence(changed, part):
    with pytest.raises(UserError, match="kubernetes") as told:
        objects_of("job", **changed)
    assert part in str(told.value)


@pytest.mark.parametrize("key", [{"modules": ["cuda/12"]}, {"scratch": {"cache": "/scratch"}}])
def test_what_pods_cannot_use_of_a_site_is_told(key):
    request = Request("run", "mnist", (), RECIPE, site_from_tree({**SITE, **key}), Wishes())
    with pytest.raises(UserError, match=f"^{next(iter(key))} in the site means nothing to pods"):
        KubernetesTarget().prepare(request)


def test_one_pod_needs_no_names_and_no_secret_of_hosts():
    site = site_from_tree({**SITE, "node": {"devices": 4}})
    objects = manifests(plan_pods("one", RECIPE, site, Wishes()), site, RECIPE.tree(), PORT)
    assert [one["kind"] for one in objects] == ["Job", "ConfigMap"]
    words = pod_specs(objects)[0]["containers"][0]["command"]
    assert "--hosts" not in words
    assert words[words.index("--instances") + 1] == "4"


@pytest.mark.parametrize(("code", "ends_with"), [(75, 143), (0, 0), (2, 2), (3, 3)])
def test_the_shell_of_a_pytorchjob_hands_signals_on_and_has_the_operator_start_again_after_75(
    tmp_path, code, ends_with
):
    """The operator takes codes below 128 for permanent failures."""
    (spec, *_) = pod_specs(objects_of("pytorchjob"))
    words = spec["containers"][0]["command"][:4]
    program = tmp_path / "podium"
    program.write_text(
        "#!/bin/sh\n"
        f"trap 'echo saved; exit {code}' TERM\n"
        'echo "$PODIUM_HOST_INDEX ${RANK-none} ${WORLD_SIZE-none} $1"\n'
        "while :; do sleep 0.01; done\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "4"}
    process = subprocess.Popen([*words, str(program), "$(id) 'x"], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "3 none none $(id) 'x\n"
    process.terminate()
    assert process.stdout.read() == "saved\n"
    assert process.wait() == ends_with


def test_the_shell_of_a_pytorchjob_passes_shellcheck():
    (spec, *_) = pod_specs(objects_of("pytorchjob"))
    script = "#!/bin/sh\n" + spec["containers"][0]["command"][2]
    checker = Path(os.sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
