"""Jobs on a real Slurm of two nodes: submitted, run, signalled, queued again, counted, excluded, cancelled."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from podium.runs.folder import Run
from podium.submit.attempts import JobFolder
from tests.support.processes import assert_user_error, num_records, podium_ended, podium_here, until
from tests.support.recipes import recipe_of
from tests.support.slurm import PATH, Slurm

pytestmark = pytest.mark.slow

SHORT = [*recipe_of("mnist"), "batch.replicas=4", "train.length=24up"]
LONG = [*recipe_of("mnist"), "batch.replicas=4", "train.length=1500up", "valid.every=500up", "checkpoint.every=20up"]
SSHD = shutil.which("sshd", path=PATH)
KEY = "a-key-that-nobody-may-read-0123456789"


@pytest.fixture
def submit(slurm: Slurm, tmp_path, monkeypatch):
    """Submits from `tmp_path`; returns the number of the job and its run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(slurm.folder / "slurm.conf"))
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    Path("site.yaml").write_text("secrets: [WANDB_API_KEY]\n")

    def submit(*words: object, out: str = "run") -> tuple[str, Run]:
        done = podium_here("submit", "slurm", *words, "--out", out, "--site", "site.yaml")
        assert done.returncode == 0, done.stderr
        return podium_job(out), Run(tmp_path / out)

    yield submit
    slurm.said("scancel", "--user", str(os.getuid()))
    slurm.wait_for_nodes()


def podium_job(name: str) -> str:
    shown = podium_here("status", name)
    assert shown.returncode == 0, shown.stderr
    return next(line.split()[-2] for line in shown.stdout.splitlines() if "slurm " in line)


def log_of(run: Run) -> str:
    path = run.path / "job" / "log"
    return path.read_text() if path.exists() else ""


def instances_on(job: str, node: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if env.get("SLURM_JOB_ID") == job and env.get("SLURMD_NODENAME") == node and "SLURM_PROCID" in env:
                found += [process] if {"train", "resume"} & set(process.cmdline()) else []
        except psutil.Error:
            continue
    return [process for process in found if process.name() != "srun"]


def wait_for_end(slurm: Slurm, job: str, run: Run) -> None:
    gone = lambda: not slurm.said("squeue", "-h", "-j", job).strip()  # noqa: E731
    until(gone, "the end of the job", 150)
    assert run.summary().get("state") == "done", log_of(run)


def test_a_job_is_signalled_and_queued_again_and_continues_on_the_node_that_is_left(slurm, submit, weights_alone):
    began = time.monotonic()
    job, run = submit(*LONG, "--nodes", "1-2", "--tasks-per-node", 2, "--time", "10m")
    until(lambda: num_records(run) >= 1, "the first update")
    print(f"\nfrom submit to the first update {time.monotonic() - began:.1f} s")
    until(lambda: num_records(run) >= 20, "records")
    assert "running" in podium_here("status", "run").stdout
    slurm.said("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    try:
        slurm.said("scancel", "--batch", "--signal=USR1", job)
        until(lambda: "continuing on 2 instances: node1" in log_of(run), "the second attempt")
        saved = num_records(run)
        until(lambda: num_records(run) > saved or run.summary().get("state") == "done", "updates after the requeue")
    finally:
        slurm.said("scontrol", "update", "nodename=node2", "state=resume")
    first, second = JobFolder(run.path / "job").attempts()[:2]
    print(f"from the end of the instances to their start after a requeue {second.began - (first.ended or 0):.1f} s")
    wait_for_end(slurm, job, run)
    assert (first.instances, first.code, second.instances) == (4, 75, 2)
    assert run.summary()["weights_sha256"] == weights_alone(LONG)
    assert "stopped and saved after update" in log_of(run)
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert not [path for path in Path("state").rglob("*.json") if KEY in path.read_text()]
    shown = podium_here("logs", "run")
    assert "back into the queue" in shown.stdout
    assert "done" in podium_here("jobs").stdout


def test_a_node_that_loses_instances_twice_is_excluded_and_named(slurm, submit, weights_alone):
    job, run = submit(*LONG, "--nodes", "1-2", "--tasks-per-node", 2)
    for count in (1, 2):
        until(lambda: log_of(run).count("on 4 instances: node1, node2") == count, f"start {count}")  # noqa: B023
        before = num_records(run)
        until(lambda: num_records(run) > before + 15, "updates")  # noqa: B023
        instances_on(job, "node2")[0].kill()
    wait_for_end(slurm, job, run)
    log = log_of(run)
    assert "node2 has lost instances twice and is excluded from now on" in log
    assert "continuing on 2 instances: node1\n" in log
    assert run.summary()["weights_sha256"] == weights_alone(LONG)


def test_a_time_limit_of_one_minute_saves_in_time_and_what_must_not_start_again_does_not(
    slurm, submit, weights_alone, tmp_path
):
    (tmp_path / "slow.py").write_text(
        "import time\n\nclass Slow:\n    def on_record(self, run, record):\n        time.sleep(0.3)\n"
    )
    slow = [*recipe_of("mnist"), "batch.replicas=2", "train.length=400up", "valid.every=200up"]
    _, run = submit(*slow, "log.observers=[slow.py:Slow]", "--tasks-per-node", 1, "--time", "0:30")  # 60 s and more
    other, failed = submit(*SHORT, "optim.lr=1e30", "--tasks-per-node", 1, out="failed")
    third, cancelled = submit(*LONG, "train.length=100000up", "--tasks-per-node", 1, out="cancelled")

    until(lambda: not slurm.said("squeue", "-h", "-j", other).strip(), "the end of what fails")
    assert [one.code for one in JobFolder(failed.path / "job").attempts()] == [3], log_of(failed)
    assert "exit code 3: this job ends" in log_of(failed)
    assert "failed" in podium_here("status", "failed").stdout

    until(lambda: num_records(cancelled) > 3, "records")
    assert podium_here("cancel", third).returncode == 0
    until(lambda: not slurm.said("squeue", "-h", "-j", third).strip(), "the end of what is cancelled")
    assert len(JobFolder(cancelled.path / "job").attempts()) == 1
    assert cancelled.summary()["state"] == "interrupted"

    until(lambda: run.summary().get("state") == "done", "the end", 300)
    until(lambda: JobFolder(run.path / "job").attempts()[-1].code == 0, "its record")
    codes = [one.code for one in JobFolder(run.path / "job").attempts()]
    assert codes == [75] * (len(codes) - 1) + [0], log_of(run)
    assert len(codes) > 1, log_of(run)
    assert run.summary()["weights_sha256"] == weights_alone(slow)
    print(f"\n{len(codes)} attempts within limits of one minute")


def test_a_study_is_an_array_whose_elements_continue_by_themselves(slurm, submit, tmp_path):
    (tmp_path / "study.yaml").write_text(
        "recipe: base.yaml\nvalues: {optim.lr: [1.0e-3, 2.0e-3, 4.0e-3]}\nmethod: grid\n"
    )
    name, *overrides = SHORT
    shown = podium_here("show", name, *overrides).stdout
    (tmp_path / "base.yaml").write_text(shown)
    done = podium_here("submit", "slurm", "study", "study.yaml", "--out", "sweep", "--tasks-per-node", 2,
                       "--at-once", 2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = podium_job("sweep")
    until(lambda: "node" in slurm.said("squeue", "-h", "-t", "R", "-j", job, "-o", "%N"), "a running element")
    assert len(slurm.said("squeue", "-h", "-t", "R", "-j", job).splitlines()) <= 2
    slurm.said("scancel", "--signal=TERM", f"{job}_0")
    until(lambda: not slurm.said("squeue", "-h", "-j", job).strip(), "the end of the array", 200)
    shown = json.loads(podium_ended(tmp_path, "study", "status", "sweep", "--json").stdout)
    assert [one["state"] for one in shown["runs"]] == ["finished"] * 3, shown["runs"]
    assert "3 runs finished" in podium_here("status", "sweep").stdout
    one = podium_ended(tmp_path, "train", "sweep/recipes/0001.yaml", "--out", "alone")
    assert one.returncode == 0, one.stderr
    known = Run(tmp_path / "sweep" / "runs" / "0001").summary()["weights_sha256"]
    assert known == Run(tmp_path / "alone").summary()["weights_sha256"]


def test_sbatch_that_refuses_leaves_nothing(submit, tmp_path):
    Path("nowhere.yaml").write_text("slurm: {partition: nowhere}\n")
    done = podium_here("submit", "slurm", *SHORT, "--site", "nowhere.yaml", "--out", "none")
    assert_user_error(done, "sbatch on this machine failed: ", "artition")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def login(slurm: Slurm, tmp_path_factory) -> Iterator[str]:
    """An ssh server from which Slurm's commands can be run; the command that reaches it."""
    if SSHD is None:
        pytest.skip("OpenSSH's server (openssh-server) is not installed")
    folder = tmp_path_factory.mktemp("login")
    for key in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    there = {"PATH": PATH, "SLURM_CONF": slurm.folder / "slurm.conf", "PODIUM_CACHE": os.environ["PODIUM_CACHE"]}
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
        f"PasswordAuthentication no\nSetEnv {' '.join(f'{name}={value}' for name, value in there.items())}\n"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on this empty folder
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: server.poll() is not None or (folder / "pid").exists(), "the ssh server", deadline_s=20)
            yield f"ssh -F none -p {port} -i {folder}/key -o IdentitiesOnly=yes -o UserKnownHostsFile={folder}/known"
        finally:
            server.terminate()


def test_everything_works_through_a_login_node_and_secrets_are_in_the_environment_of_the_job_alone(
    slurm, submit, login, tmp_path, monkeypatch
):
    monkeypatch.delenv("SLURM_CONF")
    there = tmp_path / "the folder's $(name)"
    site = {"login": {"host": "127.0.0.1", "ssh": login, "folder": str(there)}, "secrets": ["WANDB_API_KEY"],
            "podium": f"{sys.executable} -m podium"}  # fmt: skip
    Path("far.yaml").write_text(json.dumps(site))
    done = podium_here("submit", "slurm", *LONG, "train.length=100000up", "--tasks-per-node", 2, "--site", "far.yaml")
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    job, run = podium_job(name), Run(there / "runs" / name)
    until(lambda: num_records(run) > 0, "records")
    assert "running" in podium_here("status", name).stdout
    instance = [*instances_on(job, "node1"), *instances_on(job, "node2")][0]
    assert instance.environ()["WANDB_API_KEY"] == KEY
    assert "PODIUM_SECRET" in instance.environ()
    with Path("followed").open("wb") as file:
        following = subprocess.Popen([sys.executable, "-m", "podium", "logs", "-f", name], stdout=file)
        assert podium_here("cancel", name).returncode == 0
        assert following.wait(90) == 0  # it ends as the job does
    assert "on 2 instances" in Path("followed").read_text()
    until(lambda: run.summary()["state"] == "interrupted", "that it has saved")
    written = [path for path in there.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert not (tmp_path / "name").exists()


def test_a_study_from_a_laptop_is_written_by_its_first_element(slurm, submit, login, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_CONF")
    there = tmp_path / "the study's $(name)"
    site = {"login": {"host": "127.0.0.1", "ssh": login, "folder": str(there)}, "podium": f"{sys.executable} -m podium"}
    Path("far.yaml").write_text(json.dumps(site))
    name, *overrides = SHORT
    Path("base.yaml").write_text(podium_here("show", name, *overrides).stdout)
    Path("study.yaml").write_text("recipe: base.yaml\nvalues: {optim.lr: [1.0e-3, 2.0e-3]}\nmethod: grid\n")
    done = podium_here("submit", "slurm", "study", "study.yaml", "--site", "far.yaml")
    assert done.returncode == 0, done.stderr
    job = podium_job(name := done.stdout.strip())
    with Path("followed").open("wb") as file:
        following = subprocess.Popen([sys.executable, "-m", "podium", "logs", "-f", name], stdout=file)
        until(lambda: not slurm.said("squeue", "-h", "-j", job).strip(), "the end of the array", 200)
        assert following.wait(90) == 0
    assert Path("followed").read_text().count("beginning on 1 instances") == 2
    assert "2 runs finished" in podium_here("status", name).stdout
    assert not (tmp_path / "name").exists()
