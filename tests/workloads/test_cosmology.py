"""The U-Net, its loss, its samples, and what is shown after training."""

import math

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from podium.data.source import empty_buffers
from podium.data.volumes.cube_symmetries import PUBLISHED, SYMMETRIES
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.transforms.thread_budget import Products
from podium.workloads.cosmology import make, predict
from podium.workloads.cosmology.data import CosmologySamples
from podium.workloads.cosmology.make import valid_size
from podium.workloads.cosmology.model import UNet, build_network
from podium.workloads.cosmology.section import CosmologyData, CosmologyMake, CosmologyModel
from podium.workloads.cosmology.workload import Workload

CROP = 32
SMALL = CosmologyModel(width=2, full_scale=False)
GENERATED = CosmologyData(source="generated", crop=CROP, samples=20, valid_samples=10)


# ---------------------------------------------------------------------------------------------------------- the model


def num_parameters(width: int, full_scale: bool) -> int:
    """By the reference: 64 weights for every pair of channels, and a bias for every channel that comes out."""
    w = width
    down = [(4, w), (w, 2 * w), (2 * w, 4 * w), (4 * w, 8 * w), (8 * w, 8 * w)]
    up = [(16 * w, 4 * w), (8 * w, 2 * w), (4 * w, w), (2 * w, 5)]
    if full_scale:
        down, up = [*down, (8 * w, 8 * w)], [(8 * w, 8 * w), (16 * w, 8 * w), *up]
    else:
        up = [(8 * w, 8 * w), *up]
    return sum(64 * before * after + after for before, after in down + up)


@pytest.mark.parametrize("full_scale", [True, False])
@pytest.mark.parametrize("width", [1, 3, 16, 64])
def test_number_of_parameters(width, full_scale):
    with torch.device("meta"):
        model = UNet(CosmologyModel(width=width, full_scale=full_scale))
    count = sum(param.numel() for param in model.parameters())
    assert count == num_parameters(width, full_scale)
    if (width, full_scale) == (64, True):
        assert count == 116_977_029


@pytest.mark.parametrize(("full_scale", "slope"), [(True, 0.01), (False, 0.01), (False, 0.2)])
def test_the_network_is_what_the_reference_describes(full_scale, slope, one_thread):
    """Written again without modules: every convolution down feeds the next one and the transposed one of its scale."""
    torch.manual_seed(0)
    section = CosmologyModel(width=2, full_scale=full_scale, slope=slope)
    model = build_network(section, 64)
    given = torch.randn(2, 4, 64, 64, 64)
    x, outputs = given, []
    for block in model.down:
        x = F.leaky_relu(F.conv3d(x, block.conv.weight, block.conv.bias, stride=2, padding=1), slope)
        outputs.append(x)
    sides = [output.shape[-1] for output in outputs]
    assert sides == [32, 16, 8, 4, 2, 1][: section.num_scales]
    for number, block in enumerate(model.up):
        if number:
            x = torch.cat((outputs[-1 - number], x), dim=1)
        x = F.conv_transpose3d(x, block.conv.weight, block.conv.bias, stride=2, padding=1)
        x = x.tanh() if number == section.num_scales - 1 else x.relu()
    assert torch.equal(model(given), x)
    assert x.shape == (2, 5, 64, 64, 64)


def test_weights_begin_small_and_biases_at_zero():
    torch.manual_seed(0)
    model = build_network(CosmologyModel(width=8, full_scale=False), CROP)
    weights = torch.cat([param.flatten() for name, param in model.named_parameters() if name.endswith("weight")])
    assert weights.std().item() == pytest.approx(0.02, abs=2e-4)
    assert weights.mean().item() == pytest.approx(0, abs=2e-4)
    assert all(not param.any() for name, param in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize(("crop", "full_scale", "least"), [(32, True, 64), (48, False, 32), (80, True, 64)])
def test_crops_that_cannot_be_halved_so_often_are_one_sentence(crop, full_scale, least):
    with pytest.raises(UserError, match=rf"crop = {crop}.*multiple of {least}"):
        build_network(CosmologyModel(width=1, full_scale=full_scale), crop)


def test_blocks_one_after_the_other_are_the_model(one_thread):
    """What a pipeline relies on, wherever it cuts: each block takes what the one before gives, skips included."""
    model = build_network(SMALL, CROP)
    given = torch.randn(3, 4, CROP, CROP, CROP)
    stages = Workload(SMALL, GENERATED).stages(model)
    assert [name for name, _ in stages] == [*(f"down {n}" for n in range(1, 6)), *(f"up {n}" for n in range(5, 0, -1))]
    stack, heights = (given,), []
    for _, block in stages:
        stack = block(*stack)
        heights.append(len(stack))
        assert all(len(tensor) == 3 for tensor in stack)
    assert torch.equal(stack[0], model(given))
    assert heights == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]  # nothing travels that no later block needs


def test_products_of_transposed_convolutions_are_counted(one_thread):
    """Stages are balanced by them: a transposed convolution has as many as the one that undoes it."""
    down, up = torch.nn.Conv3d(3, 7, 4, 2, 1), torch.nn.ConvTranspose3d(7, 3, 4, 2, 1)
    with Products(torch.nn.Sequential(down, up)) as products:
        up(down(torch.zeros(2, 3, 8, 8, 8)))
    assert products.count == 2 * (2 * 4**3 * 3 * 7 * 64)


# ----------------------------------------------------------------------------------------------------------- the loss


def fields(num_samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cube = (CROP, CROP, CROP)
    return {
        "nbody": torch.randn(num_samples, 4, *cube, generator=generator) * 0.1,
        "hydro": torch.randn(num_samples, 5, *cube, generator=generator) * 0.1,
    }


@pytest.mark.parametrize("lambda_rho", [0.0, 0.25])
def test_the_loss_is_the_l1_of_every_sample_summed(lambda_rho, one_thread):
    workload = Workload(SMALL.model_copy(update={"lambda_rho": lambda_rho}), GENERATED)
    model, batch = workload.build_model(), fields(3)
    output, target = model(batch["nbody"]).detach().double().numpy(), batch["hydro"].double().numpy()
    expected = 0.0
    for sample, true in zip(output, target, strict=True):
        rho = np.abs(np.exp(14 * sample[0]) - np.exp(14 * true[0])).mean()
        expected += np.abs(sample - true).mean() + lambda_rho * rho
    for training in (True, False):
        loss = workload.loss(model.train(training), batch)
        assert loss.count == 3
        assert loss.sum.item() == pytest.approx(expected, rel=1e-5)
    parts = [
        workload.loss(model, {name: rows[part] for name, rows in batch.items()}) for part in (slice(1), slice(1, 3))
    ]
    assert (parts[0].sum + parts[1].sum).item() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_validation_tells_every_field_apart(one_thread):
    workload = Workload(SMALL, GENERATED)
    model, batch = workload.build_model().eval(), fields(2)
    metrics = {name: float(total) / count for name, (total, count) in workload.loss(model, batch).metrics.items()}
    error = (model(batch["nbody"]) - batch["hydro"]).abs()
    assert metrics["density_l1"] == pytest.approx(float(error[:, 0].mean()), rel=1e-5)
    assert metrics["temperature_l1"] == pytest.approx(float(error[:, 1].mean()), rel=1e-5)
    assert metrics["velocity_l1"] == pytest.approx(float(error[:, 2:].mean()), rel=1e-5)
    rho = (14 * model(batch["nbody"])[:, 0]).exp() - (14 * batch["hydro"][:, 0]).exp()
    assert metrics["rho_l1"] == pytest.approx(float(rho.abs().mean()), rel=1e-5)
    assert workload.loss(model.train(), batch).metrics == {}


# --------------------------------------------------------------------------------------------------------- the samples


def write_box(path, size=CROP, **attributes):
    rng = np.random.default_rng(len(path.name))
    with h5py.File(path, "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            file[name] = rng.normal(0, 0.1, (channels, size, size, size)).astype(np.float32)
        file.attrs.update(attributes)


def files(tmp_path, **keys):
    return CosmologySamples(CosmologyData(source="files", path=tmp_path, crop=CROP, samples=6, valid_samples=3, **keys))


def first(source) -> dict[str, np.ndarray]:
    buffers = empty_buffers(source.fields, 1)
    source.gather(np.array([0]), buffers)
    return buffers


def test_splits_have_their_own_boxes_and_numbers(tmp_path):
    for name in ("train", "valid", "test"):
        write_box(tmp_path / f"{name}.h5")
    samples = files(tmp_path)
    sources = {split: samples.source(split) for split in ("train", "valid", "test")}
    assert {split: len(source) for split, source in sources.items()} == {"train": 6, "valid": 3, "test": 3}
    for source in sources.values():
        assert {name: field.shape for name, field in source.fields.items()} == {
            "nbody": (4, CROP, CROP, CROP),
            "hydro": (5, CROP, CROP, CROP),
        }
    assert not np.array_equal(first(sources["valid"])["hydro"], first(sources["test"])["hydro"])


def test_published_names_serve_and_the_box_for_validation_tests_where_there_is_no_other(tmp_path):
    write_box(tmp_path / "large.h5")
    write_box(tmp_path / "smaller.h5")
    samples = files(tmp_path, train_file="large.h5", valid_file="smaller.h5")
    assert samples.file("train") == tmp_path / "large.h5"
    assert samples.file("test") == samples.file("valid") == tmp_path / "smaller.h5"
    assert files(tmp_path, test_file="large.h5").file("test") == tmp_path / "large.h5"


def test_bad_data_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"workload\.data\.path is missing"):
        CosmologySamples(CosmologyData(source="files")).source("train")
    with pytest.raises(UserError, match=r"no file .*train\.h5"):
        files(tmp_path).source("train")
    with pytest.raises(UserError, match="path does not apply to"):
        load_recipe("cosmology/quick", ["workload.data.path=somewhere"])


def test_generated_splits_differ_and_have_the_shapes_of_files():
    samples = CosmologySamples(GENERATED)
    assert [len(samples.source(split)) for split in ("train", "valid", "test")] == [20, 10, 10]
    train = samples.source("train")
    assert train.fields == samples.fields
    everything = empty_buffers(train.fields, 20)
    train.gather(np.arange(20), everything)
    assert len({rows.tobytes() for rows in everything["hydro"]}) > 5
    assert everything["hydro"].max() < 1


@pytest.mark.parametrize("source", ["files", "simulated"])
def test_the_synthetic_mode_reads_and_makes_no_boxes(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    asked = {**GENERATED.model_dump(), "mode": "synthetic", "source": source}
    samples, generated = CosmologySamples(CosmologyData(**asked)), CosmologySamples(GENERATED)
    for split in ("train", "valid"):
        found, expected = (each.source(split) for each in (samples, generated))
        rows, same = empty_buffers(found.fields, 3), empty_buffers(expected.fields, 3)
        found.gather(np.arange(3), rows)
        expected.gather(np.arange(3), same)
        assert all(np.array_equal(rows[name], same[name]) for name in same)
        assert samples.cell_mpc(split) is None
    assert not list(tmp_path.iterdir())


def test_simulated_boxes_are_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    section = CosmologyData(source="simulated", size=CROP, crop=CROP, samples=4, valid_samples=2)
    made = CosmologySamples(section).file("train")
    assert tmp_path in made.parents
    written = made.stat().st_mtime_ns
    samples = CosmologySamples(section)
    assert samples.file("train").stat().st_mtime_ns == written
    assert samples.cell_mpc("test") == pytest.approx(100 / 1024)
    assert np.isfinite(first(samples.source("valid"))["hydro"]).all()


@pytest.mark.parametrize(
    ("size", "expected"),
    [(16, 32), (64, 32), (66, 66), (128, 66), (130, 66), (132, 66), (134, 66), (136, 68), (1024, 512)],
)
def test_boxes_for_validation_have_room_for_the_published_crops_where_the_training_box_has(size, expected):
    assert valid_size(size) == expected
    assert expected % 2 == 0
    if size > 64:
        assert expected >= 64 + 1


def test_made_boxes_follow_that_size(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(make, "simulate_shown", lambda folder, size, **options: asked.update(options, size=size))
    for given in (None, 40):
        Workload.make(CosmologyMake(size=128, out=tmp_path, valid_size=given))
        assert (asked["size"], asked["valid_size"], asked["seed"]) == (128, given or 66, 1)


@pytest.mark.parametrize("group", ["cube48", "published24", "none"])
def test_crops_are_turned_by_the_group_asked_for_and_in_validation_only_on_request(tmp_path, group):
    for name in ("train", "valid"):
        write_box(tmp_path / f"{name}.h5", size=40)
    numbers = np.arange(3_000)
    turns = {
        "cube48": set(range(48)),
        "published24": {SYMMETRIES.index(symmetry) for symmetry in PUBLISHED},
        "none": {0},
    }[group]
    for valid in (False, True):
        samples = files(tmp_path, augment={"group": group, "valid": valid})
        training = samples.source("train").of_epoch(0).drawn(numbers)
        fixed = samples.source("valid").drawn(numbers)
        assert {turn for _, _, turn in training} == turns
        assert {turn for _, _, turn in fixed} == (turns if valid else {0})


def test_recipes_of_the_time_of_the_old_slope_are_refused_and_told_the_new_key():
    """Their weights belong to a slope of 0.2, which they do not name."""
    with pytest.raises(UserError, match=r"augment\.turn \(did you mean workload\.data\.augment\.group\?\)"):
        load_recipe("cosmology/quick", ["workload.data.augment.turn=true"])


def test_crops_stay_inside_unless_the_box_is_periodic(tmp_path):
    for name in ("train", "valid"):
        write_box(tmp_path / f"{name}.h5", size=CROP + 3)
    numbers = np.arange(500)
    for periodic, starts in ((True, CROP + 3), (False, 4)):
        samples = files(tmp_path, periodic=periodic)
        for source in (samples.source("train").of_epoch(1), samples.source("valid")):
            drawn = np.array([start for _, start, _ in source.drawn(numbers)])
            assert [set(axis) for axis in drawn.T.tolist()] == [set(range(starts))] * 3


def test_boxes_can_be_made_in_a_folder_of_ones_own(tmp_path):
    Workload.make(CosmologyMake(size=32, out=tmp_path / "boxes", seed=3, valid_size=16, box_mpc=8.0))
    with h5py.File(tmp_path / "boxes" / "train.h5") as train, h5py.File(tmp_path / "boxes" / "test.h5") as test:
        assert train["Hydro"].shape == (5, 32, 32, 32)
        assert test["Nbody"].shape == (4, 16, 16, 16)
        assert train.attrs["box_mpc_per_h"] == pytest.approx(8.0)


# -------------------------------------------------------------------------------------------------- after the training


def crops(num_samples=4, seed=0):
    rng = np.random.default_rng(seed)
    nbody = rng.normal(0, 0.1, (num_samples, 4, 16, 16, 16)).astype(np.float32)
    target = np.concatenate([nbody[:, :1], rng.normal(0.3, 0.1, nbody[:, :1].shape), nbody[:, 1:]], axis=1)
    return nbody, target.astype(np.float32)


def test_guesses_without_a_model_score_what_is_known():
    nbody, target = crops()
    guesses = predict.guesses(nbody, target)
    copied = predict.losses(target, guesses["copying the N-body fields"], 0.0)
    assert copied["density"] == copied["velocity"] == 0
    # of normal numbers with spread s the mean |difference| from their mean is s·√(2/π)
    assert copied["temperature"] == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=0.02)
    assert copied["loss"] == pytest.approx(copied["temperature"] / 5)
    mean = predict.losses(target, guesses["predicting the mean"], 0.0)
    assert mean["loss"] == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=0.02)
    assert predict.losses(target, target + np.float32(0.01), 0.0)["loss"] == pytest.approx(0.01, rel=1e-4)


def test_losses_of_the_table_are_those_of_training(one_thread):
    workload = Workload(SMALL.model_copy(update={"lambda_rho": 0.1}), GENERATED)
    model, batch = workload.build_model().eval(), fields(2)
    loss = workload.loss(model, batch)
    output = model(batch["nbody"]).detach().numpy()
    assert predict.losses(batch["hydro"].numpy(), output, 0.1)["loss"] == pytest.approx(loss.sum.item() / 2, rel=1e-5)


def test_correlations_are_pearsons():
    _, target = crops()
    other = (target * 0.5 + np.random.default_rng(1).normal(0, 0.05, target.shape)).astype(np.float32)
    found = predict.correlations(target, other)
    assert found["density"] == pytest.approx(np.corrcoef(target[:, 0].ravel(), other[:, 0].ravel())[0, 1], rel=1e-6)
    assert found["velocity"] == pytest.approx(1 / math.sqrt(2), abs=0.01)
    assert math.isnan(predict.correlations(target, np.zeros_like(target))["temperature"])


def test_power_grows_with_the_square_of_the_contrast():
    rho = np.random.default_rng(0).normal(1, 0.1, (3, 16, 16, 16)).astype(np.float32)
    k, power = predict.mean_power(rho, 0.5)
    _, double = predict.mean_power(1 + 2 * (rho - 1), 0.5)
    assert double / power == pytest.approx(4 * np.ones(len(k)), rel=1e-4)
    # white noise: variance times the volume of a cell, at every k, fading or not
    assert power.mean() == pytest.approx(0.01 * 0.5**3, rel=0.1)


@pytest.mark.slow
def test_prediction_draws_and_counts(tmp_path):
    nbody, target = crops()
    prediction = predict.predict(nbody, target, target * np.float32(0.9), tmp_path, cell_mpc=0.1)
    assert [picture.path.name for picture in prediction.pictures] == ["slices.png", "distributions.png", "power.png"]
    assert all(picture.path.stat().st_size > 10_000 for picture in prediction.pictures)
    table, correlation = prediction.tables
    assert [row[0] for row in table.rows] == ["this run", "copying the N-body fields", "predicting the mean"]
    assert [row[0] for row in correlation.rows] == ["density", "temperature", "velocity"]
    assert correlation.rows[0][1] == "1.0000"
    assert correlation.rows[1][2] == "–"  # the copied temperature is a constant
