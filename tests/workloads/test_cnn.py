"""The CNN family: networks, images, augmentation."""

import numpy as np
import pytest
import torch
from torch import nn

from podium.data.formats import cifar
from podium.data.source import empty_buffers
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.transforms.seeding import seed_torch
from podium.workloads.cnn import shapes
from podium.workloads.cnn.augment import Images, Mixed, Spread, mixed_cross_entropy
from podium.workloads.cnn.model import build_network
from podium.workloads.cnn.section import AugmentSection, CnnData, CnnModel
from podium.workloads.cnn.workload import Workload
from podium.workloads.published_splits import spread_held_out

PLAIN = Spread((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))  # normalised values are the bytes themselves


def num_parameters(num_classes=1000, **model) -> int:
    with torch.device("meta"):
        network = build_network(CnnModel(**model), num_classes)
    return sum(param.numel() for param in network.parameters())


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (("resnet", 18), 11_689_512),
        (("resnet", 34), 21_797_672),
        (("resnet", 50), 25_557_032),
        (("resnet", 101), 44_549_160),
        (("resnet", 152), 60_192_808),
        (("resnext", 50), 25_028_904),
        (("efficientnet", "B0"), 5_288_548),
        (("efficientnet", "B1"), 7_794_184),
        (("efficientnet", "B2"), 9_109_994),
        (("efficientnet", "B3"), 12_233_232),
        (("efficientnet", "b4"), 19_341_616),
    ],
)
def test_networks_for_imagenet_have_the_published_number_of_parameters(model, published):
    assert num_parameters(name=model[0], size=model[1]) == published


@pytest.mark.parametrize(("size", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_networks_for_cifar_have_the_published_number_of_parameters(size, millions):
    assert round(num_parameters(10, name="resnet", size=size) / 1e6, 2) == millions


@pytest.mark.parametrize("size", [8, 14, 20, 32, 44, 56])
def test_networks_for_cifar_have_as_many_layers_as_their_name_says(size):
    network = build_network(CnnModel(name="resnet", size=size), 10)
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == size  # shortcuts have none


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind", "depths"), [(18, "basic", [2, 2, 2, 2]), (50, "bottleneck", [3, 4, 6, 3])])
def test_resnet_gives_what_the_one_of_hugging_face_gives_with_the_same_weights(size, kind, depths):
    transformers = pytest.importorskip("transformers", reason="in the test extra")
    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    config = transformers.ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=widths, num_labels=7)
    torch.manual_seed(1)
    theirs = transformers.ResNetForImageClassification(config).eval()
    ours = build_network(CnnModel(name="resnet", size=size), 7).eval()
    for module in theirs.modules():  # statistics that make a difference
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    ours_in_order = [m for m in ours.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    theirs_in_order = [theirs.resnet.embedder.embedder]
    for stage in theirs.resnet.encoder.stages:
        for layer in stage.layers:
            theirs_in_order += [layer.layer, layer.shortcut]  # ours: the branch, then the shortcut
    flat = [m for part in theirs_in_order for m in part.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    flat.append(theirs.classifier[1])
    assert len(flat) == len(ours_in_order)
    for own, other in zip(ours_in_order, flat, strict=True):
        own.load_state_dict(other.state_dict())
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        ("resnet", 8),
        pytest.param(("resnet", 50), marks=pytest.mark.slow),
        pytest.param(("resnext", 50), marks=pytest.mark.slow),
        pytest.param(("efficientnet", "B0"), marks=pytest.mark.slow),
    ],
)
def test_running_the_stages_one_after_another_is_the_forward_pass(model):
    section = CnnModel(name=model[0], size=model[1])
    workload = Workload(section, CnnData())
    network = workload.build_model().eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        passed = image
        for _, stage in workload.stages(network):
            passed = stage(passed)
        assert torch.equal(passed, network(image))


def test_blocks_begin_as_their_shortcuts_with_zero_init():
    network = build_network(CnnModel(name="resnet", size=8, zero_init=True), 10)
    x = torch.randn(2, 16, 8, 8).relu()
    assert torch.equal(network.blocks.block1_1(x), x)


def test_efficientnet_takes_groups_and_another_expansion():
    network = build_network(CnnModel(name="efficientnet", size="B0", group_dim=16, expand_ratio=4), 10)
    middle = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size[0] > 1][1:]
    assert all(conv.in_channels // conv.groups == 16 for conv in middle)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["workload.model.size=21"], "size = 21: expected one of 8, 14"),
        (["workload.model.name=efficientnet"], "size = 8: expected one of B0"),
        (["workload.model.group_dim=16"], "group_dim does not apply to resnet"),
        (["workload.data.input.normalise=host"], "eight_bit = true: expected false"),
    ],
)
def test_what_contradicts_is_told(overrides, said):
    with pytest.raises(UserError, match=said):
        load_recipe("cnn/quick", overrides)


def test_groups_that_do_not_fit_are_told():
    section = CnnModel(name="resnet", size=8, norm={"kind": "group", "groups": 32})
    with pytest.raises(UserError, match=r"norm.groups = 32: expected a divisor of the 16 channels"):
        build_network(section, 10)


# --- images -----------------------------------------------------------------------------------------------------------


def test_a_rendered_sample_depends_on_its_number_and_the_seed_alone():
    images, labels = shapes.render(np.arange(100), 3)
    some = np.array([70, 3, 41])
    again, again_labels = shapes.render(some, 3)
    assert np.array_equal(again, images[some])
    assert np.array_equal(again_labels, labels[some])
    assert not np.array_equal(shapes.render(some, 4)[0], again)
    assert set(shapes.render(np.arange(500), 3)[1]) == set(range(10))
    assert images.std(axis=(1, 2, 3)).min() > 3  # something is to be seen on each


def write_cifar(folder, kind="cifar10", rows=20, seed=0):
    rng = np.random.default_rng(seed)
    num_labels = 1 if kind == "cifar10" else 2
    written = {}
    for name in cifar.file_names(kind):
        data = rng.integers(0, 256, (rows, num_labels + 3072), dtype=np.uint8)
        data[:, :num_labels] = rng.integers(0, 10, (rows, num_labels))
        data.tofile(folder / name)
        written[name] = data
    return written


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_files_are_read_as_published(kind, tmp_path):
    written = write_cifar(tmp_path, kind)
    images, labels = cifar.load(tmp_path, kind, "test")
    data = written[cifar.file_names(kind)[-1]]
    num_labels = data.shape[1] - 3072
    assert np.array_equal(labels, data[:, num_labels - 1])
    red_of_first_row = data[4, num_labels : num_labels + 32]
    assert np.array_equal(images[4, 0, :, 0], red_of_first_row)
    blue_of_last_row = data[4, -32:]
    assert np.array_equal(images[4, 31, :, 2], blue_of_last_row)
    assert len(cifar.load(tmp_path, kind, "train")[1]) == (100 if kind == "cifar10" else 20)


def test_what_is_wrong_with_cifar_files_is_told(tmp_path):
    with pytest.raises(UserError, match=r"holds neither CIFAR files, nor TFRecord shards"):
        Workload(CnnModel(), CnnData(source="files", path=tmp_path))
    write_cifar(tmp_path)
    workload = Workload(CnnModel(), CnnData(source="files", path=tmp_path))
    assert [len(workload.source(split)) for split in ("train", "valid")] == [90, 10]
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match=r"test_batch.bin is not a cifar10 file: 5,000 bytes"):
        workload.source("test")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(UserError, match=r"test_batch.bin is missing"):
        workload.source("test")
    with pytest.raises(UserError, match="podium data fetch cifar100"):
        Workload(CnnModel(), CnnData(source="files", format="cifar100")).source("train")


def delivered(data: CnnData, split="test", num=16):
    workload = Workload(CnnModel(size=8), data)
    source = workload.source(split)
    out = empty_buffers(source.fields, num)
    source.gather(np.arange(num), out)
    return workload, {name: torch.from_numpy(rows) for name, rows in out.items()}


class Watching(nn.Module):
    """A model that keeps what it is given."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self._seen = seen

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self._seen.append(image)
        return torch.zeros(len(image), 10)


@pytest.mark.parametrize("source", ["simulated", "generated"])
def test_images_are_the_same_to_the_bit_however_they_travel(source):
    common = {"source": source, "samples": 64, "test_samples": 32}
    forms = [
        {"eight_bit": True},
        {"eight_bit": False, "normalise": "device"},
        {"eight_bit": False, "normalise": "host"},
    ]
    seen, varied = [], []
    for form in forms:
        workload, batch = delivered(CnnData(**common, input=form))
        assert batch["image"].dtype == (torch.uint8 if form["eight_bit"] else torch.float32)
        seen.append(workload.inputs(batch)[0])
        seed_torch(torch.device("cpu"), "test", 1)
        workload.loss(Watching(varied), batch)
    for image in seen[1:]:
        assert torch.equal(image, seen[0])
    for image in varied[1:]:
        assert torch.equal(image, varied[0])


def numbered(num=64, size=8):
    """Images whose every pixel tells where it was."""
    pixel = torch.arange(size * size, dtype=torch.uint8).view(size, size) + 1
    return pixel[None, :, :, None].expand(num, size, size, 3).contiguous()


def test_cutting_out_moves_the_whole_image_by_at_most_the_border():
    images = Images(AugmentSection(flip=False), PLAIN, pad_crop=2)
    torch.manual_seed(0)
    moved = images.varied(numbered(200), torch.zeros(200, dtype=torch.int64)).image
    assert moved.shape == (200, 3, 8, 8)
    centre = moved[:, 0, 4, 4].long()
    offsets = {((int(value) - 1) // 8 - 4, (int(value) - 1) % 8 - 4) for value in centre}
    assert len(offsets) == 25
    assert all(abs(down) <= 2 and abs(right) <= 2 for down, right in offsets)
    assert (moved == 0).any()


def test_half_of_the_images_are_mirrored():
    images = Images(AugmentSection(), PLAIN, pad_crop=0)
    torch.manual_seed(0)
    first = images.varied(numbered(400), torch.zeros(400, dtype=torch.int64)).image[:, 0, 0, 0]
    assert set(first.tolist()) == {1.0, 8.0}
    assert 150 < (first == 8.0).sum() < 250


def constant(num=32, size=16):
    value = torch.arange(num, dtype=torch.uint8)
    return value[:, None, None, None].expand(num, size, size, 3).contiguous(), torch.arange(num)


def test_mixup_mixes_images_as_it_mixes_labels():
    images = Images(AugmentSection(flip=False, mixup=0.4), PLAIN, pad_crop=0)
    torch.manual_seed(0)
    rows, label = constant()
    mixed = images.varied(rows, label)
    expected = mixed.share * mixed.label + (1 - mixed.share) * mixed.other
    torch.testing.assert_close(mixed.image[:, 0, 3, 3], expected.float(), rtol=1e-4, atol=1e-4)
    assert 0 <= mixed.share.min() <= mixed.share.max() <= 1
    assert len(set(mixed.share.tolist())) > 20


def test_cutmix_replaces_one_rectangle_and_counts_its_area():
    images = Images(AugmentSection(flip=False, cutmix=1.0), PLAIN, pad_crop=0)
    torch.manual_seed(0)
    rows, label = constant(64)
    mixed = images.varied(rows, label)
    for image, one, other, share in zip(mixed.image[:, 0], mixed.label, mixed.other, mixed.share, strict=True):
        if one == other:
            continue
        pasted = image == other
        assert bool(((image == one) | pasted).all())
        assert float(share) == pytest.approx(1 - pasted.float().mean().item(), abs=1e-6)
        down, right = pasted.any(1).nonzero(), pasted.any(0).nonzero()
        if len(down):
            assert bool(pasted[down[0] : down[-1] + 1, right[0] : right[-1] + 1].all())


def test_both_together_take_turns_by_chance():
    images = Images(AugmentSection(flip=False, mixup=1.0, cutmix=1.0), PLAIN, pad_crop=0)
    rows, label = constant(16)
    kinds = set()
    for seed in range(12):
        torch.manual_seed(seed)
        mixed = images.varied(rows, label)
        flat = bool((mixed.image[:, 0].flatten(1).std(dim=1) < 1e-4).all())
        kinds.add("mixup" if flat else "cutmix")
    assert kinds == {"mixup", "cutmix"}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_that_of_their_shares(smoothing):
    torch.manual_seed(0)
    output, label, other, share = torch.randn(6, 5), torch.arange(6) % 5, (torch.arange(6) + 2) % 5, torch.rand(6)
    ours = mixed_cross_entropy(output, Mixed(torch.empty(0), label, other, share), smoothing)
    one = nn.functional.one_hot(label, 5).double()
    two = nn.functional.one_hot(other, 5).double()
    target = share[:, None].double() * one + (1 - share[:, None].double()) * two
    target = target * (1 - smoothing) + smoothing / 5
    expected = -(target * output.double().log_softmax(1)).sum()
    assert float(ours) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_every_shipped_recipe_trains_an_update_of_its_network_on_generated_images():
    """At a size that fits: one replica, one small micro-batch."""
    from podium.recipe.shipped import shipped_recipes
    from podium.training.build import build_training
    from podium.training.feeding import build_engine

    names = [name for name, _ in shipped_recipes() if name.startswith("cnn/")]
    assert len(names) == 18
    for name in ("cnn/efficientnet_b0", "cnn/mlperf_pod16_bs20_sgd", "cnn/resnext50", "cnn/cifar_resnet8"):
        assert name in names
        small = ["workload.data.source=generated", "workload.data.image_size=64", "workload.data.samples=64"]
        if "cifar" in name:
            small[1] = "workload.data.image_size=32"
        size = ["batch.micro=2", "batch.accumulation=1", "batch.replicas=2", "precision.half=bf16"]
        training = build_training(
            load_recipe(name, [*small, *size, "train.length=1up", "engine.threads=1", "schedule.warmup=0"])
        )
        samples = {
            field: rows.view(2, 1, 2, *rows.shape[1:]) for field, rows in training.task.workload.example(4).items()
        }
        engine = build_engine(training)
        engine.update(0, samples, 1e-3)
        assert np.isfinite(engine.collect().means()["loss"])


# --- JPEG files -------------------------------------------------------------------------------------------------------


def write_photographs(folder, num=24):
    """The same images as folders of files and as TFRecord shards."""
    import io

    from PIL import Image

    from podium.data.formats.tfrecord import build_example, write_records

    rng = np.random.default_rng(0)
    for split, shard in (("train", "train"), ("val", "validation")):
        records = []
        for number in range(num):
            pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((120, 90)).save(file, "JPEG", quality=90)
            place = folder / "folders" / split / f"n{number * 3 // num}" / f"{number:03}.JPEG"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.getvalue())
            label = [number * 3 // num + 1]
            records.append(build_example({"image/encoded": [file.getvalue()], "image/class/label": label}))
        (folder / "shards").mkdir(exist_ok=True)
        write_records(folder / "shards" / f"{shard}-00000-of-00001", records)


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_imagenets_shards_and_folders_train_to_the_same_weights(tmp_path, monkeypatch, cache):
    from podium.train import train

    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    write_photographs(tmp_path)
    weights = set()
    for name, threads in (("folders", 1), ("shards", 2)):
        overrides = [
            f"workload.data.path={tmp_path / name}", "workload.data.source=files", "workload.data.image_size=32",
            "workload.model.size=8", "workload.model.num_classes=3", "batch.micro=4", "train.length=2ep",
            "schedule.warmup=0", "valid.micro=8", "engine.threads=1", "log.tensorboard=false", "log.report=false",
            f"workload.data.decode_threads={threads}", f"workload.data.cache={cache}",
        ]  # fmt: skip
        run = train(load_recipe("cnn/quick", overrides), tmp_path / f"run-{name}")
        weights.add(run.summary()["weights_sha256"])
        assert run.summary()["valid"]["last"]["accuracy"] > 0
    assert len(weights) == 1


@pytest.mark.parametrize("source", ["simulated", "generated"])
def test_drawn_samples_for_validation_and_test_are_others(source):
    def images(split: str, **changes) -> np.ndarray:
        data = CnnData(source=source, samples=100, test_samples=20, **changes)
        samples = Workload(CnnModel(size=8), data).source(split)
        out = empty_buffers(samples.fields, len(samples))
        samples.gather(np.arange(len(samples)), out)
        return out["image"]

    assert len(images("train")) == 100
    assert np.array_equal(images("train"), images("train", valid_samples=0))
    assert np.array_equal(images("valid"), images("valid", valid_samples=0))
    assert images("test").shape == images("valid").shape
    assert not np.array_equal(images("test"), images("valid"))
    assert np.array_equal(images("test", valid_samples=0), images("valid", valid_samples=0))


def test_samples_held_out_of_classes_in_a_row_are_of_all_classes():
    labels = np.repeat(np.arange(10), 30)
    train, valid = (spread_held_out(split, 300, 60) for split in ("train", "valid"))
    assert sorted([*train, *valid]) == list(range(300))
    assert np.bincount(labels[valid]).tolist() == [6] * 10
    assert len(spread_held_out("test", 50, 60)) == 50


def test_training_samples_can_be_held_out_for_validation():
    workload = Workload(CnnModel(size=8), CnnData(samples=100, test_samples=20, valid_samples=30))
    assert [len(workload.source(split)) for split in ("train", "valid", "test")] == [70, 30, 20]
    out = empty_buffers(workload.source("valid").fields, 30)
    workload.source("valid").gather(np.arange(30), out)
    images, labels = shapes.render(np.arange(70, 100), 0)
    assert np.array_equal(out["image"], images)
    assert np.array_equal(out["label"], labels)
    with pytest.raises(UserError, match="expected fewer than the 100 training samples"):
        Workload(CnnModel(size=8), CnnData(samples=100, valid_samples=100)).source("train")
