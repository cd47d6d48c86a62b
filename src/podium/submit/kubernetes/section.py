"""What a site says about its Kubernetes."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from podium.recipe.durations import Seconds
from podium.recipe.section import Section
from podium.submit.kubernetes.words import Folder, LabelKey, LabelValue, Memory, ObjectName
from podium.submit.words import HostName, Line, VariableName, Word

#: kinds of object that carry a job
Kind = Literal["job", "jobset", "trainjob", "pytorchjob"]


class VolumeSection(Section):
    """A folder that pods see, and where it comes from: a claim, a file server, the node, or memory of the pod."""

    path: Folder
    #: a PersistentVolumeClaim of the namespace
    claim: ObjectName | None = None
    #: a server of NFS; its folder is `folder`
    nfs: HostName | None = None
    #: of the server, of the node (without `nfs`), or of the claim
    folder: Folder | None = None
    read_only: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.claim is None and self.folder is None:
            raise ValueError("kubernetes: a volume needs claim, or folder (of the node, or with nfs of a server)")
        if self.claim is not None and self.nfs is not None:
            raise ValueError("kubernetes: claim and nfs of a volume cannot go together")
        return self


class TolerationSection(Section):
    """A taint of nodes that pods tolerate."""

    key: LabelKey
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KubernetesSection(Section):
    """How jobs are handed to Kubernetes. Images, devices and cores of a pod are in `container` and `node`."""

    #: of the kubeconfig; None: the current one
    context: Word | None = None
    namespace: ObjectName | None = None
    #: what carries a job: Kubernetes itself, or an operator that the cluster has
    kind: Kind = "job"
    #: where runs are kept; pods of one job share it
    runs: VolumeSection | None = None
    #: where data come from
    data: tuple[VolumeSection, ...] = ()
    #: memory of a pod; its shared memory and temporary files in memory count
    memory: Memory = "16Gi"
    shared_memory: Memory = "2Gi"
    #: what a pod may write to /tmp, its home: caches, simulated data, compiled code
    temporary: Memory = "20Gi"
    #: how the cluster calls devices
    device: LabelKey = "nvidia.com/gpu"
    user: Annotated[int, Field(ge=1, lt=2**31)] = 10001
    group: Annotated[int, Field(ge=0, lt=2**31)] = 10001
    #: how often an interrupted job starts again
    requeues: NonNegativeInt = 20
    #: seconds that a pod has to save after SIGTERM
    grace: Seconds = 120.0
    #: seconds after its end when the job and what belongs to it are removed; the run stays
    keep: Seconds = 86400.0
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    tolerations: tuple[TolerationSection, ...] = ()
    priority_class: ObjectName | None = None
    runtime_class: ObjectName | None = None
    service_account: ObjectName | None = None
    #: names of Secrets with the password of the image's registry
    pull_secrets: tuple[ObjectName, ...] = ()
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    #: labels of the job: kueue.x-k8s.io/queue-name
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    #: variables from Secrets that the namespace has already: {WANDB_API_KEY: wandb/api-key}
    secrets: dict[VariableName, Line] = Field(default_factory=dict)
    #: only pods of the same job may reach its ports
    network_policy: bool = True
    #: the node's own inter-process communication, and memory that stays in place: where a network card needs it
    host_ipc: bool = False
    ipc_lock: bool = False

    @field_validator("secrets")
    @classmethod
    def _references(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if len(text.split("/")) != 2 or not all(text.split("/")):
                raise ValueError(f"{name}: expected the name of a Secret and a key in it, such as wandb/api-key")
        return value
