"""`workload.init_from`: fine-tuning from a run, a checkpoint, a safetensors file or a Hugging Face folder."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from podium.checkpoints.reading import checkpoint_paths, go_back, load, load_latest
from podium.recipe.loading import load_recipe, recipe_from_tree
from podium.recipe.sections.workload import InitSection
from podium.runs.folder import Run
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

RECIPE = [*TINY["mnist"], "train.length=4up", "batch.replicas=2", "valid.every=1up", "checkpoint.every=1up",
          "checkpoint.keep=9", "average.method=mean", "average.every=1up"]  # fmt: skip
#: so slow that weights stay what they were but for rounding
STILL = [*RECIPE, "train.length=1up", "optim.name=sgd", "optim.lr=1e-30", "average.method=none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("before") / "run"
    assert podium_here("train", *RECIPE, "seed=5", "--out", folder).returncode == 0
    return Run(folder)


@pytest.fixture(scope="module")
def file(run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("file") / "weights.safetensors"
    safetensors.torch.save_file(load_latest(run.checkpoints, pytest.fail).weights, path)
    return path


def started_from(tmp_path: Path, *keys: object) -> dict[str, torch.Tensor]:
    done = podium_here("train", *STILL, *keys, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    return load_latest(tmp_path / "run" / "checkpoints", pytest.fail).weights


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_training_starts_from_the_last_the_best_or_the_averaged_weights_of_a_run(run, tmp_path):
    last = load_latest(run.checkpoints, pytest.fail)
    assert_equal(started_from(tmp_path / "last", f"workload.init_from={run.path}"), last.weights)
    best = run.checkpoints / f"update-{run.summary()['valid']['best']['update']:08d}"
    keys = [f"workload.init_from.path={run.path}", "workload.init_from.checkpoint=best"]
    assert_equal(started_from(tmp_path / "best", *keys), load(best).weights)
    keys = [f"workload.init_from.path={run.path}", "workload.init_from.checkpoint=average"]
    assert_equal(started_from(tmp_path / "average", *keys), {**last.weights, **last.average})


def test_a_training_starts_from_a_checkpoint_or_a_file(run, file, tmp_path):
    first = checkpoint_paths(run.checkpoints)[0]
    assert_equal(started_from(tmp_path / "first", f"workload.init_from={first}"), load(first).weights)
    last = load_latest(run.checkpoints, pytest.fail).weights
    assert_equal(started_from(tmp_path / "file", f"workload.init_from={file}"), last)


def test_a_hugging_face_folder_serves_by_the_names_of_its_tensors(file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mine"}))
    shutil.copyfile(file, folder / "model.safetensors")
    assert_equal(started_from(tmp_path, f"workload.init_from={folder}"), safetensors.torch.load_file(file))


def test_prefixes_are_renamed_and_what_matched_is_told_in_a_table(file, tmp_path):
    tensors = safetensors.torch.load_file(file)
    names = list(tensors)
    renamed = {f"old.{name}": tensor for name, tensor in tensors.items()}
    renamed[f"old.{names[0]}"] = torch.zeros(1, 2, 3)
    renamed["old.another"] = renamed.pop(f"old.{names[1]}")
    safetensors.torch.save_file(renamed, tmp_path / "old.safetensors")
    keys = [f"workload.init_from.path={tmp_path / 'old.safetensors'}", 'workload.init_from.rename={"old.": ""}']
    told = podium_here("train", *STILL, *keys, "--out", tmp_path / "strict")
    assert_user_error(told, f"{names[0]} has shape [1, 2, 3]", "workload.init_from.strict=false")
    assert not (tmp_path / "strict").exists()
    done = podium_here("train", *STILL, *keys, "workload.init_from.strict=false", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    shown = " ".join((done.stdout + done.stderr).split())
    for part in ("loaded", "not in the file: as initialised", "not in the model: unused", "other shape", "another"):
        assert part in shown, shown
    found = load_latest(tmp_path / "run" / "checkpoints", pytest.fail).weights
    assert all(torch.equal(found[name], tensors[name]) for name in names[2:])
    assert not torch.equal(found[names[0]], tensors[names[0]])


@pytest.mark.parametrize(
    ("prepare", "parts"),
    [
        (lambda folder, file: folder / "nowhere", ["there is no such file or folder"]),
        (lambda folder, file: folder, ["expected a run, a checkpoint, a safetensors file or a folder"]),
        (lambda folder, file: written(folder, b"not tensors"), ["it is not a good safetensors file"]),
        (
            lambda folder, file: tensors_in(folder, {"other": torch.zeros(1)}),
            ["none of its tensors is one of the model"],
        ),
        (lambda folder, file: tensors_in(folder, part(file)), ["it lacks", "strict=false"]),
        (lambda folder, file: tensors_in(folder, part(file, -1) | {"x": torch.ones(1)}), ["the model has no x"]),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_is_written(prepare, parts, file, tmp_path):
    path = prepare(tmp_path, file)
    told = podium_here("train", *STILL, f"workload.init_from={path}", "--out", tmp_path / "run")
    assert_user_error(told, f"workload.init_from = {path}", *parts)
    assert not (tmp_path / "run").exists()


def test_runs_that_recorded_a_path_alone_are_still_read():
    tree = load_recipe(TINY["mnist"][0]).tree()
    tree["workload"]["init_from"] = "folder"
    assert recipe_from_tree(tree).workload.init_from == InitSection(path=Path("folder"))


def test_a_prefix_that_no_tensor_has_is_told(file, tmp_path):
    keys = [f"workload.init_from.path={file}", "workload.init_from.rename={encoder.: body.}"]
    told = podium_here("train", *STILL, *keys, "--out", tmp_path / "run")
    assert_user_error(told, "workload.init_from.rename: no tensor begins with 'encoder.'")


@pytest.mark.slow
def test_fine_tuning_gives_the_same_bits_on_two_instances_and_after_a_resume(file, podium, tmp_path):
    keys = [f"workload.init_from={file}", 'optim.freeze=["conv1.*"]', "optim.lr=0.01"]
    assert podium("train", *RECIPE, *keys, "train.length=3up", "--out", "one").returncode == 0
    assert podium("train", *RECIPE, *keys, "train.length=3up", "--out", "two", "--instances", 2).returncode == 0
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    assert one.summary()["weights_sha256"] == two.summary()["weights_sha256"]
    frozen, start = load_latest(one.checkpoints, pytest.fail).weights, safetensors.torch.load_file(file)
    assert all(torch.equal(frozen[name], start[name]) for name in start if name.startswith("conv1."))
    go_back(one.checkpoints, 1)
    aside = file.rename(tmp_path / "aside")  # a resume does not need it
    resumed = podium("resume", one.path)
    aside.rename(file)
    assert resumed.returncode == 0, resumed.stderr
    assert one.summary()["weights_sha256"] == two.summary()["weights_sha256"]


def written(folder: Path, data: bytes) -> Path:
    (folder / "file.safetensors").write_bytes(data)
    return folder / "file.safetensors"


def tensors_in(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return written(folder, safetensors.torch.save(tensors))


def part(file: Path, missing: int = 1) -> dict[str, torch.Tensor]:
    tensors = safetensors.torch.load_file(file)
    return dict(list(tensors.items())[max(0, missing) :])
