"""Kubernetes, rehearsed: the manifests of the target, its failure policy, and pods that are processes."""

import secrets
import shlex
from pathlib import Path

from podium.rehearse.indexed_job import IndexedJob
from podium.rehearse.pod_processes import PodProcess
from podium.rehearse.stage import ADDRESSES, PODIUM, Event, SmallJob
from podium.submit.kubernetes.job import plan_pods
from podium.submit.kubernetes.manifests import manifests
from podium.submit.kubernetes.section import VolumeSection
from podium.submit.site import ContainerSection
from podium.submit.target import Wishes

#: Kubernetes waits ten seconds before a failed pod is replaced, then longer
_BACKOFF_S = 1.0


class KubernetesStage:
    """A Job of Kubernetes, carried out here."""

    def __init__(self, job: SmallJob) -> None:
        section = job.site.kubernetes
        self._job, folder = job, str(job.run.parent)
        image = job.site.container.image if job.site.container else "rehearsal"
        site = job.site.model_copy(
            update={
                "container": ContainerSection(runtime="docker", image=image, podium=shlex.join(PODIUM)),
                "kubernetes": section.model_copy(
                    update={"kind": "job", "runs": VolumeSection(path=folder, folder=folder)}
                ),
            }
        )
        pods = plan_pods(
            job.run.name,
            job.recipe,
            site,
            Wishes(nodes=(job.num_hosts, job.num_hosts), per_node=job.per_host),
            addresses=ADDRESSES,
            recipe_file=str(job.recipe_file),
        )
        self._manifest = manifests(pods, site, job.recipe.tree(), job.recipe.launch.port)[0]
        self._controller: IndexedJob | None = None
        self._secrets = dict.fromkeys((*pods.secret_variables, *section.secrets), secrets.token_hex(32))
        self.starts = 0
        self.not_rehearsed = [
            "the image and its user, volumes, and a root that cannot be written: pods were processes of this user",
            "scheduling, the network between nodes and its policy, and devices",
        ]
        if section.kind != "job":
            self.not_rehearsed.append(f"the operator of {section.kind}: a plain Job with the same pods was carried out")

    def begin(self) -> None:
        """Start the pods."""
        spec = self._manifest["spec"]
        (container,) = spec["template"]["spec"]["containers"]

        def start(index: int, number: int) -> PodProcess:
            self.starts += index == 0
            return PodProcess(container, index, self._secrets, self._log(index))

        self._controller = IndexedJob(spec, start, backoff_s=_BACKOFF_S)
        self._controller.step()

    def play(self, event: Event) -> None:
        """Evict one pod, all of them, or lose the node of one."""
        job, last = self._controller, self._job.num_hosts - 1
        assert job is not None
        if event == "preempted":
            job.evict(last)
        elif event == "timed out":
            for index in range(last + 1):
                job.evict(index)
        else:
            job.lose_node(last)

    def step(self) -> bool:
        """Let the controller do its work."""
        assert self._controller is not None
        self._controller.step()
        return self._controller.state == "running" or bool(self._controller.active)

    def problem(self) -> str:
        """Return why the Job failed."""
        job = self._controller
        if job is None or job.state == "done":
            return ""
        said = [line for index in range(self._job.num_hosts) for line in _own_lines(self._log(index))]
        return f"{job.reason}: {job.message}" + (f"; {said[-1]}" if said else "")

    def end(self) -> None:
        """Kill the pods."""
        for attempt in self._controller.active if self._controller else []:
            attempt.pod.kill()

    def _log(self, index: int) -> Path:
        return self._job.folder / f"pod-{index}.log"


def _own_lines(log: Path) -> list[str]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.removeprefix("podium: ") for line in lines if line.startswith("podium: ")]
