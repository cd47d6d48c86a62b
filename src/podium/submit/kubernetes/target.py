"""Kubernetes as a target."""

from collections.abc import Iterator

from podium.errors import UserError
from podium.submit.records import JobRecord
from podium.submit.target import Prepared, Request, Status


class KubernetesTarget:
    """Jobs of Kubernetes."""

    def prepare(self, request: Request) -> Prepared:
        """Return the manifests."""
        raise UserError("jobs of Kubernetes are not available yet")

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Apply the manifests."""
        raise UserError("jobs of Kubernetes are not available yet")

    def status(self, job: JobRecord) -> Status:
        """Return how a job is doing."""
        raise UserError("jobs of Kubernetes are not available yet")

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield what a job has printed."""
        raise UserError("jobs of Kubernetes are not available yet")

    def cancel(self, job: JobRecord) -> None:
        """Have a job save and end."""
        raise UserError("jobs of Kubernetes are not available yet")
