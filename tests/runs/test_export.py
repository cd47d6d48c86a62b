"""Models for other programs, and predictions from files: `podium export` and `podium predict --input`."""

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.runs.restored import plain_recipe, restored
from podium.train import train
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function that returns the run of a workload, trained for two updates, once."""
    known: dict[str, Run] = {}

    def run_of(workload: str) -> Run:
        if workload not in known:
            name, *overrides = TINY[workload]
            recipe = load_recipe(name, [*overrides, "train.length=2up", "schedule.warmup=0up", "valid.max_samples=8"])
            known[workload] = train(recipe, tmp_path_factory.mktemp("exported") / workload)
        return known[workload]

    return run_of


def exported(run, form, *args):
    done = podium_here("export", run.path, "--format", form, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("workload", sorted(TINY))
def test_weights_are_written_as_safetensors_to_the_bit(workload, runs, tmp_path):
    run = runs(workload)
    assert "equal to the bit" in exported(run, "safetensors", "--out", tmp_path / "mine.safetensors")
    written = safetensors.torch.load_file(tmp_path / "mine.safetensors")
    training, _ = restored(run, "last", plain_recipe(run))
    for name, tensor in training.state.model.state_dict().items():
        assert torch.equal(written[name], tensor)
    with safetensors.safe_open(tmp_path / "mine.safetensors", "pt") as file:
        assert file.metadata()["update"] == "2"


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_a_place_that_cannot_be_written_is_one_sentence(form, runs):
    name = "model.safetensors" if form == "safetensors" else "folder"
    done = podium_here("export", runs("bert").path, "--format", form, "--out", f"/proc/{name}")
    assert_user_error(done, f"/proc/{name}", "No such file or directory")


def test_whoever_may_read_other_files_may_read_exported_weights(runs, tmp_path):
    (tmp_path / "other").touch()
    exported(runs("mnist"), "safetensors", "--out", tmp_path / "mine.safetensors")
    assert (tmp_path / "mine.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch_export", "onnx"])
@pytest.mark.parametrize("workload", sorted(TINY))
def test_exported_models_give_the_same_outputs(workload, form, runs):
    said = exported(runs(workload), form)
    assert "takes any number of samples; outputs compared: equal" in said


@pytest.mark.slow
def test_a_program_of_torch_runs_without_podium(runs, tmp_path):
    run = runs("mnist")
    exported(run, "torch_export", "--out", tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    training, _ = restored(run, "last", plain_recipe(run))
    images = torch.rand(5, 1, 28, 28)
    torch.testing.assert_close(program(images), training.state.model.eval()(images))


def test_mistakes_write_nothing(runs, tmp_path):
    run = runs("mnist")
    assert_user_error(podium_here("export", run.path, "--format", "pickle"), "expected one of safetensors")
    (tmp_path / "here.onnx").write_text("mine")
    assert_user_error(
        podium_here("export", run.path, "--format", "onnx", "--out", tmp_path / "here.onnx"), "already exists"
    )
    assert (tmp_path / "here.onnx").read_text() == "mine"
    assert_user_error(
        podium_here("export", run.path, "--format", "onnx", "--out", tmp_path / "model.bin"), "ending in .onnx"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["here.onnx"]


def predicted(run, source, target):
    return podium_here("predict", run.path, "--input", source, "--output", target)


def test_predictions_from_files_are_those_of_the_model(runs, tmp_path):
    run = runs("mnist")
    images = np.random.default_rng(1).random((5, 1, 28, 28), np.float32)
    np.savez(tmp_path / "named.npz", image=images, other=np.zeros(3))
    np.save(tmp_path / "unnamed.npy", images)
    np.savetxt(tmp_path / "flat.csv", images.reshape(5, -1).astype(np.float64), delimiter=",", fmt="%.9g")
    header = ",".join(f"p{number}" for number in range(784))
    (tmp_path / "headed.csv").write_text(f"{header}\n{(tmp_path / 'flat.csv').read_text()}")
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["image"] = images
    training, _ = restored(run, "last")
    with torch.inference_mode():
        expected = training.state.model.eval()(torch.from_numpy(images)).numpy()
    for number, name in enumerate(["named.npz", "unnamed.npy", "flat.csv", "headed.csv", "file.h5"]):
        target = tmp_path / f"out-{number}.npz"
        done = predicted(run, tmp_path / name, target)
        assert done.returncode == 0, done.stderr
        assert "5 × 10" in done.stdout
        np.testing.assert_allclose(np.load(target)["output"], expected, rtol=1e-5, atol=1e-6)


def test_a_model_with_several_inputs_takes_them_by_name(runs, tmp_path):
    run = runs("bert")
    training, _ = restored(run, "last")
    batch = training.task.workload.example(3)
    np.savez(tmp_path / "in.npz", **{name: tensor.numpy() for name, tensor in batch.items()})
    done = predicted(run, tmp_path / "in.npz", tmp_path / "out.npz")
    assert done.returncode == 0, done.stderr
    assert all(len(array) == 3 for array in np.load(tmp_path / "out.npz").values())


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"image": np.zeros((2, 3), np.float32)}, "image has the shape (2, 3): expected (samples, 1, 28, 28)"),
        ({"image": np.zeros((2, 1, 28, 28), complex)}, "image holds complex128: expected float32"),
        ({"a": np.zeros(2), "b": np.zeros(2)}, "no array image: expected image (there are: a, b)"),
        ({"image": np.float32(1)}, "image has the shape ()"),
    ],
)
def test_samples_that_do_not_fit_are_told(arrays, said, runs, tmp_path):
    np.savez(tmp_path / "in.npz", **arrays)
    assert_user_error(predicted(runs("mnist"), tmp_path / "in.npz", tmp_path / "out.npz"), said)
    assert not (tmp_path / "out.npz").exists()


def test_files_that_hold_no_arrays_are_told(runs, tmp_path):
    run = runs("mnist")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "words.csv").write_text("a,b\nc,d\n")
    (tmp_path / "noise.npz").write_bytes(b"\x00\xff" * 99)
    (tmp_path / "noise.h5").write_bytes(b"\x00\xff" * 99)
    (tmp_path / "text.txt").write_text("1")
    for name in ("objects.npy", "words.csv", "noise.npz", "noise.h5", "text.txt", "absent.npz"):
        assert_user_error(predicted(run, tmp_path / name, tmp_path / "out.npz"), name)
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file["image"] = h5py.ExternalLink("noise.h5", "image")
    assert_user_error(predicted(run, tmp_path / "linked.h5", tmp_path / "out.npz"), "linked.h5")
    assert_user_error(podium_here("predict", run.path, "--input", tmp_path / "a.npz"), "go together")
