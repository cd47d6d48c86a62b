"""Real pictures for cnn: CIFAR as it is unpacked, folders of files as people keep them, and what is cut out of them."""

import numpy as np
import pytest
import torch
from PIL import Image

from podium.data.source import empty_buffers
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.workloads.cnn.section import CnnData, CnnModel
from podium.workloads.cnn.workload import Workload
from tests.support.processes import assert_user_error, podium_here

NUM_CLASSES = 10
SHORT = ["train.length=4up", "batch.micro=8", "schedule.warmup=0", "schedule.name=constant", "valid.micro=16",
         "engine.threads=1", "log.tensorboard=false", "log.report=false"]  # fmt: skip


def cifar_images(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (num, 32, 32, 3) sorted by their labels, as folders are."""
    images = np.random.default_rng(seed).integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
    return images, np.arange(num) * NUM_CLASSES // num


@pytest.fixture(scope="module")
def sets():
    return {"train": cifar_images(100, 1), "test": cifar_images(20, 2)}


@pytest.fixture(scope="module")
def binary(sets, tmp_path_factory):
    """The folder in which the published archive was unpacked."""
    folder = tmp_path_factory.mktemp("cifar")
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir()
    for part, names in {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}.items():
        images, labels = sets[part]
        rows = np.concatenate(
            [labels[:, None].astype(np.uint8), images.transpose(0, 3, 1, 2).reshape(-1, 3072)], axis=1
        )
        for name, some in zip(names, np.split(rows, len(names)), strict=True):
            some.tofile(inner / name)
    return folder


@pytest.fixture(scope="module")
def pictures(sets, tmp_path_factory):
    """The same as PNG files, with a folder `test`."""
    folder = tmp_path_factory.mktemp("pictures")
    for part, (images, labels) in sets.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:04}.png")
    return folder


def gathered(source, places=None) -> np.ndarray:
    out = empty_buffers(source.fields, len(source))
    source.gather(np.arange(len(source)), out, places)
    return out["image"]


def test_cifar_is_found_in_the_folder_of_its_archive_and_a_folder_of_its_pictures_trains_to_the_same_weights(
    binary, pictures, tmp_path
):
    weights = {}
    for path in (binary, binary / "cifar-10-batches-bin", pictures):
        run = Run(tmp_path / f"run{len(weights)}")
        done = podium_here("train", "cnn/cifar_resnet20", "workload.model.size=8", f"workload.data.path={path}", *SHORT,
                           "--out", run.path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        weights[path] = (run.summary()["weights_sha256"], run.summary()["valid"]["last"])
    assert len({str(found) for found in weights.values()}) == 1


@pytest.mark.parametrize("split", ["train", "valid"])
def test_models_for_cifar_take_pictures_whole_and_at_its_size(split, pictures, sets):
    workload = Workload(CnnModel(size=20), CnnData(source="files", path=pictures))
    source = workload.source(split)
    assert source.fields["image"].shape == (32, 32, 3)
    images = gathered(source, np.arange(len(source)) if split == "train" else None)
    assert np.array_equal(images, sets["train" if split == "train" else "test"][0])
    assert workload.build_model()(workload.inputs(workload.example())[0]).shape == (2, NUM_CLASSES)
    assert Workload(CnnModel(size=50), CnnData(source="files", path=pictures)).example()["image"].shape[1] == 224


def varied(pictures, **augment) -> tuple[bool, bool]:
    """Whether a training cuts windows out of pictures, and whether it crops them within a border."""
    workload = Workload(CnnModel(size=20), CnnData(source="files", path=pictures, augment={"flip": False, **augment}))
    source = workload.source("train")
    drawn = gathered(source, np.arange(len(source)))
    model = workload.build_model().train()
    rows = {"image": np.full((16, 32, 32, 3), 255, np.uint8), "label": np.zeros(16, np.int64)}

    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    workload.loss(model, {name: torch.from_numpy(part) for name, part in rows.items()})
    return not np.array_equal(drawn, gathered(source)), bool((seen[0].amin((0, 2, 3)) != seen[0].amax((0, 2, 3))).any())


def test_pictures_are_cropped_in_one_way_at_a_time(pictures):
    assert varied(pictures) == (False, True)
    assert varied(pictures, window=[0.3, 0.9]) == (True, False)
    assert varied(pictures, window="off") == (False, True)
    assert varied(pictures, window="off", pad_crop=0) == (False, False)


def test_windows_have_the_range_that_the_recipe_gives(pictures):
    data = ["workload.data.source=files", f"workload.data.path={pictures}", "workload.data.augment.window=[0.5, 1]"]
    assert load_recipe("cnn/resnet50", data).workload.data.augment.window == (0.5, 1.0)
    assert (
        load_recipe("cnn/resnet50", [*data[:2], "workload.data.augment.window=off"]).workload.data.augment.window
        == "off"
    )
    # a window of all the area is the picture itself
    assert not varied(pictures, window=[1.0, 1.0])[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["workload.data.augment.window=[0.5, 1]", "workload.data.augment.pad_crop=4"],
            "pad_crop = 4: expected 0",
        ),
        (["workload.data.augment.window=[1, 0.5]"], "expected the smaller share first"),
        (["workload.data.augment.window=[0.5, 1]"], "window applies to JPEG and PNG files only"),
        (["workload.data.valid_path=."], "valid_path applies to JPEG and PNG files only"),
        (["workload.data.source=files", "workload.data.format=folder"], "workload.data.path is missing"),
    ],
)
def test_what_contradicts_is_told(overrides, said, tmp_path):
    assert_user_error(podium_here("train", "cnn/quick", *overrides, "--out", tmp_path / "run"), said)


def test_pictures_for_validation_may_be_elsewhere(pictures, tmp_path):
    (tmp_path / "own" / "train").parent.mkdir()
    (tmp_path / "own" / "train").symlink_to(pictures / "train")
    data = {"source": "files", "path": tmp_path / "own"}
    with pytest.raises(UserError, match=r"called validation or val or valid or test in .*own: `workload.data.va"):
        Workload(CnnModel(size=20), CnnData(**data)).source("valid")
    there = Workload(CnnModel(size=20), CnnData(**data, valid_path=pictures / "test"))
    assert [len(there.source(split)) for split in ("train", "valid", "test")] == [100, 20, 20]
    held_out = Workload(CnnModel(size=20), CnnData(**data, valid_samples=30))
    assert [len(held_out.source(split)) for split in ("train", "valid", "test")] == [70, 30, 30]
    with pytest.raises(UserError, match="There is no folder nowhere to read images from"):
        Workload(CnnModel(size=20), CnnData(**data, valid_path="nowhere")).source("valid")


def test_fewer_pictures_of_a_folder_are_of_all_classes(pictures):
    source = Workload(CnnModel(size=20), CnnData(source="files", path=pictures, max_samples=10)).source("train")
    out = empty_buffers(source.fields, 10)
    source.gather(np.arange(10), out)
    assert sorted(out["label"]) == list(range(NUM_CLASSES))
