"""The cosmology U-Net against what was published: written here from the description, apart from the code under test.

Recipes are compared key by key with the published numbers, the network, its loss, the schedules and the reader with
small statements of what they do.
"""

import math
from itertools import pairwise

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.data.volumes.cube_symmetries import PUBLISHED as TURNS
from podium.data.volumes.cube_symmetries import SYMMETRIES
from podium.kernels.install import apply_layout
from podium.optim.lr_scaling import scaled_lr
from podium.optim.schedules import Schedule, build_schedule
from podium.recipe.loading import load_recipe
from podium.recipe.shipped import shipped_recipes
from podium.workloads.cosmology.data import CosmologySamples
from podium.workloads.cosmology.model import build_network
from podium.workloads.cosmology.section import CosmologyData, CosmologyModel
from podium.workloads.cosmology.workload import Workload

# -------------------------------------------------------------------------------------------------------- the numbers

BASE = {
    "workload.model.width": 64,
    "workload.model.full_scale": True,
    "workload.model.slope": 0.01,
    "workload.model.lambda_rho": 0.0,
    "workload.data.source": "files",
    "workload.data.mode": "disk",
    "workload.data.crop": 64,
    "workload.data.samples": 65_536,
    "workload.data.valid_samples": 8_192,
    "batch.global": 64,
    "batch.micro": 64,
    "batch.replicas": 1,
    "train.length": "10ep",
    "optim.name": "adam",
    "optim.lr": 2e-4,
    "optim.scale": "sqrt",
    "optim.base_batch": 64,
    "schedule.name": "cosine",
    "schedule.span": "all",
    "schedule.warmup": "0up",
    "schedule.final": None,
    "precision.mode": "32.32",
    "precision.loss_scale": 1.0,
}
OPTIMISED = BASE | {
    "workload.data.mode": "memory",
    "precision.mode": "16.32",
    "precision.half": "fp16",
    "precision.loss_scale": "auto",
}


def large(batch: int, epochs: int) -> dict[str, object]:
    """The optimised training with one replica for every 64 samples of the global batch."""
    return OPTIMISED | {
        "batch.global": batch,
        "batch.replicas": batch // 64,
        "train.length": f"{epochs}ep",
        "schedule.warmup": "128up",
    }


PUBLISHED = {
    "base": BASE,
    "short": BASE | {"workload.data.samples": 4096, "workload.data.valid_samples": 512, "train.length": "3ep"},
    "bs64": OPTIMISED,
    "bs256": large(256, 20),
    "bs512_test": large(512, 10),
    "bs512": large(512, 40),
    "bs2048": large(2048, 160),
    "bs8192": large(8192, 320),
    # Ours, on simulated boxes: of the published training it has the network's form and the slope.
    "quick": {"workload.model.full_scale": False, "workload.model.slope": 0.01, "optim.name": "adam"},
}


def value_of(tree: dict, key: str) -> object:
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, table in PUBLISHED.items() for key in table])
def test_recipes_have_the_published_numbers(name, key):
    assert value_of(load_recipe(f"cosmology/{name}").tree(), key) == PUBLISHED[name][key]


def test_every_recipe_is_in_the_table():
    names = {name.partition("/")[2] for name, _ in shipped_recipes() if name.startswith("cosmology/")}
    assert names == PUBLISHED.keys()


def test_the_defaults_are_the_published_network():
    assert CosmologyModel() == load_recipe("cosmology/base").workload.model


# ------------------------------------------------------------------------------------------------------ the schedules


def schedule_of(name: str, *overrides: str) -> tuple[Schedule, int]:
    """The schedule of a recipe and its number of updates, as `build_training` makes them."""
    recipe = load_recipe(f"cosmology/{name}", overrides)
    batch, optim = recipe.batch.global_batch, recipe.optim
    per_epoch = recipe.workload.data.samples // batch
    total = recipe.train.length.updates(updates_per_epoch=per_epoch, global_batch=batch)
    peak = scaled_lr(lr=optim.lr, scale=optim.scale, base_batch=optim.base_batch, global_batch=batch)
    return build_schedule(recipe.schedule, peak, total, per_epoch, batch), total


def published_rate(update: int, total: int, peak: float, warmup: int) -> float:
    """A ramp over the warm-up, then a cosine whose phase is update / total: those of the warm-up count."""
    if update < warmup:
        return peak * (update + 1) / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * update / total))


@pytest.mark.parametrize(
    ("name", "num_updates", "peak"),
    [
        ("base", 10_240, 2e-4),
        ("short", 192, 2e-4),
        ("bs64", 10_240, 2e-4),
        ("bs256", 5_120, 4e-4),
        ("bs512_test", 1_280, 2e-4 * math.sqrt(8)),
        ("bs512", 5_120, 2e-4 * math.sqrt(8)),
        ("bs2048", 5_120, 2e-4 * math.sqrt(32)),
        ("bs8192", 2_560, 2e-4 * math.sqrt(128)),
    ],
)
def test_the_rate_of_every_update_is_the_published_one(name, num_updates, peak):
    schedule, total = schedule_of(name)
    warmup = 128 if peak > 2e-4 else 0
    assert total == num_updates
    found = [schedule.lr(update) for update in range(total)]
    assert found == pytest.approx([published_rate(update, total, peak, warmup) for update in range(total)], rel=1e-9)
    assert schedule.lr(total) == pytest.approx(0, abs=1e-18)


def test_a_cosine_over_the_rest_was_up_to_nine_hundredths_of_the_peak_apart():
    """The size of what `schedule.span` decides in `bs512_test`."""
    (over_all, total), (over_rest, _) = (schedule_of("bs512_test", f"schedule.span={span}") for span in ("all", "rest"))
    apart = max(abs(over_all.lr(update) - over_rest.lr(update)) for update in range(total))
    assert apart / over_all.base_lr == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize(
    ("scale", "batch", "factor"),
    [("sqrt", 16, 0.5), ("sqrt", 32, math.sqrt(0.5)), ("sqrt", 256, 2), ("linear", 16, 0.25), ("linear", 128, 2),
     ("none", 16, 1), ("none", 256, 1)],
)  # fmt: skip
def test_the_rate_is_scaled_down_below_the_base_batch_as_well_as_up_above(scale, batch, factor):
    schedule, _ = schedule_of("base", f"batch.global={batch}", f"batch.micro={batch}", f"optim.scale={scale}")
    assert schedule.lr(0) == pytest.approx(2e-4 * factor, rel=1e-12)


# ------------------------------------------------------------------------------------------------- network and loss


class Described(nn.Module):
    """The published network from its description: convolutions 4 × 4 × 4 with stride 2 down to one cell, mirrored
    transposed ones up, each of which but the innermost also sees what the one down of its scale gave."""

    def __init__(self, width: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = activation or nn.LeakyReLU()
        sizes = [4, width, 2 * width, 4 * width, 8 * width, 8 * width, 8 * width]
        self.down = nn.ModuleList(nn.Conv3d(a, b, 4, stride=2, padding=1) for a, b in pairwise(sizes))
        inner = [sizes[6], *(2 * size for size in sizes[5:0:-1])]
        outer = [*sizes[5:0:-1], 5]
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(a, b, 4, stride=2, padding=1) for a, b in zip(inner, outer, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = self.activation(layer(x))
            skips.append(x)
        for number, layer in enumerate(self.up):
            if number:
                x = torch.cat([skips[5 - number], x], dim=1)
            x = layer(x)
            x = torch.tanh(x) if number == 5 else torch.relu(x)
        return x


@pytest.mark.parametrize("layout", ["default", "channels_last"])
@pytest.mark.parametrize("keys", [{}, {"slope": 0.2}], ids=["torch's own slope", "another"])
def test_outputs_and_gradients_are_those_of_a_module_written_from_the_description(keys, layout, one_thread):
    """With our own kernels (channels_last) too: none of them may know another slope."""
    torch.manual_seed(0)
    ours = build_network(CosmologyModel(width=2, **keys), 64)
    described = Described(2, nn.LeakyReLU(*keys.values()))
    # Weights that keep the size of values: with the published ones they are so small that the slope hardly shows.
    with torch.no_grad():
        for param, other in zip(ours.parameters(), described.parameters(), strict=True):
            param.copy_(torch.randn_like(param) / math.sqrt(32 * param.shape[-4] if param.dim() > 1 else 100))
            other.copy_(param)
    apply_layout(ours, layout)
    x, y = torch.randn(1, 4, 64, 64, 64), torch.randn(1, 5, 64, 64, 64)
    outputs = [model(x) for model in (ours, described)]
    torch.testing.assert_close(*outputs, rtol=0, atol=5e-8 if layout == "default" else 5e-6)
    for output in outputs:
        F.l1_loss(output, y).backward()
    for param, other in zip(ours.parameters(), described.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=1e-6)
    described.activation = nn.LeakyReLU(0.1)
    assert (described(x) - outputs[0]).abs().max() > 1e-3


def test_the_full_network_has_as_many_parameters_as_published():
    with torch.device("meta"):
        models = Described(64), build_network(CosmologyModel(), 64)
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [116_977_029, 116_977_029]


@pytest.mark.parametrize("lambda_rho", [0.0, 0.3])
def test_the_density_term_is_the_plain_form_not_divided_by_the_five_channels(lambda_rho, one_thread):
    """The compiled form of the published loss weights channels (lambda, 0, 0, 0, 0) and takes the mean over all five:
    a fifth of the plain form."""
    section = CosmologyModel(width=1, full_scale=False, lambda_rho=lambda_rho)
    workload = Workload(section, CosmologyData(source="generated", crop=32, samples=4, valid_samples=2))
    model = workload.build_model()
    batch = {"nbody": torch.randn(3, 4, 32, 32, 32) * 0.1, "hydro": torch.randn(3, 5, 32, 32, 32) * 0.1}
    output, target = model(batch["nbody"]).detach().double(), batch["hydro"].double()
    scaled = F.l1_loss(output, target)
    density = F.l1_loss(torch.exp(14 * output[:, 0]), torch.exp(14 * target[:, 0]))
    weights = torch.tensor([lambda_rho, 0, 0, 0, 0], dtype=torch.float64).view(1, 5, 1, 1, 1)
    compiled = ((output - target).abs() + weights * (torch.exp(14 * output) - torch.exp(14 * target)).abs()).mean()
    loss = workload.loss(model, batch)
    assert (loss.sum / loss.count).item() == pytest.approx((scaled + lambda_rho * density).item(), rel=1e-5)
    assert compiled.item() == pytest.approx((scaled + lambda_rho / 5 * density).item(), rel=1e-12)


# --------------------------------------------------------------------------------------------------------- the reader

SIZE, CROP = 24, 16


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Boxes whose every cell is unlike all others."""
    folder = tmp_path_factory.mktemp("boxes")
    for name in ("train", "valid"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for dataset, channels in (("Nbody", 4), ("Hydro", 5)):
                numbers = np.arange(channels * SIZE**3, dtype=np.float32)
                file[dataset] = numbers.reshape(channels, SIZE, SIZE, SIZE)
    return folder


def by_hand(box: np.ndarray, start: tuple[int, int, int], axes: tuple[int, ...], flips: tuple[bool, ...]) -> np.ndarray:
    x, y, z = start
    crop = box[:, x : x + CROP, y : y + CROP, z : z + CROP]
    turned = crop.transpose(0, *(axis + 1 for axis in axes))
    return turned[:, *(slice(None, None, -1 if flipped else 1) for flipped in flips)]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_published_reader_turns_crops_of_every_split_and_leaves_components_alone(boxes, split):
    """Crops never wrap, input and target are cut and turned alike, validation ones too."""
    augment = {"group": "published24", "vectors": False, "valid": True}
    section = CosmologyData(
        source="files", path=boxes, crop=CROP, samples=200, valid_samples=200, periodic=False, augment=augment
    )
    source = CosmologySamples(section).source(split)
    numbers = np.arange(200)
    drawn = (source.of_epoch(0) if split == "train" else source).drawn(numbers)
    out = empty_buffers(source.fields, len(numbers))
    start_gather(source, SampleRequest(numbers, numbers, 0), out)()
    with h5py.File(boxes / f"{split}.h5") as file:
        nbody, hydro = file["Nbody"][:], file["Hydro"][:]
    for row, (_, start, turn) in enumerate(drawn):
        assert max(start) + CROP <= SIZE
        symmetry = SYMMETRIES[turn]
        assert symmetry in TURNS
        assert np.array_equal(out["nbody"][row], by_hand(nbody, start, *symmetry))
        assert np.array_equal(out["hydro"][row], by_hand(hydro, start, *symmetry))
    assert len({turn for _, _, turn in drawn}) == 24


def is_reflection(axes: tuple[int, ...], flips: tuple[bool, ...]) -> bool:
    matrix = np.eye(3)[list(axes)] * np.where(flips, -1, 1)[:, None]
    return np.linalg.det(matrix) < 0


def test_the_24_published_turns_are_different_and_eight_of_them_are_reflections():
    assert len(set(TURNS)) == len(TURNS) == 24
    assert set(TURNS) < set(SYMMETRIES)
    assert sum(is_reflection(*turn) for turn in TURNS) == 8
    assert sum(is_reflection(*turn) for turn in SYMMETRIES) == 24
    assert TURNS[0] == SYMMETRIES[0]
    for axes in {turn.axes for turn in TURNS}:
        assert sum(turn.axes == axes for turn in TURNS) == 4
