"""The batch script of a job, as `--dry-run` prints it: correct for any shell, and without anything that is secret."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from podium.recipe.loading import load_recipe
from podium.recipe.reading import read_yaml
from podium.runs.folder import JOB
from podium.study.definition import check_values, study_from_tree
from podium.submit.site import load_site, read_site
from podium.submit.slurm.script import batch_script
from podium.submit.slurm.shape import find_shape
from podium.submit.slurm.target import SlurmTarget
from podium.submit.studies import begin_study
from podium.submit.target import Request, Wishes
from tests.support.processes import assert_user_error, podium_here, run_files

HOSTILE = 'it\'s $(touch pwned) `touch pwned`; touch pwned & "x" *'
TEXTS = {"modules": "[cuda/12.4]", "environment": "{NAME: %s}", "container": "{image: %s, mounts: [%s]}",
         "scratch": "{cache: %s, temporary: %s}", "slurm": "{account: me, options: {mem: 64G, comment: 'a b'}}",
         }  # fmt: skip


@pytest.fixture
def shellcheck() -> list[str]:
    from shutil import which

    found = which("shellcheck") or which("shellcheck", path=str(Path(__import__("sys").executable).parent))
    if found is None:
        pytest.skip("shellcheck is not installed")
    return [found, "--severity=style"]


def hostile_site(folder: Path):
    quoted = json.dumps(HOSTILE)
    path = folder / "site.yaml"
    path.write_text("".join(f"{key}: {text.replace('%s', quoted)}\n" for key, text in TEXTS.items()))
    return read_site(path)


@pytest.mark.parametrize("array", [False, True, "sent"])
@pytest.mark.parametrize("kind", ["gpu_cluster", "cpu_cluster", "hostile"])
def test_scripts_pass_shellcheck_and_carry_every_word_as_it_was(kind, array, shellcheck, tmp_path):
    site = hostile_site(tmp_path) if kind == "hostile" else load_site(kind, "slurm")
    recipe = load_recipe("neuron/quick", ["batch.replicas=8"])
    shape = find_shape(recipe, site, Wishes(nodes=(1, 4), per_node=2))
    podium = ["/bin/echo", HOSTILE]
    text = batch_script(
        "Trains", site, shape, podium, f"/runs/{HOSTILE}", array=bool(array), sent=array == "sent", requeues=3
    )
    script = tmp_path / "batch.sh"
    script.write_text(text)
    # what a hostile name holds looks as if it was meant to be expanded
    checked = subprocess.run([*shellcheck, "--exclude=SC2016", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    settings = text.partition("# Signals")[0].replace("module load", ": module")
    shown = subprocess.run(
        ["bash", "-c", f'mkdir() {{ :; }}; SLURM_ARRAY_TASK_ID=7; {settings}\nprintf "%s\\n" "${{podium[@]}}" "$run"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    if array == "sent":
        assert shown.pop(0) == f"{HOSTILE} attempt prepare /runs/{HOSTILE}"
    assert shown == [*podium, f"/runs/{HOSTILE}" + ("/runs/0007" if array else "")]
    assert not (tmp_path / "pwned").exists()


def test_a_dry_run_prints_everything_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-secret")
    done = podium_here("submit", "slurm", "neuron/quick", "batch.replicas=16", "--site", "gpu_cluster", "--dry-run",
                       "--nodes", "1-4", "--time", "1-2:00:00", "--requeues", 7)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("--nodes=1-4", "--ntasks-per-node=4", "--time=1560", "--gres=gpu:4", "--signal=B:USR1@120",
                 "batch.sh", "recipe.yaml", "$ sbatch --parsable", "module load cuda",
                 "ALL,PODIUM_SECRET,WANDB_API_KEY"):  # fmt: skip
        assert part in done.stdout, part
    assert "secret" not in done.stdout + done.stderr.replace("own secret", "")
    assert run_files(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["neuron/quick", "--nodes", "0"], "expected a number of nodes"),
        (["neuron/quick", "--nodes", "4-2"], "expected a number of nodes"),
        (["neuron/quick", "--time", "tomorrow"], "expected a time such as"),
        (["neuron/quick", "batch.replicas=2", "--nodes", "2", "--tasks-per-node", "2"], "cannot carry 2 replicas"),
        (["neuron/quick", "optim.lr=x"], "optim.lr"),
        (
            ["neuron/quick", "batch.replicas=8", "--site", "gpu_cluster", "--tasks-per-node", "8"],
            "8 instances on a node that has 4 devices (node.devices of the site): ask for fewer, or let them share "
            "with launch.instances_per_device=2",
        ),
        (
            [
                "cnn/cifar_resnet8",
                "workload.model.norm.span=4",
                "batch.replicas=8",
                "--nodes",
                "3",
                "--tasks-per-node",
                "1",
            ],
            "norm.span = 4 cannot lie in 3 instances of 8 replicas",
        ),
        (["neuron/quick", "--out", "a%j"], "cannot be the name of a job"),
        (["study"], "expected a study.yaml"),
        (["neuron/quick", "--site", "none"], "no such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_user_error(podium_here("submit", "slurm", *words), sentence)
    assert run_files(tmp_path) == []


def test_secrets_that_are_not_set_are_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert_user_error(podium_here("submit", "slurm", "neuron/quick", "--site", "gpu_cluster"), "export WANDB_API_KEY=")
    assert run_files(tmp_path) == [] or run_files(tmp_path) == ["runs"]


def test_the_time_before_the_end_at_which_a_job_saves_suits_short_jobs():
    recipe, site = load_recipe("neuron/quick"), load_site("cpu_cluster", "slurm")
    leads = {time: find_shape(recipe, site, Wishes(time_s=time)).lead_s for time in (30.0, 60.0, 240.0, 7200.0)}
    assert leads == {30.0: 10, 60.0: 10, 240.0: 40, 7200.0: 120}


def test_devices_are_asked_for_as_the_recipe_uses_them():
    site = load_site("gpu_cluster", "slurm")

    def script(*words: str) -> str:
        shape = find_shape(load_recipe("neuron/quick", ["batch.replicas=16", *words]), site, Wishes(per_node=4))
        return batch_script("Trains", site, shape, ["podium"], "/runs/a", array=False, requeues=3)

    own = script()
    assert "--gres=gpu:4" in own
    assert "--gpus-per-task=1 --gpu-bind=single:1" in own
    shared = script("launch.instances_per_device=2")
    assert "--gres=gpu:2" in shared
    assert "--gpu" not in shared
    assert "gpu:" not in script("engine.device=cpu")  # others can have them


def test_threads_are_settled_when_a_job_is_submitted_so_that_its_bits_do_not_depend_on_the_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = load_site("cpu_cluster", "slurm")
    request = Request("run", "neuron/quick", (), load_recipe("neuron/quick", ["batch.replicas=8"]), site, Wishes())
    prepared = SlurmTarget().prepare(request)
    assert "--cpus-per-task=6" in prepared.files[f"{JOB}/batch.sh"]
    assert "threads: 6" in prepared.files[f"{JOB}/recipe.yaml"]
    assert find_shape(request.recipe, site, Wishes(nodes=(3, 3))).per_node == 3  # 3 + 3 + 2


def test_a_title_cannot_leave_its_comment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("workload.data.path=a\ntouch pwned",)
    request = Request("run", "mnist", words, load_recipe("mnist"), load_site(None, "slurm"), Wishes())
    lines = SlurmTarget().prepare(request).files[f"{JOB}/batch.sh"].splitlines()
    assert lines[1].startswith("# Trains mnist workload.data.path=a")
    assert not any(line.startswith("touch") for line in lines)
    assert shlex.split(lines[1], comments=True) == []


def test_a_study_becomes_an_array_whose_ended_runs_are_taken_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "recipe: mnist\nset: {workload.data.source: generated}\nvalues: {optim.lr: [1.0e-3, 2.0e-3]}\nmethod: grid\n"
    (tmp_path / "study.yaml").write_text(text)
    dry = podium_here("submit", "slurm", "study", "study.yaml", "--out", "sweep", "--at-once", 1, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "--array=0-1%1" in dry.stdout
    assert "attempt collect" in dry.stdout
    assert not (tmp_path / "sweep").exists()
    study = study_from_tree(read_yaml(Path("study.yaml")), "study.yaml", Path())
    request = Request("study", "study.yaml", (), check_values(study), load_site(None, "slurm"), Wishes())
    begin_study(request, tmp_path / "sweep")
    files = run_files(tmp_path / "sweep")
    assert {"recipes/0000.yaml", "recipes/0001.yaml", "job/0000", "job/0001", "study.yaml"} <= set(files)
    assert (tmp_path / "sweep" / "table.csv").read_text().count(",waiting,") == 2

    run = tmp_path / "sweep" / "runs" / "0001"
    run.mkdir(parents=True)
    shutil.copy(tmp_path / "sweep" / "recipes" / "0001.yaml", run / "recipe.yaml")
    (run / "summary.json").write_text(
        json.dumps({"state": "done", "updates": 4, "weights_sha256": "ab", "valid": {"last": {}, "best": {}}})
    )
    (run / "metrics.jsonl").write_text('{"update": 4, "epoch": 1.0, "samples": 4, "valid/loss": 0.5}\n')
    assert podium_here("attempt", "collect", "sweep").returncode == 0
    table = (tmp_path / "sweep" / "table.csv").read_text().splitlines()
    assert table[1].startswith("0,waiting,")
    assert table[2].startswith("1,finished,")

    (tmp_path / "study.yaml").write_text(text.replace("grid", "tpe") + "budget: {runs: 4}\n")
    assert_user_error(podium_here("submit", "slurm", "study", "study.yaml"), "with tpe, runs are chosen by the results")
