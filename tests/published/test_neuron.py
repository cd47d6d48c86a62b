"""The neuron inverter against what was published: written here from the description, apart from the code under test.

Recipes are compared key by key with the published numbers, networks, losses, schedules and files with small statements
of what they do. Batch norm is compared with torch's over 200 updates.
"""

import copy
import re

import h5py
import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor, nn

from podium.data.source import empty_buffers
from podium.optim.schedules import build_schedule
from podium.recipe.loading import load_recipe
from podium.recipe.shipped import SHIPPED, shipped_recipes
from podium.training.build import Training, build_training
from podium.training.feeding import build_engine, samples_of_updates
from podium.workloads.neuron.model import build_network
from podium.workloads.neuron.section import NeuronData, NeuronModel
from podium.workloads.neuron.simulator.simulate import make_dataset
from podium.workloads.neuron.workload import Workload

# -------------------------------------------------------------------------------------------------------- the numbers

FULL = {
    "workload.model.kind": "cnn",
    "workload.model.filters": [30, 90, 180],
    "workload.model.kernels": [4, 4, 4],
    "workload.model.pools": [4, 4, 4],
    "workload.model.norm.kind": "batch",
    "workload.model.norm.span": 1,
    "workload.model.linear": [512, 512, 512, 256, 128],
    "workload.model.dropout": 0.05,
}
SMALL = FULL | {
    "workload.model.filters": [4, 16, 32],
    "workload.model.kernels": [4, 2, 2],
    "workload.model.pools": [4, 2, 2],
    "workload.model.linear": [128, 128],
}
#: torch's AdamW as it comes, on every parameter
ADAMW = {
    "optim.name": "adamw",
    "optim.scale": "none",
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,
    "optim.clip_norm": None,
}
PUBLISHED = {
    "gc4": FULL
    | ADAMW
    | {
        "workload.model.frames": "reshape",
        "workload.data.source": "files",
        "workload.data.cell": "witness2c",
        "workload.data.probe": "excite_4prB8kHz",
        "workload.data.max_samples": None,
        "batch.micro": 192,
        "batch.accumulation": 1,
        "batch.scaling": "weak",
        "batch.shuffle": "shard",
        "train.length": "161ep",
        "optim.lr": 1e-3,
        "schedule.name": "plateau",
        "schedule.warmup": "6ep",
        "schedule.warmup_step": "1ep",
        "schedule.patience": 8,
        "schedule.factor": 0.11,
        "schedule.cooldown": 2,
        "engine.updates_per_call": 30,
        "valid.every": "1ep",
        "precision.mode": "32.32",
    },
    "dev": SMALL
    | ADAMW
    | {
        "workload.model.frames": "reshape",
        "workload.data.source": "files",
        "workload.data.cell": "witness2c",
        "workload.data.probe": "excite_4prB8kHz",
        "workload.data.max_samples": 8000,
        "batch.micro": 16,
        "batch.accumulation": 1,
        "batch.scaling": "weak",
        "batch.shuffle": "shard",
        "train.length": "7ep",
        "optim.lr": 3e-5,
        "schedule.name": "plateau",
        "schedule.warmup": "3ep",
        "schedule.warmup_step": "1ep",
        "schedule.patience": 4,
        "schedule.factor": 0.12,
        "schedule.cooldown": 2,
        "engine.updates_per_call": 50,
        "precision.mode": "32.32",
    },
    # Ours, on simulated cells: of the published trainings they have the models.
    "full": FULL | {"workload.model.frames": "transpose", "batch.micro": 192, "optim.lr": 1e-3},
    "quick": SMALL | {"workload.model.frames": "transpose"},
    "lstm": {
        "workload.model.kind": "lstm",
        "workload.model.lstm_hidden": 120,
        "workload.model.linear": [512, 512, 512, 256, 128],
        "workload.model.dropout": 0.05,
    },
}
#: validation loss by replicas and initial rate: the instructions, and the later table of the same group
LOSSES = {
    "instructions": {(1, "5e-4"): "0.021", (2, "1e-3"): "0.021", (4, "1e-3"): "0.022", (8, "2e-3"): "0.023",
                     (16, "2e-3"): "0.022"},
    "later": {(1, "5e-4"): "0.0220", (1, "1e-3"): "0.0210", (2, "1e-3"): "0.0216", (4, "2e-3"): "0.0215",
              (8, "2e-3"): "0.0225", (16, "2e-3"): "0.0236", (16, "5e-3"): "0.0224"},
}  # fmt: skip


def value_of(tree: dict, key: str) -> object:
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, table in PUBLISHED.items() for key in table])
def test_recipes_have_the_published_numbers(name, key):
    assert value_of(load_recipe(f"neuron/{name}").tree(), key) == PUBLISHED[name][key]


def test_every_recipe_is_in_the_table():
    assert {name.partition("/")[2] for name, _ in shipped_recipes() if name.startswith("neuron/")} == PUBLISHED.keys()


@pytest.mark.parametrize(("table", "column"), [("instructions", 1), ("later", 2)])
def test_the_header_of_gc4_has_both_tables_of_losses(table, column):
    lines = (SHIPPED / "neuron" / "gc4.yaml").read_text().splitlines()
    rows = [line for line in lines if line.startswith("#   ") and " at " in line]
    shown = {}
    for row in rows:
        cells = re.split("  +", row.removeprefix("#   "))
        for entry in re.findall(r"([0-9.]+) at ([0-9e-]+)", cells[column]):
            shown[int(cells[0]), entry[1]] = entry[0]
    assert shown == LOSSES[table]


# ------------------------------------------------------------------------------------------------------ the schedules


@pytest.mark.parametrize(("name", "warmup_epochs", "peak"), [("gc4", 6, 1e-3), ("dev", 3, 3e-5)])
def test_the_warmup_rises_once_an_epoch_to_the_full_rate(name, warmup_epochs, peak):
    per_epoch = 37
    recipe = load_recipe(f"neuron/{name}")
    total = int(recipe.train.length.amount) * per_epoch
    schedule = build_schedule(recipe.schedule, recipe.optim.lr, total, per_epoch, recipe.batch.global_batch)
    for update in range(total):
        epoch = update // per_epoch
        assert schedule.lr(update) == pytest.approx(peak * min(1.0, (epoch + 1) / warmup_epochs), rel=1e-15)


@pytest.mark.parametrize(("name", "patience", "factor", "num_reductions"), [("gc4", 8, 0.11, 3), ("dev", 4, 0.12, 3)])
def test_the_rate_falls_when_torch_reduces_on_a_plateau(name, patience, factor, num_reductions):
    per_epoch = 10
    recipe = load_recipe(f"neuron/{name}")
    warmup = int(recipe.schedule.warmup.amount)
    schedule = build_schedule(recipe.schedule, recipe.optim.lr, 161 * per_epoch, per_epoch, 1)
    optimiser = torch.optim.AdamW([torch.zeros(1)], lr=recipe.optim.lr)
    # eps: torch keeps rates that would change by less than 1e-8, Podium reduces them too.
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=factor, patience=patience, cooldown=2, eps=0)
    num_epochs = 20 + num_reductions * (patience + 3)
    losses = [1 / (1 + min(epoch, 20)) for epoch in range(num_epochs)]
    for epoch, loss in enumerate(losses, start=1):
        schedule.observe(loss, epoch * per_epoch)
        if epoch > warmup:
            torchs.step(loss)
            assert schedule.lr(epoch * per_epoch) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-12)
    assert optimiser.param_groups[0]["lr"] == pytest.approx(recipe.optim.lr * factor**num_reductions)


# ------------------------------------------------------------------------------------------------ network and loss


class Described(nn.Module):
    """The published network from its description: three times (convolution, max-pool, ReLU), flatten, batch norm, then
    linear layers with ReLU and dropout, and one to the parameters."""

    def __init__(self, filters, kernels, pools, linear, frames: str) -> None:
        super().__init__()
        self.frames = frames
        channels, bins, blocks = 4, 1600, []
        for width, kernel, pool in zip(filters, kernels, pools, strict=True):
            blocks += [nn.Conv1d(channels, width, kernel), nn.MaxPool1d(pool), nn.ReLU()]
            channels, bins = width, (bins - kernel + 1) // pool
        features = channels * bins
        blocks += [nn.Flatten(), nn.BatchNorm1d(features)]
        for width in linear:
            blocks += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.05)]
            features = width
        self.blocks = nn.Sequential(*blocks, nn.Linear(features, 15))

    def forward(self, frames: Tensor) -> Tensor:
        shape = (len(frames), 4, 1600)
        return self.blocks(frames.transpose(1, 2) if self.frames == "transpose" else frames.contiguous().view(shape))


def sections(name: str) -> tuple[NeuronModel, Described]:
    model = load_recipe(f"neuron/{name}").workload.model
    return model, Described(model.filters, model.kernels, model.pools, model.linear, model.frames)


def given_weights(target: nn.Module, source: nn.Module) -> None:
    """Weights in the order of their layers, which is the same."""
    values = source.state_dict().values()
    target.load_state_dict(dict(zip(target.state_dict(), values, strict=True)))


@pytest.mark.parametrize("name", ["gc4", "dev", "full", "quick"])
def test_the_network_is_the_described_one(name, one_thread):
    section, described = sections(name)
    torch.manual_seed(0)
    ours = build_network(section, 1600, 4, 15)
    given_weights(described, ours)
    frames = torch.randn(6, 1600, 4)
    for training in (True, False):
        outputs = []
        for model in (ours.train(training), described.train(training)):
            torch.manual_seed(1)  # the same dropout: as many draws, in the same order
            outputs.append(model(frames))
        assert torch.equal(*outputs)
    assert torch.equal(ours.norm.running_var, described.blocks[-3 * len(section.linear) - 2].running_var)


def test_reshaped_frames_have_a_quarter_of_the_trace_in_each_channel():
    frames = torch.arange(2 * 1600 * 4).reshape(2, 1600, 4)
    section = NeuronModel(frames="reshape")
    seen = build_network(section, 1600, 4, 15).conv1[0](frames)
    for sample in range(2):
        flat = frames[sample].flatten()
        for channel in range(4):
            assert torch.equal(seen[sample, channel], flat[1600 * channel : 1600 * (channel + 1)])
    transposed = build_network(NeuronModel(), 1600, 4, 15).conv1[0](frames)
    assert torch.equal(transposed, frames.permute(0, 2, 1))
    assert seen.shape == transposed.shape == (2, 4, 1600)


@pytest.mark.parametrize(
    ("name", "count"), [("gc4", 2_988_843), ("full", 2_988_843), ("dev", 431_683), ("quick", 431_683)]
)
def test_parameters_are_as_many_as_published(name, count):
    section, described = sections(name)
    assert sum(p.numel() for p in described.parameters()) == count
    assert sum(p.numel() for p in build_network(section, 1600, 4, 15).parameters()) == count


def test_the_lstm_reads_one_bin_per_step_in_the_published_form(one_thread):
    section = load_recipe("neuron/lstm", ["workload.model.lstm_patch=1"]).workload.model
    model = build_network(section, 1600, 4, 15).eval()
    lstm = nn.LSTM(4, 120, batch_first=True)
    lstm.load_state_dict(model.lstm.lstm.state_dict())
    frames = torch.randn(2, 1600, 4)
    _, (hidden, _) = lstm(frames)
    torch.testing.assert_close(model.lstm(frames), hidden[-1])
    linear = sum((i + 1) * o for i, o in ((120, 512), (512, 512), (512, 512), (512, 256), (256, 128), (128, 15)))
    count = 4 * 120 * (4 + 120 + 2) + 2 * 120 + linear
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_loss_is_the_mean_squared_error_over_samples_and_parameters(one_thread):
    workload = Workload(
        NeuronModel(filters=(2,), kernels=(4,), pools=(100,), linear=(8,)), NeuronData(source="generated")
    )
    model = workload.build_model().eval()
    batch = {"frames": torch.randn(5, 1600, 4), "target": torch.rand(5, 15) * 2 - 1}
    loss = workload.loss(model, batch)
    squares = [(o - t) ** 2 for o, t in zip(model(batch["frames"]).flatten(), batch["target"].flatten(), strict=True)]
    assert (loss.sum / loss.count).item() == pytest.approx(sum(squares).item() / (5 * 15), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- the files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("cells"), 12, seed=3)


def test_files_have_what_published_readers_and_plots_look_for(made):
    info = YAML(typ="safe", pure=True).load(made.meta)["dataInfo"]
    assert info["numPar"] == len(info["parName"]) == len(set(info["parName"])) == 15
    # Plots are coloured by the ending of a name, and have a label for each probe.
    endings = [name.rpartition(".")[2] for name in info["parName"]]
    assert endings == ["som"] * 3 + ["axn"] * 4 + ["api"] * 4 + ["den"] * 4
    assert info["featureName"] == info["probeName"] == ["soma", "axon", "apical", "basal"]
    assert info["numFeature"] == 4
    assert made.data.name == info["h5nameTemplate"].replace("*", "simulated")
    with h5py.File(made.data) as file:
        for domain in ("train", "val", "test"):
            num = info["totalGoodFrames"][domain]
            assert file[f"{domain}_frames"].shape == (num, 1600, 4)
            assert file[f"{domain}_unitStar_par"].shape == file[f"{domain}_phys_par"].shape == (num, 15)
            assert np.abs(file[f"{domain}_unitStar_par"][:]).max() <= 1


def test_the_reader_delivers_the_frames_and_unit_parameters_of_its_domain(made):
    workload = Workload(NeuronModel(), NeuronData(source="files", path=made.data.parent))
    with h5py.File(made.data) as file:
        for split, domain in (("train", "train"), ("valid", "val"), ("test", "test")):
            source = workload.source(split)
            out = empty_buffers(source.fields, len(source))
            source.gather(np.arange(len(source)), out)
            assert np.array_equal(out["frames"], file[f"{domain}_frames"][:].astype(np.float32))
            assert np.array_equal(out["target"], file[f"{domain}_unitStar_par"][:])


# --------------------------------------------------------------------------------------------------------- batch norm

NUM_UPDATES = 200
#: Plain torch throughout, so that only what is done with the statistics can differ. SGD, as AdamW makes whole steps of
#: the rounding noise that a bias before a batch norm has for a gradient, and so drives any two trainings apart.
LR = 0.05
PLAIN = [
    "neuron", "workload.data.source=generated", "workload.data.samples=256", "workload.model.filters=[4]",
    "workload.model.kernels=[8]", "workload.model.pools=[64]", "workload.model.linear=[16]",
    "workload.model.dropout=0", "batch.micro=8", "optim.name=sgd", f"optim.lr={LR}", "optim.weight_decay=0",
    "schedule.name=constant", "schedule.warmup=0", f"train.length={NUM_UPDATES}up", "engine.layout=default",
    "engine.kernels=off", "engine.threads=1",
]  # fmt: skip


def trained(*overrides: str) -> tuple[Training, nn.Module, dict[str, Tensor]]:
    """200 updates by the engine, and by a loop of plain torch on the same samples; and how both began."""
    name, *keys = PLAIN
    training = build_training(load_recipe(name, [*keys, *overrides]))
    span = training.recipe.workload.model.norm.span
    plain = copy.deepcopy(training.state.model)
    start = {field: tensor.clone() for field, tensor in plain.state_dict().items()}
    if span > 1:
        plain.norm = nn.BatchNorm1d(plain.norm.num_features)
    assert type(plain.norm) is nn.BatchNorm1d
    optimiser = torch.optim.SGD(plain.parameters(), lr=LR)
    engine = build_engine(training)
    with samples_of_updates(training, 0, NUM_UPDATES) as all_samples:
        for update, samples in enumerate(all_samples):
            copied = {field: rows.clone() for field, rows in samples.items()}
            engine.update(update, samples, LR)
            _plain_update(plain, optimiser, copied, span)
    return training, plain, start


def _plain_update(model: nn.Module, optimiser: torch.optim.Optimizer, samples: dict[str, Tensor], span: int) -> None:
    """One step on the mean over all samples. Each replica begins with the same statistics and tracks its micro-batches
    in turn; afterwards replicas have the mean of theirs. The micro-batches of a span are one."""
    frames, target = samples["frames"], samples["target"]  # (replicas, accumulation, micro-batch, …)
    if span > 1:
        frames, target = (rows.transpose(0, 1).flatten(1, 2).unsqueeze(0) for rows in (frames, target))
    optimiser.zero_grad()
    start = [buffer.clone() for buffer in model.norm.buffers()]
    ends = []
    for replica in range(len(frames)):
        for buffer, before in zip(model.norm.buffers(), start, strict=True):
            buffer.copy_(before)
        for x, y in zip(frames[replica], target[replica], strict=True):
            ((model(x) - y).square().sum() / 15 / target[..., 0].numel()).backward()
        ends.append([buffer.clone() for buffer in model.norm.buffers()])
    optimiser.step()
    for buffer, *values in zip(model.norm.buffers(), *ends, strict=True):
        if buffer.is_floating_point():
            buffer.copy_(torch.stack(values).mean(0))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([], id="one replica"),
        pytest.param(["batch.accumulation=2"], id="accumulation"),
        pytest.param(["batch.replicas=2"], id="two replicas"),
        pytest.param(["batch.replicas=4", "batch.accumulation=2"], id="both", marks=pytest.mark.slow),
        pytest.param(["batch.replicas=2", "workload.model.norm.span=2"], id="a span", marks=pytest.mark.slow),
    ],
)
def test_running_statistics_are_those_of_torch_after_200_updates(batch, one_thread):
    training, plain, start = trained(*batch)
    ours, theirs = training.state.model.state_dict(), plain.state_dict()
    norm = training.state.model.norm
    assert (norm.momentum, norm.eps) == (plain.norm.momentum, plain.norm.eps) == (0.1, 1e-5)
    tracked = NUM_UPDATES * training.recipe.batch.num_accumulation
    assert ours["norm.num_batches_tracked"] == theirs["norm.num_batches_tracked"] == tracked
    for name in ("norm.running_mean", "norm.running_var", "norm.weight", "norm.bias", "output.weight"):
        moved = (theirs[name] - start[name]).abs().max()
        assert moved > 1e-3, name
        assert (ours[name] - theirs[name]).abs().max() < 1e-4 * moved, name
