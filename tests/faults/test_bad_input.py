"""The user's mistakes: exit 2, one sentence that says what is wrong, nothing half-written. And losses that fail."""

import json
import shutil

import h5py
import numpy as np
import pytest
import torch

from podium.checkpoints import reading
from podium.data.formats.idx import write_idx
from podium.runs.folder import open_run
from tests.support.neuron_files import TEMPLATE, write_meta, write_published
from tests.support.processes import assert_user_error, podium_afresh, podium_here, run_files
from tests.support.recipes import TINY

NEURON_FILES = ["neuron", "workload.data.source=files", "workload.data.path=data", "batch.micro=8", "engine.threads=1"]
MNIST_FILES = ["mnist", "workload.data.path=data", "batch.micro=8", "engine.threads=1"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder commands run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(here):
    folder = here / "data"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with checkpoints; copied by whoever harms it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    done = podium_here("train", *TINY["mnist"], "train.length=10up", "checkpoint.every=5up", "--out", run)
    assert done.returncode == 0, done.stderr
    return run


def refused(here, *args: object) -> str:
    """The sentence of a command that must fail and leave every file as it was."""
    before = run_files(here)
    done = podium_here(*args)
    assert_user_error(done)
    assert run_files(here) == before
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    return line


# ------------------------------------------------------------------------------------------------ recipes and folders


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["mnits"], ["no recipe 'mnits'", "did you mean mnist?"]),
        (["absent.yaml"], ["absent.yaml does not exist"]),
        (["mnist", "optim.lrr=1"], ["unknown key optim.lrr", "did you mean optim.lr?"]),
        (["mnist", "optim.lr=fast"], ['optim.lr = "fast"', "a number"]),
        (["mnist", "lr"], ["'lr' is not of the form section.key=value"]),
        ([*TINY["mnist"], "batch.micro=1000"], ["256 training samples", "one update of 1000", "micro-batch 1000"]),
        ([*TINY["mnist"], "train.length=0up"], ["train.length = 0up", "shorter than one update"]),
        ([*TINY["mnist"], "engine.device=nonsense"], ["engine.device", "nonsense", "expected auto, cpu"]),
        (
            [*TINY["mnist"], "workload.data.path=nowhere", "workload.data.source=files"],
            ["nowhere: expected a folder"],
        ),
        ([*NEURON_FILES, "workload.data.path=nowhere"], ["there is no file nowhere/meta.cellSpike"]),
        ([*NEURON_FILES, "workload.data.path=null"], ["workload.data.path", "is missing"]),
    ],
)
def test_recipes_that_cannot_be_trained(here, args, parts):
    sentence = refused(here, "train", *args, "--out", "run")
    for part in parts:
        assert part in sentence


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_accelerator_that_is_not_there(here):
    assert "engine.device" in refused(here, "train", *TINY["mnist"], "engine.device=cuda", "--out", "run")


@pytest.mark.slow
def test_from_the_start_of_python_too(tmp_path):
    done = podium_afresh(tmp_path, "train", "mnist", "workload.data.path=nowhere", "--out", "run")
    assert_user_error(done, "nowhere", "expected a folder that exists")
    assert done.stdout == ""
    assert run_files(tmp_path) == []


def test_output_folders_that_are_in_use(here, trained):
    shutil.copytree(trained, "held")
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").write_text("years of work")
    (here / "file").write_text("text")
    tiny = ["train", *TINY["mnist"], "--out"]
    assert "held already holds a run: continue it with `podium resume held`" in refused(here, *tiny, "held")
    assert "full is not empty" in refused(here, *tiny, "full")
    assert "file is a file" in refused(here, *tiny, "file")
    assert "file/below cannot be created" in refused(here, *tiny, "file/below")


# --------------------------------------------------------------------------------------------------------- data files


def test_neuron_file_cut_short(here, data):
    write_published(data)
    path = data / TEMPLATE.replace("*", "bbp153")
    path.write_bytes(path.read_bytes()[:-5000])
    assert "is a truncated HDF5 file" in refused(here, "train", *NEURON_FILES, "--out", "run")


def test_neuron_frames_of_another_shape(here, data):
    write_published(data)
    with h5py.File(data / TEMPLATE.replace("*", "bbp153"), "a") as file:
        del file["train_frames"]
        file["train_frames"] = np.zeros((50, 1600, 3), np.float16)
    sentence = refused(here, "train", *NEURON_FILES, "--out", "run")
    assert "train_frames has shape (50, 1600, 3), expected (samples, any, 4)" in sentence


def test_neuron_file_with_another_number_of_parameters(here, data):
    write_published(data, num_parameters=12)
    sentence = refused(here, "train", *NEURON_FILES, "--out", "run")
    assert "has 12 parameters" in sentence
    assert "names 15" in sentence


def test_neuron_folder_without_the_cell(here, data):
    write_meta(data)
    assert "there is no file data/*_excite" in refused(here, "train", *NEURON_FILES, "--out", "run")


def write_mnist(folder, num_labels: int = 20) -> None:
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", np.zeros((20, 28, 28), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.zeros(num_labels, np.uint8))


def test_idx_file_cut_short(here, data):
    write_mnist(data)
    path = data / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    assert "train-images-idx3-ubyte is truncated" in refused(here, "train", *MNIST_FILES, "--out", "run")


def test_images_without_as_many_labels(here, data):
    write_mnist(data, num_labels=19)
    sentence = refused(here, "train", *MNIST_FILES, "--out", "run")
    assert "20 images" in sentence
    assert "19 labels" in sentence


def test_info_of_what_is_no_data(here, data):
    assert "nowhere does not exist" in refused(here, "data", "info", "nowhere")
    assert "holds no data" in refused(here, "data", "info", data)
    rubbish = {"a.h5": "not an HDF5 file", "train-images-idx3-ubyte": "IDX", "meta.a.yaml": "dataInfo", "note.txt": ""}
    for name, part in rubbish.items():
        (data / name).write_text("dataInfo: [1, 2]\n" if part == "dataInfo" else "rubbish" * 100)
        sentence = refused(here, "data", "info", data / name)
        assert name in sentence
        assert part in sentence


def test_data_that_cannot_be_made(here):
    assert "samples = 0" in refused(here, "data", "make", "neuron", "samples=0", "out=made")
    assert "out is required and missing" in refused(here, "data", "make", "neuron", "samples=5")
    assert "unknown key sample (did you mean samples?)" in refused(here, "data", "make", "neuron", "sample=5", "out=x")
    assert "choose one of text, neuron, cosmology" in refused(here, "data", "make", "mnist", "samples=5")


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("command", ["resume", "validate", "predict"])
def test_folders_that_are_no_run(here, data, command):
    assert "the run folder absent does not exist" in refused(here, command, "absent")
    assert "data is not a run folder" in refused(here, command, "data")


def test_checkpoints_and_splits_that_do_not_exist(here, trained):
    assert "no checkpoint of update 999 (there are: 5, 10)" in refused(here, "validate", trained, "--checkpoint", 999)
    assert "expected last, best, average or the number" in refused(here, "predict", trained, "--checkpoint", "first")
    assert "--split nonsense: expected one of train, valid, test" in refused(
        here, "validate", trained, "--split", "nonsense"
    )


@pytest.mark.parametrize("command", ["resume", "validate", "predict"])
def test_a_run_whose_checkpoints_are_all_damaged(here, trained, command):
    shutil.copytree(trained, "run")
    for path in reading.checkpoint_paths(here / "run" / "checkpoints"):
        (path / "model.safetensors").write_bytes(b"rubbish")
    (here / "run" / ".lock").touch()
    assert "none of the 2 checkpoints in run/checkpoints is good" in refused(here, command, "run")


@pytest.mark.parametrize("file", ["recipe.yaml", "environment.json"])
def test_a_run_whose_own_files_are_damaged(here, trained, file):
    shutil.copytree(trained, "run")
    (here / "run" / file).write_text("{rubbish")
    assert f"run/{file}" in refused(here, "resume", "run")


# ------------------------------------------------------------------------------------------------- losses that fail


@pytest.mark.parametrize("valid_every", ["0", "1up"])
def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(here, valid_every):
    """The rate of update 21 blows the weights up; they are never saved, not even when only one checkpoint is kept."""
    explode = ["schedule.name=stepped", "schedule.at=[20up]", "schedule.factor=[1e30]", "schedule.warmup=0"]
    saving = ["checkpoint.every=1up", "checkpoint.keep=1", "checkpoint.best=false", f"valid.every={valid_every}"]
    done = podium_here("train", *TINY["mnist"], *explode, *saving, "--out", "run")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert "not finite after update 21" in line
    assert "earlier checkpoints are kept" in line

    run = open_run(here / "run")
    assert run.summary()["state"] == "failed"
    assert [path.name for path in reading.checkpoint_paths(run.checkpoints)] == ["update-00000020"]
    validated = podium_here("validate", "run")
    assert validated.returncode == 0, validated.stderr
    assert "after update 20" in validated.stdout
    assert "nan" not in validated.stdout
    for line in run.metrics_file.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON has no NaN


def test_a_loss_that_fails_between_two_looks_at_it(here):
    explode = ["optim.lr=1e30", "schedule.warmup=0", "checkpoint.every=0", "valid.every=0"]
    done = podium_here("train", *TINY["mnist"], *explode, "--out", "run")
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert "the training loss is not finite at or before update 5" in line
    run = open_run(here / "run")
    assert run.summary()["state"] == "failed"
    assert reading.checkpoint_paths(run.checkpoints) == []
