"""A real Slurm with two nodes starts the instances, interrupts them, and starts them again."""

import sys
from pathlib import Path

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.hosts import ended
from tests.support.processes import num_records, sentence, until
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

PODIUM = Path(sys.executable).parent / "podium"
SHORT = [*recipe_of("mnist"), "batch.replicas=2", "train.length=12up"]
LONG = [*recipe_of("mnist"), "batch.replicas=2", "train.length=400up"]  # long enough for a signal to come in time


def listening_addresses() -> set[str]:
    """Of every `podium` process on this machine that Slurm has started."""
    found = set()
    for process in psutil.process_iter():
        try:
            if "SLURM_STEP_ID" in process.environ():
                found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


def test_a_signal_by_scancel_saves_and_another_job_on_one_task_ends_at_the_same_weights(slurm, tmp_path, weights_alone):
    run = Run(tmp_path / "run")
    first = slurm.started("srun", "-N2", "-n2", PODIUM, "train", *LONG, "--out", "run", cwd=tmp_path)
    until(lambda: num_records(run) >= 3 or first.poll() is not None, "records")
    assert listening_addresses() == {"127.0.0.1"}
    (job,) = slurm.running_jobs()
    slurm.said("scancel", "--signal=TERM", job)
    code, errors = ended(first)
    assert code == 75, errors
    assert "stopped by SIGTERM" in sentence(errors)
    assert run.summary()["state"] == "interrupted"

    code, errors = ended(slurm.started("srun", "-n1", PODIUM, "resume", "run", cwd=tmp_path))
    assert code == 0, errors
    assert run.summary()["topology"]["instances"] == 1
    assert run.summary()["weights_sha256"] == weights_alone(LONG)


def test_tasks_that_do_not_fit_together_are_one_sentence_and_exit_2(slurm, tmp_path):
    each = f"{PODIUM} train {' '.join(SHORT)} seed=$SLURM_PROCID --out run"
    code, errors = ended(slurm.started("srun", "-N2", "-n2", "bash", "-c", each, cwd=tmp_path))
    assert code == 2, errors
    assert "recipes differ" in sentence(errors)
    assert "on node2 (instance 1)" in sentence(errors)
    assert not (tmp_path / "run").exists()


def test_the_trouble_of_one_task_is_told_once_and_exits_3(slurm, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('SLURM_PROCID') == '1':\n"
        "    import podium.engine.update as u\n"
        "    u.Engine.collect = lambda self: 1 / 0\n"
    )
    srun = ["srun", "-N2", "-n2", PODIUM, "train", *SHORT, "--out", "run"]
    code, errors = ended(slurm.started(*srun, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}))
    assert code == 3, errors
    assert "instance 1 on node2: " in sentence(errors)
    assert "ZeroDivisionError" in sentence(errors)
    assert "ZeroDivisionError" in (tmp_path / "run" / "log" / "instance-1.log").read_text()


def test_a_batch_job_that_is_queued_again_continues_and_its_script_is_no_task(slurm, tmp_path, weights_alone):
    run, alone = Run(tmp_path / "run"), Run(tmp_path / "alone")
    script = tmp_path / "job"
    script.write_text(
        f"#!/bin/sh\nset -e\n"
        f"srun {PODIUM} train {' '.join(LONG)} --out run\n"
        f"{PODIUM} train {' '.join(SHORT)} --out alone\n"
    )
    sbatch = ["sbatch", "--parsable", "-N2", "-n2", "--open-mode=append", "-o", tmp_path / "output", "-D", tmp_path]
    job = slurm.said(*sbatch, script).strip()
    until(lambda: num_records(run) >= 3, "records")
    slurm.said("scontrol", "requeue", job)
    until(lambda: not slurm.said("squeue", "-h", "-j", job).strip(), "the end of the job")
    assert (run.summary()["state"], alone.summary()["state"]) == ("done", "done"), (tmp_path / "output").read_text()
    assert "resuming run after update" in (tmp_path / "output").read_text()
    assert run.summary()["topology"] | {"hosts": 2, "instances": 2} == run.summary()["topology"]
    assert run.summary()["weights_sha256"] == weights_alone(LONG)
    assert alone.summary()["topology"]["instances"] == 1
