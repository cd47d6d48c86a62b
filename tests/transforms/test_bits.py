"""`parallel.recompute` and `precision.trap` leave the bits alone, with the layout and the kernels as installed."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from podium.errors import UserError
from podium.kernels.conv.conv_pool import ConvPool
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.apply import apply_transforms
from podium.transforms.seeding import MicroBatch, enter_micro_batch
from tests.support.recipes import TINY

CPU = torch.device("cpu")
SHORT = ["train.length=4up", "checkpoint.every=2up", "valid.max_samples=8", "schedule.warmup=0"]
#: large enough for attention, dropout, GELU, tables of words and the loss to be our own operators
_WIDE = ["workload.model.layers=1", "workload.model.hidden=256", "workload.model.heads=4",
         "workload.model.vocabulary=4096", "batch.micro=4"]  # fmt: skip
OWN = {
    "bert": _WIDE,
    "gpt2": [*_WIDE, "workload.model.context=32", "workload.data.sample.tokens=40"],
}
#: a batch norm that is a block of its own; an optimiser that rounds by chance
HALVES = {"neuron in halves": ("neuron", ["precision=16.16"]), "cnn in halves": ("cnn", ["precision=16.32"])}
KEYS = ["parallel.recompute=true", "precision.trap=true"]
#: Several commands in one process, which has to load torch and make machine code only once. Prints what each left.
SEVERAL = """
import json, sys
from pathlib import Path
from podium.cli import app
from podium.runs.folder import Run
for folder, args in json.loads(sys.argv[1]):
    app(args, standalone_mode=False)
    summary = Run(Path(folder)).summary()
    assert (summary["state"], summary["updates"]) == ("done", 4)
    print(summary["weights_sha256"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, *HALVES])
def test_recompute_and_the_trap_leave_the_weights_as_they_are_also_where_a_run_continues(name, tmp_path):
    workload, own = HALVES.get(name) or (name, OWN.get(name, []))
    recipe = [*TINY[workload], *SHORT, *own]
    recompute, trap = KEYS
    folders = [str(tmp_path / name) for name in ("plain", "recomputed", "trapped")]
    trained = [["train", *recipe, *keys, "--out"] for keys in ([], [recompute], [trap])]
    continued = [
        ["--checkpoint", "2", *keys] for keys in (KEYS, ["parallel.recompute=false"], ["precision.trap=false"])
    ]
    commands = [(folder, [*args, folder]) for folder, args in zip(folders, trained, strict=True)]
    commands += [(folder, ["resume", folder, *args]) for folder, args in zip(folders, continued, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)], capture_output=True, text=True, timeout=300
    )
    sums = [line for line in done.stdout.splitlines() if len(line) == 64]
    assert len(sums) == len(commands), done.stderr
    assert len(set(sums)) == 1, sums


class Network(nn.Module):
    """Blocks that are parts of what could be one operator, and one that is such an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.ReLU())
        self.others = nn.Sequential(nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others(self.first(x))


def transformed(*, recompute: bool = False, trap: bool = False) -> Network:
    torch.manual_seed(0)
    model = Network()
    blocks = [model.first, *model.others]
    precision = PrecisionSection(trap=trap)
    apply_transforms(model, blocks, CPU, layout="channels_last", precision=precision, recompute=recompute)
    return model


@pytest.fixture
def fused(monkeypatch) -> list[None]:
    """One entry for every time a convolution and its pool ran as one."""
    calls: list[None] = []
    apply = ConvPool.apply
    monkeypatch.setattr(ConvPool, "apply", lambda *args: calls.append(None) or apply(*args))
    return calls


@pytest.mark.parametrize(("recompute", "trap", "num_calls"), [(False, False, 1), (True, False, 2), (True, True, 2)])
def test_no_operator_reaches_over_blocks_and_none_steps_aside_within_them(fused, recompute, trap, num_calls):
    """Where a model is cut, blocks run one by one; and hooks that seed them come and go."""
    model = transformed(recompute=recompute, trap=trap)
    for update in range(2):
        enter_micro_batch(CPU, 0, MicroBatch(update, 0, 0))
        model(torch.rand(2, 1, 14, 14)).sum().backward()
    assert len(fused) == 2 * num_calls


def test_the_trap_names_the_layers_that_run_as_one(fused):
    model = transformed(trap=True)
    enter_micro_batch(CPU, 0, MicroBatch(4, 1, 2))
    with torch.no_grad():
        model.first[0].bias[3] = torch.nan
    with pytest.raises(
        Exception, match=r"output of first\.0 … first\.2 \(Conv2d, MaxPool2d, ReLU\) is NaN in update 5"
    ):
        model(torch.rand(2, 1, 14, 14))
    assert fused


def test_the_trap_sees_gradients_that_reach_layers_that_run_as_one(fused):
    model = transformed(trap=True)
    enter_micro_batch(CPU, 0, MicroBatch(0, 0, 0))
    with pytest.raises(
        Exception, match=r"the gradient that reaches first\.0 … first\.2 \(.*\) is infinite in update 1"
    ):
        (model.first(torch.rand(2, 1, 14, 14)) * 1e38).mul(1e38).sum().backward()
    assert fused


def test_compiled_code_decides_by_itself_what_to_compute_again():
    model = Network()
    with pytest.raises(UserError, match=r"parallel\.recompute goes with engine\.compile=false"):
        apply_transforms(
            model, [model], CPU, layout="default", precision=PrecisionSection(), recompute=True, compile=True
        )
