"""A job in the words of Kubernetes: how many pods, their names in the name service, and the command in each. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.submit.kubernetes.section import Kind, KubernetesSection
from podium.submit.kubernetes.words import pod_name
from podium.submit.site import Site
from podium.submit.slurm.shape import find_shape
from podium.submit.target import Wishes
from podium.topology import Topology, build_topology

#: where pods find their recipe, and the folder with runs where the site names none
RECIPE_FOLDER, RUNS = "/etc/podium", "/runs"
RECIPE_FILE, STUDY_FILE = f"{RECIPE_FOLDER}/recipe.yaml", f"{RECIPE_FOLDER}/study.yaml"
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
    #: of one pod
    devices: int = 0
    #: runs of a study, each in a pod of its own, and how many of them at the same time; 0: one training
    num_runs: int = 0
    at_once: int = 0

    @property
    def count(self) -> int:
        return self.num_runs or len(self.topology.hosts)

    @property
    def several(self) -> bool:
        """Whether pods train together."""
        return self.count > 1 and not self.num_runs


def plan_pods(
    name: str,
    recipe: Recipe,
    site: Site,
    wishes: Wishes,
    *,
    addresses: Sequence[str] | None = None,
    recipe_file: str = RECIPE_FILE,
) -> Pods:
    """Return a job for a recipe, of the shape that it would have on nodes of any other scheduler.

    `addresses`: those of the pods, where no name service knows their names.
    """
    section = site.kubernetes
    name = pod_name(name)
    shape = find_shape(recipe, site, wishes)
    count, each = shape.nodes[1], shape.per_node
    hosts = tuple(addresses[:count]) if addresses else host_names(name, section.kind, count)
    topology = build_topology(
        recipe.batch.num_replicas,
        count * each,
        hosts,
        recipe.parallel.num_stages,
        recipe.parallel.stage_layers,
        blocks=recipe.blocks,
    )
    folder = f"{section.runs.path if section.runs else RUNS}/{name}"
    words = [*shlex.split(site.container.podium if site.container else site.podium or "podium"), "train", recipe_file]
    if recipe.engine.threads == "auto":  # in a pod, it would count the cores of the whole node
        words.append(f"engine.threads={shape.threads}")
    words += [f"train.time_limit={wishes.time_s:g}s"] if wishes.time_s else []
    words += ["--out", folder, "--continue", "--instances", str(topology.num_instances)]
    words += ["--hosts", ",".join(hosts), "--join"] if count > 1 else []
    run_secret = ("PODIUM_SECRET",) if count > 1 else ()
    return Pods(
        name, section.kind, topology, folder, tuple(words), (*run_secret, *site.secrets), shape.devices_per_node
    )


def plan_study(name: str, recipe: Recipe, site: Site, wishes: Wishes, num_runs: int) -> Pods:
    """Return a job with a pod for each run of a study; `recipe`: what all of them share."""
    if site.kubernetes.kind != "job":
        raise UserError(
            f"kubernetes.kind = {site.kubernetes.kind} carries one training: a study needs kind: job in the site"
        )
    if wishes.time_s:
        raise UserError("--time is for one training: give a study train.time_limit in its `set`")
    pods = plan_pods(name, recipe, site, wishes)
    if pods.several:
        raise UserError("each run of a study has one pod: leave --nodes out, and give --instances for a pod")
    start = [*shlex.split(site.container.podium if site.container else site.podium or "podium"), "attempt", "element"]
    command = (*start, STUDY_FILE, pods.folder, "--instances", str(pods.topology.num_instances))
    at_once = min(num_runs, wishes.at_once or num_runs)
    return replace(pods, command=command, num_runs=num_runs, at_once=at_once)


def host_names(name: str, kind: Kind, count: int) -> tuple[str, ...]:
    """Return the names by which pods find each other, in the order of their indexes."""
    if kind == "pytorchjob":
        return (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(count - 1)))
    stem = name if kind == "job" else f"{name}-{NODE}-0"
    return tuple(f"{stem}-{index}.{name}" for index in range(count))


def check_section(section: KubernetesSection, pods: Pods) -> None:
    """Raise UserError where a site does not say what a job needs."""
    if section.runs is None and (pods.several or pods.num_runs):
        what = "several pods continue one run" if pods.several else "the pods of a study share its folder"
        raise UserError(
            f"{what}, which needs a folder that outlives them: name it as kubernetes.runs in the site, such as "
            "runs: {path: /runs, claim: my-runs}"
        )
