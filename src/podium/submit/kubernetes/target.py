"""Kubernetes as a target: manifests made here, handed to the API server, and watched there."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from podium.errors import UserError
from podium.launch.secret import VARIABLE, new_secret
from podium.runs.own_code import names_in
from podium.submit.kubernetes.cluster import Cluster
from podium.submit.kubernetes.job import RECIPE_FILE, Pods, check_section, plan_pods, plan_study
from podium.submit.kubernetes.manifests import API_VERSION, KIND, as_yaml, manifests
from podium.submit.kubernetes.pod import CONTAINER, labels, selector
from podium.submit.kubernetes.states import job_state, pod_lines, runs_done, times_started_again
from podium.submit.records import JobRecord, check_name, free_name, now
from podium.submit.studies import check_array, definition_elsewhere, num_runs
from podium.submit.target import Prepared, Request, Status
from podium.workloads.registry import is_own_file

Tree = dict[str, Any]
MANIFESTS = "manifests.yaml"


class KubernetesTarget:
    """Jobs of Kubernetes."""

    def prepare(self, request: Request) -> Prepared:
        """Return the manifests; nothing is sent anywhere."""
        pods, objects = _planned(request)
        held = " and ".join(pods.secret_variables)
        notes = [f"the Secret {pods.name} with {held} is made when the job is submitted, and written nowhere"]
        return Prepared(
            pods.name,
            PurePosixPath(pods.folder),
            {MANIFESTS: as_yaml(objects)},
            (("kubectl", "apply", "-f", MANIFESTS),),
            tuple(notes if held else []),
        )

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Create the job and what belongs to it, or nothing."""
        pods, objects = _planned(request, prepared.name)
        section = request.site.kubernetes
        secret = _secret(pods, request)
        cluster = Cluster(section.context, section.namespace)
        create_all(cluster, [*objects, *secret])
        return JobRecord(
            name=prepared.name,
            target="kubernetes",
            kind=request.kind,
            id=pods.name,
            folder=pods.folder,
            site=request.site.tree(),
            submitted=now(),
            words=[request.what, *request.words],
            facts={"kind": pods.kind, "namespace": cluster.namespace, "pods": str(pods.count)},
        )

    def status(self, job: JobRecord) -> Status:
        """Return how a job is doing, with a line for each of its newest pods."""
        cluster, kind = _cluster_of(job), job.facts["kind"]
        found = cluster.get(API_VERSION[kind], KIND[kind], job.id)
        if found is None:
            return Status("unknown", "it is no longer there: cancelled, or removed some time after its end")
        pods = cluster.pods(selector(job.id))
        state, reason = job_state(kind, found, pods)
        again = times_started_again(pods, 1 if job.kind == "study" else int(job.facts["pods"]))
        if job.kind == "study":
            reason = "; ".join(filter(None, (runs_done(found), reason)))
        return Status(state, reason, f"{cluster.namespace}/{job.id}", requeues=again, lines=pod_lines(pods))

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield what the first pod prints, as it speaks for all, and of a study what all print; `follow`: also that of
        pods which come later."""
        cluster, kind = _cluster_of(job), job.facts["kind"]
        yield from _logs(cluster, job, CONTAINER[kind], follow=follow)

    def cancel(self, job: JobRecord) -> None:
        """Delete the job: its pods save and end, and its run stays where runs are kept."""
        cluster, kind = _cluster_of(job), job.facts["kind"]
        cluster.delete(API_VERSION[kind], KIND[kind], job.id)
        if kind == "trainjob":
            cluster.delete(API_VERSION[kind], "TrainingRuntime", job.id)


def create_all(cluster: Cluster, objects: list[Tree]) -> None:
    """Create a job and what belongs to it, or nothing. All of it is removed together with the job."""
    made: list[Tree] = []
    carrier, *others = objects
    runtimes = [one for one in others if one["kind"] == "TrainingRuntime"]  # a TrainJob is refused without its own
    try:
        for runtime in runtimes:
            made.append(cluster.create(runtime))
        owner = cluster.create(carrier)
        made.append(owner)
        for runtime in runtimes:
            owned = cluster.own(runtime, owner)["metadata"]["ownerReferences"]
            changes = {"metadata": {"ownerReferences": owned}}
            cluster.change(runtime["apiVersion"], runtime["kind"], runtime["metadata"]["name"], changes)
        for one in others:
            if one not in runtimes:
                made.append(cluster.create(cluster.own(one, owner)))
    except BaseException:
        for one in reversed(made):
            cluster.delete(one["apiVersion"], one["kind"], one["metadata"]["name"])
        raise


def _planned(request: Request, name: str | None = None) -> tuple[Pods, list[Tree]]:
    site, wishes = request.site, request.wishes
    if wishes.requeues is not None:
        section = site.kubernetes.model_copy(update={"requeues": wishes.requeues})
        site = site.model_copy(update={"kubernetes": section})
    if site.container is None:
        raise UserError("Kubernetes needs an image: name it as container.image in the site")
    ignored = [key for key in ("modules", "scratch") if getattr(site, key)]
    if ignored:
        raise UserError(
            f"{ignored[0]} in the site means nothing to pods: put what they need into the image, and folders into "
            "kubernetes.data"
        )
    own = [one for one in names_in(request.recipe.tree()) if is_own_file(one)]
    if own:
        raise UserError(
            f"{own[0]} is a file of this machine: put it into the image and name it as package.module:Class, which "
            "pods can import"
        )
    if name is None:
        name = check_name(PurePosixPath(wishes.out).name) if wishes.out else free_name(request.what, set())
    if request.kind == "study":
        check_array(request)
        study, base = definition_elsewhere(request, PurePosixPath(RECIPE_FILE).name)
        pods = plan_study(name, base, site, wishes, num_runs(request))
        check_section(site.kubernetes, pods)
        return pods, manifests(pods, site, base.tree(), base.launch.port, study)
    pods = plan_pods(name, request.recipe, site, wishes)
    check_section(site.kubernetes, pods)
    return pods, manifests(pods, site, request.recipe.tree(), request.recipe.launch.port)


def _secret(pods: Pods, request: Request) -> list[Tree]:
    """Return the Secret of a job: that of its hosts, and those that the site takes from the user's environment."""
    values = {VARIABLE: new_secret().decode()} if pods.several else {}
    values |= _values(request.site.secrets, os.environ)
    if not values:
        return []
    metadata = {"name": pods.name, "labels": labels(pods, request.site.kubernetes)}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": values}]


def _values(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UserError(f"the site's secrets name {missing[0]}, which is not set in your environment")
    return {name: env[name] for name in names}


def _cluster_of(job: JobRecord) -> Cluster:
    context = job.site.get("kubernetes", {}).get("context")
    return Cluster(context, job.facts.get("namespace"))


def _logs(cluster: Cluster, job: JobRecord, container: str, *, follow: bool) -> Iterator[bytes]:
    from podium.submit.kubernetes.following import first_pods, is_over, wait_a_moment

    told: set[str] = set()
    while True:
        pods = cluster.pods(selector(job.id))
        speaking = pods if job.kind == "study" else first_pods(pods)
        new = [pod for pod in speaking if pod["metadata"]["uid"] not in told]
        for pod in new:
            if pod.get("status", {}).get("phase") in (None, "Pending"):
                continue
            yield from cluster.log(pod["metadata"]["name"], container, follow=follow)
            told.add(pod["metadata"]["uid"])
        if not follow or is_over(cluster, job):
            return
        wait_a_moment()
