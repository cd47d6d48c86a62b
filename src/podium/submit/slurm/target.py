"""Slurm as a target."""

from collections.abc import Iterator

from podium.errors import UserError
from podium.submit.records import JobRecord
from podium.submit.target import Prepared, Request, Status


class SlurmTarget:
    """Jobs of Slurm."""

    def prepare(self, request: Request) -> Prepared:
        """Return the batch script."""
        raise UserError("jobs of Slurm are not available yet")

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Hand the batch script over."""
        raise UserError("jobs of Slurm are not available yet")

    def status(self, job: JobRecord) -> Status:
        """Return how a job is doing."""
        raise UserError("jobs of Slurm are not available yet")

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield what a job has printed."""
        raise UserError("jobs of Slurm are not available yet")

    def cancel(self, job: JobRecord) -> None:
        """Have a job save and end."""
        raise UserError("jobs of Slurm are not available yet")
