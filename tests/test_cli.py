"""The commands as a person types them: what they print, and the exit codes a script reads."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from podium import __version__
from podium.data.formats.idx import write_idx
from podium.recipe.loading import load_recipe, shipped_recipes
from podium.runs.folder import open_run
from podium.workloads.registry import WORKLOADS
from tests.support.neuron_files import write_published
from tests.support.processes import assert_user_error, podium_afresh, podium_here
from tests.support.recipes import TINY

COMMANDS = ["train", "resume", "validate", "predict", "recipes", "show", "doctor", "data"]


def printed(*args: object) -> str:
    """Standard output of a command that must succeed."""
    done = podium_here(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose best checkpoint is not its last."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    worsen = ["schedule.name=stepped", "schedule.at=[1ep]", "schedule.factor=[20]", "schedule.warmup=0"]
    printed("train", *TINY["mnist"], *worsen, "log.report=true", "--out", folder)
    run = open_run(folder)
    assert run.summary()["valid"]["best"]["update"] < run.summary()["updates"]
    return run


def metric(text: str, name: str) -> float:
    return float(re.search(rf"{name}\W+([\d.e+-]+)", text).group(1))


def test_version_and_help_as_a_process(tmp_path):
    version, helped = podium_afresh(tmp_path, "--version"), podium_afresh(tmp_path, "--help")
    assert version.returncode == helped.returncode == 0
    assert version.stdout.strip() == __version__
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\s+\w", helped.stdout, re.MULTILINE), command


def test_help_of_data_lists_its_commands():
    text = printed("data", "--help")
    assert all(command in text for command in ("make", "info", "fetch"))


@pytest.mark.parametrize("args", [["conquer"], ["train"], ["train", "mnist", "--outt", "x"], ["data", "mine"]])
def test_commands_and_options_that_do_not_exist_exit_2(args):
    done = podium_here(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Usage" in done.stderr


def test_recipes_lists_every_shipped_one_with_what_it_does():
    text = printed("recipes")
    for name, about in shipped_recipes():
        assert re.search(rf"│ {re.escape(name)} +│ {re.escape(about.split()[0])}", text)


def test_show_prints_a_recipe_that_reads_back_equal(tiny, tmp_path):
    text = printed("show", *tiny)
    (tmp_path / "shown.yaml").write_text(text)
    assert load_recipe(str(tmp_path / "shown.yaml")) == load_recipe(tiny[0], tiny[1:])
    assert printed("show", tmp_path / "shown.yaml") == text


def test_doctor_finds_this_machine_fit():
    text = printed("doctor")
    assert "missing" not in text
    for part in ("torch", "processor", "memory", "cache folder"):
        assert part in text


def test_training_ends_with_the_report_and_the_final_loss(tmp_path):
    done = podium_here("train", *TINY["mnist"], "--out", tmp_path / "run")
    summary = open_run(tmp_path / "run").summary()
    assert done.stdout.splitlines()[-1] == f"final validation loss: {summary['valid']['last']['loss']:.4f}"


def test_runs_are_numbered_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        printed("train", *TINY["mnist"], "train.length=1up")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mnist-001", "mnist-002"]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["parallel.stages=4"], ["instance 3 │ replicas 0 to 15 │ stage 3", "4 instances · 16 replicas · 4 stages"]),
        (["parallel.stages=[0,4,4,4]"], ["stage 0 │      0 │", "stage 3 │      4 │", "4 instances"]),
        (["parallel.stages=3", "--instances", "6", "--hosts", "a,b"], ["b    │ instance 3 │ replicas 8 to 15 │ stage"]),
        (["--hosts", "a,b"], ["b    │ instance 1 │ replicas 8 to 15", "2 instances"]),
        (["parallel.stages=4", "--instances", "8", "--hosts", "a,b"], ["b    │ instance 4 │ replicas 8 to 15 │ stage"]),
    ],
)  # fmt: skip
def test_topology_draws_who_carries_what(args, parts):
    text = printed("topology", "neuron", "batch.replicas=16", "batch.micro=1", *args)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", "at least one layer"),
        ("[]", "at least one layer"),
        ("[0,0]", "at least one layer"),
        ("[4,-1]", "number of devices"),
        ("[4,true]", "number of devices"),
        ("1.5", "number of devices"),
        ("many", "number of devices"),
        ("{a: 1}", "number of devices"),
    ],
)
def test_stages_that_are_none_say_what_is_expected(value, expected):
    assert_user_error(podium_here("topology", "mnist", f"parallel.stages={value}"), "parallel.stages", expected)


def test_a_run_from_before_there_were_stages_resumes(tmp_path):
    printed("train", *TINY["mnist"], "--out", tmp_path / "run")
    run = open_run(tmp_path / "run")
    text = run.recipe_file.read_text()
    run.recipe_file.write_text(re.sub(r"parallel:\n(  .*\n)+", "", text))
    assert "parallel" not in run.recipe_file.read_text()
    weights = run.summary()["weights_sha256"]
    (newest, *_) = sorted(run.checkpoints.iterdir(), reverse=True)
    shutil.rmtree(newest)
    printed("resume", run.path)
    assert run.summary()["weights_sha256"] == weights


def test_validate_prints_what_the_run_measured_itself(trained):
    summary = trained.summary()
    text = printed("validate", trained.path)
    assert f"after update {summary['updates']}" in " ".join(text.split())  # a long path wraps the title
    assert f"{summary['valid']['last']['loss']:.6g}" in text
    assert f"{summary['valid']['last']['accuracy']:.6g}" in text


def test_validate_the_best_checkpoint_and_one_by_its_number(trained):
    best = trained.summary()["valid"]["best"]
    for which in ("best", best["update"]):
        text = printed("validate", trained.path, "--checkpoint", which)
        assert f"after update {best['update']}" in " ".join(text.split())
        assert f"{best['loss']:.6g}" in text


def test_validate_another_split(trained):
    valid, train = (printed("validate", trained.path, "--split", split) for split in ("valid", "train"))
    assert metric(train, "train/loss") != metric(valid, "valid/loss")


def test_predict_draws_the_report_again(trained):
    trained.report_file.unlink()
    text = printed("predict", trained.path)
    assert trained.report_file.exists()
    assert str(trained.report_file) in text.replace("\n", "")
    assert len(list(trained.pictures.glob("*.png"))) >= 2


def test_data_info_describes_published_files(tmp_path):
    write_published(tmp_path)
    text = printed("data", "info", tmp_path)
    assert re.search(r"train_frames +│ 50 × 1600 × 4 +│ float16 +│ contiguous", text)
    assert "h5nameTemplate" in text
    assert "par14" in text


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_data_info_describes_idx_files(tmp_path, suffix):
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", np.zeros((7, 28, 28), np.uint8))
    text = printed("data", "info", tmp_path / f"t10k-images-idx3-ubyte{suffix}")
    assert re.search(rf"7 × 28 × 28 +│ uint8 +│ {'gzip' if suffix else 'plain'}", text)


def test_commands_that_only_tell_something_load_neither_torch_nor_the_engine():
    """As real commands, one after the other in a process of their own."""
    script = """
import sys
from podium.cli import main
for line in sys.argv[1:]:
    sys.argv = ["podium", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, (line, end.code)
heavy = ("torch", "numpy", "podium.engine", "podium.kernels", "podium.distributed", "podium.training.build")
print([name for name in sys.modules if name.startswith(tuple(f"{word}." for word in heavy)) or name in heavy])
"""
    lines = ["--help", "train -h", "recipes", "recipes neuron", *(f"show {name} seed=3" for name in WORKLOADS)]
    done = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["show"], ["recipes"], ["data"], ["data", "make"]])
def test_h_is_help(command):
    assert printed(*command, "-h") == printed(*command, "--help")


def test_recipes_filters_by_words():
    text = printed("recipes", "neuron")
    assert "neuron/full" in text
    assert "gpt2" not in text
    assert "neuron/full" in printed("recipes", "FULL", "neuron")
    assert_user_error(podium_here("recipes", "nueron"), "no shipped recipe has nueron", "did you mean neuron?")
    assert_user_error(podium_here("recipes", "qqq"), "no shipped recipe has qqq", "lists them all")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_show_says_that_this_machine_lacks_the_device():
    done = podium_here("show", "mnist", "engine.device=cuda")
    assert done.returncode == 0
    assert "device: cuda" in done.stdout
    assert "torch finds no such accelerator on this machine" in done.stderr
