"""The neuron workload: the published files, its models and loss, what it shows after training, its simulated data."""

import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from podium.data.source import empty_buffers
from podium.data.sources.hdf5 import Hdf5Source
from podium.errors import UserError
from podium.machine import atomic_files
from podium.workloads.neuron import data as neuron_data
from podium.workloads.neuron.data import find_layout
from podium.workloads.neuron.model import build_network
from podium.workloads.neuron.predict import quality
from podium.workloads.neuron.section import NeuronData, NeuronModel
from podium.workloads.neuron.simulator import simulate
from podium.workloads.neuron.workload import Workload
from tests.support.neuron_files import PROBE, SIZES, write_meta, write_published

SMALL = NeuronModel(filters=(4, 16, 32), kernels=(4, 2, 2), pools=(4, 2, 2), linear=(128, 128))


def workload(model=SMALL, **data) -> Workload:
    return Workload(model, NeuronData(**data))


def files(folder: Path, **data) -> Workload:
    return workload(source="files", path=folder, **data)


def everything(source):
    out = empty_buffers(source.fields, len(source))
    source.gather(np.arange(len(source)), out)
    return out


def outputs_of(model, load):
    """What the system hands to `predict`."""

    def outputs(split, max_samples=None):
        fields = everything(load.source(split))
        with torch.inference_mode():
            return fields, {"output": model.eval()(torch.from_numpy(fields["frames"])).numpy()}

    return outputs


# --------------------------------------------------------------------------------------------- the published files


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("budget", [None, 0])
def test_published_files_are_read_in_single_precision(tmp_path, dtype, budget):
    arrays = write_published(tmp_path, dtype=dtype)
    load = files(tmp_path, memory_budget_gb=budget)
    for split, domain in (("train", "train"), ("valid", "val"), ("test", "test")):
        source = load.source(split)
        assert len(source) == SIZES[domain]
        assert source.resident == (budget is None)
        out = everything(source)
        assert out["frames"].dtype == np.float32
        np.testing.assert_array_equal(out["frames"], arrays[f"{domain}_frames"].astype(np.float32))
        np.testing.assert_array_equal(out["target"], arrays[f"{domain}_unitStar_par"])


def test_max_samples_takes_the_first_and_shrinks_all_splits_alike(tmp_path):
    arrays = write_published(tmp_path)
    load = files(tmp_path, max_samples=13)
    assert [len(load.source(split)) for split in ("train", "valid", "test")] == [13, 6, 3]
    np.testing.assert_array_equal(everything(load.source("train"))["target"], arrays["train_unitStar_par"][:13])
    assert len(files(tmp_path, max_samples=1000).source("valid")) == SIZES["val"]


@pytest.mark.parametrize(("probes", "columns"), [(2, [0, 1]), ((3, 0), [3, 0]), (4, [0, 1, 2, 3])])
def test_fewer_probes_reach_a_model_that_fits_them(tmp_path, probes, columns):
    arrays = write_published(tmp_path)
    load = files(tmp_path, probes=probes)
    out = everything(load.source("test"))
    np.testing.assert_array_equal(out["frames"], arrays["test_frames"][..., columns].astype(np.float32))
    model = load.build_model()
    assert model(torch.from_numpy(out["frames"])).shape == (SIZES["test"], 15)
    assert load.example(3)["frames"].shape == (3, 1600, len(columns))


def test_one_memory_budget_serves_all_splits(tmp_path):
    write_published(tmp_path)
    row_bytes = 1600 * 4 * 2 + 15 * 4
    load = files(tmp_path, memory_budget_gb=(SIZES["train"] + 1) * row_bytes / 1e9)
    assert load.source("train").resident
    assert not load.source("valid").resident


def test_the_cell_may_be_left_out_when_there_is_one(tmp_path):
    write_published(tmp_path, "bbp153")
    assert len(files(tmp_path).source("train")) == 50
    arrays = write_published(tmp_path, "witness2c")
    with pytest.raises(UserError, match=r"set workload\.data\.cell to one of bbp153, witness2c"):
        files(tmp_path).source("train")
    chosen = everything(files(tmp_path, cell="witness2c").source("test"))
    np.testing.assert_array_equal(chosen["target"], arrays["test_unitStar_par"])


@pytest.mark.parametrize("spelling", ["parName", "parNames", "paramNames"])
def test_parameter_names_come_from_the_meta_file(tmp_path, spelling):
    write_published(tmp_path)
    write_meta(tmp_path, **{"parName": None, spelling: [f"g{i}" for i in range(15)]})
    assert find_layout(tmp_path, PROBE, None).parameter_names == tuple(f"g{i}" for i in range(15))


def test_parameters_without_names_are_numbered(tmp_path):
    arrays = write_published(tmp_path, num_parameters=14)
    write_meta(tmp_path, parName=None)
    load = files(tmp_path)
    assert find_layout(tmp_path, PROBE, None).parameter_names == tuple(f"p{i}" for i in range(14))
    np.testing.assert_array_equal(everything(load.source("test"))["target"], arrays["test_unitStar_par"])
    assert load.build_model()(torch.zeros(2, 1600, 4)).shape == (2, 14)


def test_unreadable_parameters_without_names_are_one_sentence(tmp_path):
    write_published(tmp_path)
    write_meta(tmp_path, parName=None)
    (path,) = tmp_path.glob("*.h5")
    with h5py.File(path, "r+") as file:
        del file["train_unitStar_par"]
    assert "no dataset 'train_unitStar_par'" in fails(files(tmp_path))
    with h5py.File(path, "r+") as file:
        file["train_unitStar_par"] = np.zeros(50, np.float32)
    assert "train_unitStar_par has shape (50,), expected (samples, parameters)" in fails(files(tmp_path))


def fails(load: Workload, split="train"):
    with pytest.raises(UserError) as caught:
        load.source(split)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_files_without_a_path():
    assert "workload.data.path" in fails(workload(source="files"))


def test_missing_meta_file(tmp_path):
    assert f"there is no file {tmp_path / f'meta.cellSpike_{PROBE}.yaml'}" == fails(files(tmp_path))


def test_missing_cell_file_names_the_others(tmp_path):
    write_published(tmp_path)
    text = fails(files(tmp_path, cell="witness2c"))
    assert str(tmp_path / "witness2c_excite.cellSpike_4prB8kHz.data.h5") in text
    assert "there are files for bbp153" in text


def test_no_cell_file_at_all(tmp_path):
    write_meta(tmp_path)
    assert "there is no file" in fails(files(tmp_path))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dataInfo: [1, 2", "not valid YAML"),
        ("dataInfo: {numFeature: 4, numFeature: 5}", "not valid YAML"),
        ("other: 1", "has no section dataInfo"),
        ("dataInfo: {numFeature: 4, parName: [a]}", "dataInfo.h5nameTemplate"),
        ("dataInfo: {h5nameTemplate: 'x*.h5', parName: [a]}", "dataInfo.numFeature"),
        ("dataInfo: {h5nameTemplate: 'x*.h5', numFeature: 4, parName: a}", "dataInfo.parName must be a list"),
    ],
)
def test_bad_meta_file(tmp_path, text, part):
    (tmp_path / f"meta.cellSpike_{PROBE}.yaml").write_text(text)
    message = fails(files(tmp_path))
    assert part in message
    assert "meta.cellSpike_" in message


def test_wrong_parameter_count(tmp_path):
    write_published(tmp_path, num_parameters=14)
    text = fails(files(tmp_path))
    assert "has 14 parameters" in text
    assert "names 15" in text


def test_wrong_number_of_probes(tmp_path):
    write_published(tmp_path)
    write_meta(tmp_path, numFeature=3)
    assert "train_frames has shape (50, 1600, 4), expected (samples, any, 3)" in fails(files(tmp_path))


def test_truncated_data_file(tmp_path):
    write_published(tmp_path)
    (path,) = tmp_path.glob("*.h5")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "truncated" in fails(files(tmp_path))


def test_missing_domain(tmp_path):
    write_published(tmp_path)
    (path,) = tmp_path.glob("*.h5")
    with h5py.File(path, "r+") as file:
        del file["val_frames"]
    load = files(tmp_path)
    load.source("train")
    assert "no dataset 'val_frames'" in fails(load, "valid")


def test_probe_that_does_not_exist(tmp_path):
    write_published(tmp_path)
    assert "numbers from 0 to 3" in fails(files(tmp_path, probes=(0, 4)))


@pytest.mark.parametrize("keys", [{"path": "x"}, {"cell": "bbp153"}, {"probes": ()}, {"probes": (1, 1)}])
def test_sections_that_contradict_themselves_are_refused(keys):
    with pytest.raises(ValidationError):
        NeuronData(source="simulated", **keys)


# --------------------------------------------------------------------------------------------- models and loss


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


def network(section, probes=4):
    return build_network(section, 1600, probes, 15, (np.zeros(probes, np.float32), np.ones(probes, np.float32)))


def test_full_model_has_the_published_shape():
    convolutions = (4 * 30 * 4 + 30) + (30 * 90 * 4 + 90) + (90 * 180 * 4 + 180)
    features = 24 * 180  # 1600 bins: 1597 -> 399, 396 -> 99, 96 -> 24
    norm = 2 * features
    linear = (features + 1) * 512 + 2 * (512 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 128
    output = (128 + 1) * 15
    assert num_parameters(network(NeuronModel())) == convolutions + norm + linear + output == 2_988_843


def test_small_model_has_the_published_shape():
    convolutions = (4 * 4 * 4 + 4) + (4 * 2 * 16 + 16) + (16 * 2 * 32 + 32)
    features = 99 * 32  # 1597 -> 399, 398 -> 199, 198 -> 99
    linear = (features + 1) * 128 + (128 + 1) * 128
    assert num_parameters(network(SMALL)) == convolutions + 2 * features + linear + (128 + 1) * 15


def test_lstm_reads_patches_of_bins():
    section = NeuronModel(kind="lstm", lstm_hidden=32, lstm_layers=2, lstm_patch=16, linear=(64,))
    lstm = 4 * 32 * (4 * 16 + 32 + 2) + 4 * 32 * (32 + 32 + 2)
    model = network(section)
    assert num_parameters(model) == lstm + 2 * 32 + (32 + 1) * 64 + (64 + 1) * 15
    assert model(torch.randn(3, 1600, 4)).shape == (3, 15)


@pytest.mark.parametrize("section", [SMALL, NeuronModel(), NeuronModel(kind="lstm", lstm_patch=100)])
@pytest.mark.parametrize("probes", [1, 4])
def test_models_go_from_frames_to_parameters(section, probes):
    assert network(section, probes)(torch.randn(2, 1600, probes)).shape == (2, 15)


def test_stages_in_a_row_are_the_model():
    load = workload(SMALL.model_copy(update={"standardise": True}), source="generated", samples=20)
    model = load.build_model().eval()
    frames = torch.randn(3, 1600, 4)
    x = frames
    for _, block in load.stages(model):
        x = block(x)
    torch.testing.assert_close(x, model(frames), rtol=0, atol=0)
    assert [name for name, _ in load.stages(model)] == [
        "input", "conv1", "conv2", "conv3", "flatten", "norm", "linear1", "linear2", "output",
    ]  # fmt: skip


def test_layers_that_do_not_fit_the_trace_are_refused():
    with pytest.raises(UserError, match="block 2"):
        network(NeuronModel(pools=(40, 40, 4)))
    with pytest.raises(UserError, match="lstm_patch"):
        network(NeuronModel(kind="lstm", lstm_patch=7))
    with pytest.raises(ValidationError, match="one entry for each block"):
        NeuronModel(filters=(4, 8))


def test_voltages_can_be_standardised_by_the_training_data(tmp_path):
    arrays = write_published(tmp_path, dtype="float32")
    section = SMALL.model_copy(update={"standardise": True})
    state = Workload(section, NeuronData(source="files", path=tmp_path)).build_model().state_dict()
    frames = arrays["train_frames"].astype(np.float64)
    np.testing.assert_allclose(state["input.mean"], frames.mean(axis=(0, 1)), atol=6e-4)
    np.testing.assert_allclose(1 / state["input.scale"], frames.std(axis=(0, 1)), atol=6e-4)
    assert "input.mean" not in files(tmp_path).build_model().state_dict()


def test_loss_is_the_sum_over_samples_of_the_mean_over_parameters():
    load = workload(source="generated", samples=20)
    model = load.build_model().eval()
    batch = {"frames": torch.randn(5, 1600, 4), "target": torch.rand(5, 15)}
    error = model(batch["frames"]) - batch["target"]
    loss = load.loss(model, batch)
    assert loss.count == 5
    torch.testing.assert_close(
        loss.sum / loss.count, torch.nn.functional.mse_loss(model(batch["frames"]), batch["target"])
    )
    mae, count = loss.metrics["mae"]
    assert count == 5
    torch.testing.assert_close(mae / count, error.abs().mean())
    loss.sum.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert load.loss(model.train(), batch).metrics == {}


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    load = workload(source="generated", samples=20)
    model = load.build_model()
    groups = load.param_groups(model)
    names = [name for group in groups for name in group.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    shapes = {name: p.dim() for name, p in model.named_parameters()}
    assert all(group.weight_decay == (shapes[name] > 1) for group in groups for name in group.params)


def test_generated_samples_have_the_published_shape():
    load = workload(source="generated", samples=100, max_samples=50, probes=3)
    assert [len(load.source(split)) for split in ("train", "valid", "test")] == [50, 5, 5]
    out = everything(load.source("valid"))
    assert out["frames"].shape == (5, 1600, 3)
    assert np.abs(out["target"]).max() <= 1


# --------------------------------------------------------------------------------------------- after training


def test_quality_of_perfect_and_of_useless_predictions():
    rng = np.random.default_rng(0)
    target = rng.uniform(-1, 1, (1000, 2)).astype(np.float32)
    output = np.stack([target[:, 0], np.full(1000, target[:, 1].mean() + 0.5)], axis=1)
    perfect, useless = quality(target, output, ["a", "b"])
    assert (perfect.name, perfect.mse, perfect.r2) == ("a", 0.0, 1.0)
    assert useless.bias == pytest.approx(0.5, abs=1e-6)
    assert useless.r2 < 0


def test_predict_writes_pictures_and_a_table_of_residuals(tmp_path):
    write_published(tmp_path)
    load = files(tmp_path)
    model = load.build_model()
    prediction = load.predict(model, outputs_of(model, load), tmp_path / "pictures")
    for picture in prediction.pictures:
        assert picture.path.parent == tmp_path / "pictures"
        assert picture.path.read_bytes().startswith(b"\x89PNG")
        assert picture.title
        assert picture.caption
    (table,) = prediction.tables
    assert table.columns == ["parameter", "bias", "std", "MSE", "R²"]
    assert len(table.rows) == 16
    mse = [float(row[3]) for row in table.rows[:-1]]
    assert mse == sorted(mse)


# --------------------------------------------------------------------------------------------- the simulated cells


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    return tmp_path / "neuron"


@pytest.fixture
def made(monkeypatch):
    """`make_dataset` replaced by one that writes the layout at once; a list of the folders it was given."""
    calls = []

    def make_dataset(folder, samples, *, seed, cell, progress):
        calls.append(folder)
        write_published(folder, cell)
        progress(samples, samples)
        return simulate.DatasetInfo(folder, folder, samples, 0.5)

    monkeypatch.setattr(simulate, "make_dataset", make_dataset)
    return calls


def test_simulated_cells_are_made_once_and_kept(cache, made, capsys):
    load = workload(source="simulated", samples=50, seed=3)
    assert not cache.exists()
    assert len(load.source("train")) == 50
    assert "cells/s" in capsys.readouterr().err
    assert len(workload(source="simulated", samples=50, seed=3).source("train")) == 50
    assert "kept in" in capsys.readouterr().err
    assert len(made) == 1
    workload(source="simulated", samples=50, seed=4).source("train")
    assert len(made) == 2
    names = {path.name for path in cache.iterdir() if not path.name.endswith(".lock")}
    assert names == {f"v{simulate.VERSION}-seed3-50", f"v{simulate.VERSION}-seed4-50"}


def test_a_failed_simulation_leaves_nothing_behind(cache, made, monkeypatch):
    def disk_full(folder, samples, **_):
        (folder / "part").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(simulate, "make_dataset", disk_full)
    with pytest.raises(UserError, match="the disk is full"):
        workload(source="simulated", samples=50).source("train")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_makers_at_the_same_time_agree_on_one_data_set(cache, made, monkeypatch):
    monkeypatch.setattr(atomic_files.fcntl, "flock", lambda *_: None)  # as where locks do not reach
    together = threading.Barrier(2)
    plain = simulate.make_dataset

    def make_dataset(folder, samples, **options):
        together.wait(timeout=20)
        return plain(folder, samples, **options)

    monkeypatch.setattr(simulate, "make_dataset", make_dataset)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(neuron_data.simulated_folder(50, 1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert len(set(folders)) == 1
    assert len(workload(source="simulated", samples=50, seed=1).source("train")) == 50
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_simulated_cells_can_be_learnt_from_and_simulated_again(cache, tmp_path):
    load = workload(source="simulated", samples=40)
    source = load.source("train")
    assert isinstance(source, Hdf5Source)
    assert len(source) == 40
    model = load.build_model()
    assert model(torch.from_numpy(everything(source)["frames"])).shape == (40, 15)
    prediction = load.predict(model, outputs_of(model, load), tmp_path)
    assert {row[0] for row in prediction.tables[0].rows[:-1]} == {p.published_name for p in simulate.PARAMETERS}
    assert "simulated again" in prediction.pictures[1].caption
    test = everything(load.source("test"))
    samples = neuron_data.NeuronSamples(NeuronData(source="simulated", samples=40, probes=(2,)))
    again = samples.resimulate(test["target"])[..., 0]
    offset, unit = samples.layout.volts
    assert np.abs(again - (test["frames"][..., 2] * unit + offset)).max() < 0.1  # stored in half precision
