"""The mnist workload: files in, normalised samples out, the published network, and the pictures after training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from podium.data.formats.idx import write_idx
from podium.data.source import Source, empty_buffers
from podium.errors import UserError
from podium.workloads.mnist.section import MnistData, MnistModel
from podium.workloads.mnist.workload import Workload

FASHION = Path("/usr/share/datasets/fashion-mnist")
needs_fashion = pytest.mark.skipif(
    not FASHION.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)


pytestmark = pytest.mark.usefixtures("one_thread")


def _workload(data: dict | None = None, model: dict | None = None) -> Workload:
    return Workload(MnistModel.model_validate(model or {}), MnistData.model_validate(data or {}))


def _gathered(source: Source, samples: object = None) -> dict[str, np.ndarray]:
    numbers = np.arange(len(source)) if samples is None else np.asarray(samples, np.int64)
    out = empty_buffers(source.fields, len(numbers))
    source.gather(numbers, out)
    return out


def _arrays(num_samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (num_samples, 28, 28)).astype(np.uint8)
    return images, random.integers(0, 10, num_samples).astype(np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """50 training and 20 test samples, under published names of different kinds."""
    place = tmp_path / "data"
    place.mkdir()
    images, labels = _arrays(50, 0)
    write_idx(place / "train-images-idx3-ubyte.gz", images)
    write_idx(place / "train-labels.idx1-ubyte", labels)
    images, labels = _arrays(20, 1)
    write_idx(place / "t10k-images.idx3-ubyte.gz", images)
    write_idx(place / "t10k-labels-idx1-ubyte", labels)
    return place


def test_samples_are_delivered_normalised(folder):
    source = _workload({"path": folder}).source("train")
    images, labels = _arrays(50, 0)
    samples = [7, 0, 44, 7]
    got = _gathered(source, samples)
    assert got["image"].shape == (4, 1, 28, 28)
    assert got["image"].dtype == np.float32
    assert got["label"].dtype == np.int64
    assert np.array_equal(got["label"], labels[samples])
    np.testing.assert_allclose(got["image"][:, 0], (images[samples] / 255 - 0.1307) / 0.3081, atol=1e-6)


def test_a_home_folder_may_be_abbreviated(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(_workload({"path": "~/data"}).source("test")) == 20


def test_a_tenth_of_the_training_samples_is_held_out_by_default(folder):
    workload = _workload({"path": folder})
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [45, 5, 20]


def test_generated_samples_for_validation_are_drawn_beside_the_others():
    data = {"source": "generated", "generated_train": 50, "generated_test": 20}
    parts = {split: _gathered(_workload(data).source(split))["image"] for split in ("train", "valid", "test")}
    assert [len(images) for images in parts.values()] == [50, 20, 20]
    assert np.array_equal(parts["train"], _gathered(_workload({**data, "valid_samples": 0}).source("train"))["image"])
    assert not np.array_equal(parts["valid"], parts["test"])


def test_the_test_set_can_be_had_without_the_training_files(folder):
    for file in folder.glob("train-*"):
        file.unlink()
    assert len(_workload({"path": folder}).source("test")) == 20


def test_without_held_out_samples_the_test_set_validates(folder):
    workload = _workload({"path": folder, "valid_samples": 0})
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [50, 20, 20]
    assert np.array_equal(_gathered(workload.source("valid"))["image"], _gathered(workload.source("test"))["image"])


@pytest.mark.parametrize("source", ["files", "generated"])
def test_held_out_samples_are_the_last_training_samples(folder, source):
    data = {"source": source, "path": folder, "generated_train": 50, "generated_test": 20}
    whole = _gathered(_workload({**data, "valid_samples": 0}).source("train"))
    workload = _workload({**data, "valid_samples": 15})
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [35, 15, 20]
    for name in ("image", "label"):
        assert np.array_equal(_gathered(workload.source("train"))[name], whole[name][:35])
        assert np.array_equal(_gathered(workload.source("valid"))[name], whole[name][35:])


@pytest.mark.parametrize("source", ["files", "generated"])
def test_max_samples_limits_each_split_to_its_first(folder, source):
    data = {"source": source, "path": folder, "generated_train": 50, "generated_test": 20, "valid_samples": 15}
    whole, limited = _workload(data), _workload({**data, "max_samples": 12})
    for split in ("train", "valid", "test"):
        assert len(limited.source(split)) == 12
        assert np.array_equal(_gathered(limited.source(split))["label"], _gathered(whole.source(split))["label"][:12])


def test_generated_samples_have_the_fields_of_real_ones_and_need_no_files(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "nothing"))
    generated = _workload({"source": "generated"})
    assert [len(generated.source(split)) for split in ("train", "valid", "test")] == [60_000, 10_000, 10_000]
    assert dict(generated.source("train").fields) == dict(_workload({"path": folder}).source("train").fields)
    assert set(_gathered(generated.source("test"))["label"]) == set(range(10))


def test_splits_of_one_file_share_its_memory(folder):
    workload = _workload({"path": folder, "valid_samples": 10})
    train, valid = workload.source("train"), workload.source("valid")
    assert workload.source("train") is train
    assert train.arrays["image"].base is valid.arrays["image"].base is not None


def _sentence(data: dict, model: dict | None = None, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        _workload(data, model).source(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_data_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    sentence = _sentence({})
    assert "podium data fetch mnist" in sentence
    assert "workload.data.path" in sentence
    assert str(tmp_path / "data" / "mnist") in sentence


def test_files_in_the_cache_are_found_without_a_path(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "data").mkdir(parents=True)
    folder.rename(tmp_path / "cache" / "data" / "mnist")
    assert len(_workload().source("train")) == 45


def test_a_missing_folder_and_a_missing_file_are_told_apart(folder, tmp_path):
    assert "expected a folder that exists" in _sentence({"path": tmp_path / "absent"})
    (folder / "train-labels.idx1-ubyte").unlink()
    assert "no train-labels-idx1-ubyte" in _sentence({"path": folder})
    assert len(_workload({"path": folder}).source("test")) == 20


def test_images_and_labels_must_belong_together(folder):
    write_idx(folder / "train-labels.idx1-ubyte", np.zeros(49, np.uint8))
    sentence = _sentence({"path": folder})
    assert "50 images" in sentence
    assert "49 labels" in sentence


def test_images_of_another_size_are_refused(folder):
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros((50, 32, 32), np.uint8))
    assert "50 × 32 × 32, but any × 28 × 28 is needed" in _sentence({"path": folder})


def test_labels_beyond_the_classes_are_refused(folder):
    assert "workload.model.num_classes = 4" in _sentence({"path": folder}, {"num_classes": 4})


def test_holding_out_everything_is_refused(folder):
    assert "expected fewer than the 50 training samples" in _sentence({"path": folder, "valid_samples": 50})


@pytest.mark.parametrize(
    "section", [{"dropout": 1.0}, {"dropout": -0.1}, {"filters": [32]}, {"hidden": 0}, {"output": "x"}, {"size": 1}]
)
def test_impossible_model_options_are_refused(section):
    with pytest.raises(ValidationError):
        MnistModel.model_validate(section)


def test_names_must_match_the_classes():
    with pytest.raises(UserError, match="2 names"):
        _workload({"class_names": ["a", "b"]})


def test_the_network_is_the_published_one():
    model = _workload().build_model()
    assert sum(p.numel() for p in model.parameters()) == 225_034
    assert [tuple(p.shape) for p in model.parameters() if p.dim() > 1] == [
        (32, 1, 3, 3),
        (64, 32, 3, 3),
        (128, 1600),
        (10, 128),
    ]


@pytest.mark.parametrize("output", ["logits", "softmax"])
def test_stages_in_order_are_the_forward_pass(output):
    workload = _workload(model={"output": output, "filters": [4, 6], "hidden": 20, "num_classes": 7})
    model = workload.build_model().eval()
    image = workload.example(3)["image"]
    value = image
    for _, stage in workload.stages(model):
        value = stage(value)
    assert torch.equal(value, model(image))
    assert value.shape == (3, 7)
    assert [name for name, _ in workload.stages(model)] == ["conv1", "conv2", "hidden", "output"]
    if output == "softmax":
        torch.testing.assert_close(value.sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("output", ["logits", "softmax"])
def test_the_loss_is_a_sum_with_its_count_and_accuracy_only_in_evaluation(output):
    torch.manual_seed(0)
    workload = _workload(model={"output": output})
    model = workload.build_model()
    batch = {"image": torch.randn(6, 1, 28, 28), "label": torch.arange(6)}
    training = workload.loss(model.train(), batch)
    assert training.metrics == {}
    training.sum.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    evaluation = workload.loss(model.eval(), batch)
    value = model(batch["image"])
    torch.testing.assert_close(evaluation.sum, F.cross_entropy(value, batch["label"]) * 6)
    correct, count = evaluation.metrics["accuracy"]
    assert evaluation.count == count == 6
    assert correct.item() == (value.argmax(1) == batch["label"]).sum()


def test_biases_are_apart_from_weights():
    workload = _workload()
    groups = workload.param_groups(workload.build_model())
    assert [(len(group.params), group.weight_decay) for group in groups] == [(4, True), (4, False)]


def test_the_example_has_the_shapes_of_delivered_samples():
    workload = _workload({"source": "generated"})
    example, got = workload.example(5), _gathered(workload.source("train"), range(5))
    assert {k: (tuple(v.shape), v.dtype) for k, v in example.items()} == {
        k: (v.shape, torch.from_numpy(v).dtype) for k, v in got.items()
    }
    assert workload.loss(workload.build_model().eval(), example).count == 5


def _train(workload: Workload, num_updates: int, micro_batch: int) -> torch.nn.Module:
    """A plain loop: enough to see that loss, data and model fit together."""
    torch.manual_seed(0)
    model = workload.build_model().train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    source = workload.source("train")
    order = np.random.default_rng(0)
    for _ in range(num_updates):
        batch = _gathered(source, order.integers(0, len(source), micro_batch))
        loss = workload.loss(model, {name: torch.from_numpy(array) for name, array in batch.items()})
        optimiser.zero_grad()
        (loss.sum / loss.count).backward()
        optimiser.step()
    return model.eval()


def _outputs(workload: Workload, model: torch.nn.Module):
    def outputs(split, max_samples=None):
        given = _gathered(workload.source(split))
        with torch.no_grad():
            return given, {"output": model(torch.from_numpy(given["image"])).numpy()}

    return outputs


def test_prediction_draws_and_counts(folder):
    workload = _workload({"path": folder})
    model = workload.build_model().eval()
    prediction = workload.predict(model, _outputs(workload, model), folder / "pictures")
    assert [picture.path.name for picture in prediction.pictures] == ["confusion.png", "mistakes.png"]
    for picture in prediction.pictures:
        assert picture.path.read_bytes().startswith(b"\x89PNG")
    (table,) = prediction.tables
    assert len(table.rows) == 11
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert sum(int(row[1]) for row in table.rows[:-1]) == 20


@pytest.mark.parametrize("form", ["logits", "softmax"])
def test_prediction_without_a_mistake_says_so(folder, form):
    workload = _workload({"path": folder, "class_names": [f"kind {i}" for i in range(10)]}, {"output": form})

    def outputs(split, max_samples=None):
        given = _gathered(workload.source(split))
        return given, {"output": np.eye(10, dtype=np.float32)[given["label"]]}

    prediction = workload.predict(workload.build_model(), outputs, folder / "pictures")
    assert prediction.pictures[1].caption == "There are none."
    assert prediction.tables[0].rows[-1][2] == "100.00 %"
    assert prediction.tables[0].rows[3][0] == "kind 3"


@pytest.mark.slow
@needs_fashion
def test_fashion_mnist_is_learnt_from_its_own_files(tmp_path):
    # Small in every way: this is about the path from the files to the table, not about the best accuracy.
    model_section = {"filters": [8, 16], "hidden": 64, "dropout": 0.0}
    workload = _workload({"path": FASHION, "valid_samples": 5000, "max_samples": 2000}, model_section)
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [2000, 2000, 2000]
    model = _train(workload, num_updates=120, micro_batch=32)
    prediction = workload.predict(model, _outputs(workload, model), tmp_path)
    rows = prediction.tables[0].rows
    assert rows[9][0] == "Ankle boot"
    assert float(rows[-1][2].removesuffix(" %")) > 60


@needs_fashion
def test_fashion_mnist_is_whole():
    workload = _workload({"path": FASHION})
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [54_000, 6_000, 10_000]
    labels = _gathered(workload.source("test"))["label"]
    assert np.bincount(labels).tolist() == [1000] * 10
