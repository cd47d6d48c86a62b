"""Slurm, rehearsed: the batch script of the target, run by bash, with stand-ins for the commands that it calls."""

import os
import random
import secrets
import shlex
import signal
import subprocess
from contextlib import suppress

from podium.launch.secret import VARIABLE
from podium.rehearse.processes import kill_family, kill_tasks, num_lines, signal_tasks
from podium.rehearse.stage import ADDRESSES, PODIUM, Event, SmallJob
from podium.rehearse.stand_in import REQUEUE, STAGE, STEPS, write_commands
from podium.submit.shell import Shell
from podium.submit.site import LoginSection
from podium.submit.slurm.target import SlurmTarget
from podium.submit.target import Request, Wishes


class SlurmStage:
    """A job of Slurm, carried out here."""

    def __init__(self, job: SmallJob) -> None:
        self._job, self._folder = job, job.folder / "stage"
        self._process: subprocess.Popen | None = None
        self._number, self._restarts, self._code = random.randrange(1, 10**6), 0, 0
        changes = {
            "login": LoginSection(),
            "podium": shlex.join(PODIUM),
            "container": None,
            "modules": (),
            "secrets": (),
        }
        site = job.site.model_copy(update=changes)
        wishes = Wishes(out=str(job.run), nodes=(job.num_hosts, job.num_hosts), per_node=job.per_host, requeues=10)
        request = Request("run", str(job.recipe_file), (), job.recipe, site, wishes)
        self._prepared = SlurmTarget().prepare(request)
        self.not_rehearsed = [
            "Slurm itself: its queue, limits and accounts; cores were not bound, and nodes were this one",
            *(["modules, which the script loads first"] if job.site.modules else []),
            *(["the container"] if job.site.container else []),
            *(["devices"] if job.site.node.devices else []),
        ]

    @property
    def starts(self) -> int:
        """How often srun was called."""
        return num_lines(self._folder / STEPS)

    def begin(self) -> None:
        """Write the job's files and start its script."""
        Shell().write_new(self._prepared.folder, self._prepared.files)
        self._folder.mkdir()
        write_commands(self._folder / "bin", ["srun", "scontrol", "squeue"])
        self._start()

    def play(self, event: Event) -> None:
        """Send what Slurm sends: SIGTERM to all, SIGUSR1 to the script before the time is over, nothing for a node."""
        assert self._process is not None
        if event == "preempted":
            signal_tasks(self._folder, signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
        elif event == "timed out":
            self._process.send_signal(signal.SIGUSR1)
        else:
            kill_tasks(self._folder, ADDRESSES[self._job.num_hosts - 1])

    def step(self) -> bool:
        """Start a script again that has asked for it; return whether the job goes on."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return True
        self._code = code
        if not (self._folder / REQUEUE).exists():
            return False
        (self._folder / REQUEUE).unlink()
        self._restarts += 1
        self._start()
        return True

    def problem(self) -> str:
        """Return why the script ended."""
        if self._code == 0:
            return ""
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("podium: ")]
        return f"the job ended with exit code {self._code}" + (f": {said[-1][8:]}" if said else "")

    def end(self) -> None:
        """Kill what still runs."""
        if self._process is not None and self._process.poll() is None:
            kill_family(self._process.pid)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _start(self) -> None:
        nodes = ADDRESSES[: self._job.num_hosts]
        env = {
            **os.environ,
            "PATH": f"{self._folder / 'bin'}:{os.environ.get('PATH', '')}",
            STAGE: str(self._folder),
            VARIABLE: secrets.token_hex(32),
            "SLURM_JOB_ID": str(self._number),
            "SLURM_NODELIST": ",".join(nodes),
            "SLURM_NNODES": str(len(nodes)),
            "SLURM_RESTART_COUNT": str(self._restarts),
        }
        script = next(name for name in self._prepared.files if name.endswith(".sh"))
        self._log = self._job.run / "job" / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", str(self._job.run / script)],
                cwd=self._job.run,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
