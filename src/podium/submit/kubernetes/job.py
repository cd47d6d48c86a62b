"""A job in the words of Kubernetes: how many pods, their names in the name service, and the command in each. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.submit.kubernetes.section import Kind, KubernetesSection
from podium.submit.kubernetes.words import pod_name
from podium.submit.site import Site
from podium.topology import Topology, build_topology, possible_instances, resolve_threads

#: where pods find their recipe, and the folder with runs where the site names none
RECIPE_FOLDER, RUNS = "/etc/podium", "/runs"
RECIPE_FILE = f"{RECIPE_FOLDER}/recipe.yaml"
#: the only replicated job of a JobSet, by the name that Kubeflow's runtimes look for
NODE = "node"


@dataclass(frozen=True)
class Pods:
    """A job: its name, what carries it, and what every pod of it runs."""

    #: of all its objects
    name: str
    kind: Kind
    topology: Topology
    #: of the run, as pods see it
    folder: str
    command: tuple[str, ...]
    #: variables whose values come from the job's own Secret
    secret_variables: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.topology.hosts)

    @property
    def several(self) -> bool:
        return self.count > 1


def plan_pods(
    name: str,
    recipe: Recipe,
    site: Site,
    *,
    pods: int | None = None,
    per_pod: int | None = None,
    time_limit_s: float | None = None,
    addresses: Sequence[str] | None = None,
    recipe_file: str = RECIPE_FILE,
) -> Pods:
    """Return a job for a recipe; `pods` and `per_pod` are derived from the recipe and the site where None.

    `addresses`: those of the pods, where no name service knows their names.
    """
    section = site.kubernetes
    name = pod_name(name)
    count, each = _counts(recipe, site, pods, per_pod)
    hosts = tuple(addresses[:count]) if addresses else host_names(name, section.kind, count)
    topology = build_topology(
        recipe.batch.num_replicas, count * each, hosts, recipe.parallel.num_stages, recipe.parallel.stage_layers
    )
    folder = f"{section.runs.path if section.runs else RUNS}/{name}"
    if count > 1 and recipe.parallel.num_stages > 1 and section.runs is None:
        raise UserError("stages on several pods need a folder that the pods share: name one as kubernetes.runs")
    words = [*shlex.split(site.container.podium if site.container else site.podium or "podium"), "train", recipe_file]
    words += _thread_words(recipe, site, topology)
    words += [f"train.time_limit={time_limit_s:g}s"] if time_limit_s else []
    words += ["--out", folder, "--continue", "--instances", str(topology.num_instances)]
    words += ["--hosts", ",".join(hosts), "--join"] if count > 1 else []
    run_secret = ("PODIUM_SECRET",) if count > 1 else ()
    return Pods(name, section.kind, topology, folder, tuple(words), (*run_secret, *site.secrets))


def host_names(name: str, kind: Kind, count: int) -> tuple[str, ...]:
    """Return the names by which pods find each other, in the order of their indexes."""
    if kind == "pytorchjob":
        return (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(count - 1)))
    stem = name if kind == "job" else f"{name}-{NODE}-0"
    return tuple(f"{stem}-{index}.{name}" for index in range(count))


def _counts(recipe: Recipe, site: Site, pods: int | None, per_pod: int | None) -> tuple[int, int]:
    """Return how many pods, and how many instances in each: as many as replicas, devices and the site allow."""
    most = site.max_instances or recipe.batch.num_replicas * recipe.parallel.num_stages
    works = possible_instances(recipe.batch.num_replicas, recipe.parallel.num_stages)
    room = per_pod or site.kubernetes.instances_per_pod or site.node.devices or 1
    if per_pod is not None:
        return pods or 1, per_pod
    if pods is not None:
        can = [count // pods for count in works if count % pods == 0 and count // pods <= room]
        return pods, max(can, default=room)
    total = max((count for count in works if count <= most), default=works[0])
    while total > room and total % room:
        room -= 1
    return (1, total) if total <= room else (total // room, room)


def _thread_words(recipe: Recipe, site: Site, topology: Topology) -> list[str]:
    """Return what fixes the threads of a replica: in a pod, `auto` would count the cores of the whole node."""
    if recipe.engine.threads != "auto" or not site.node.cores:
        return []
    threads = resolve_threads("auto", site.node.cores, topology.num_replicas * topology.num_stages)
    return [f"engine.threads={threads}"]


def check_section(section: KubernetesSection, pods: Pods) -> None:
    """Raise UserError where a site does not say what a job needs."""
    if pods.several and section.runs is None:
        raise UserError(
            "several pods continue one run, which needs a folder that outlives them: name it as kubernetes.runs in the "
            "site, such as runs: {path: /runs, claim: my-runs}"
        )
