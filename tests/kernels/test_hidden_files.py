"""Kernels are guests: with any one of their files removed, training goes on with plain torch in its place."""

import json
import subprocess
import sys

import pytest

from podium.kernels.registry import KERNELS
from podium.runs.folder import Run
from tests.support.recipes import TINY

SHORT = ["train.length=3up", "engine.updates_per_call=3", "schedule.warmup=0", "valid.max_samples=8"]
ALL = f"engine.kernels=[{', '.join(KERNELS)}]"  # `auto` leaves out what does not pay on this machine
WIDE = ["workload.model.layers=1", "workload.model.hidden=256", "workload.model.heads=4", "batch.micro=4",
        "workload.model.vocabulary=4096", "workload.model.dropout=0", "workload.model.context=32",
        "workload.data.sample.tokens=40"]  # fmt: skip
#: workload -> its kernels; a large weight of volumes is copied for checkpoints, too
USERS = {
    "mnist": ["conv_pool", "jpeg_window"],
    "cnn": ["winograd", "batch_norm", "mirror_normalise"],
    "cosmology": ["conv3d_stride2", "conv3d_weight_copy"],
    "gpt2": ["attention", "dropout_gelu", "vocabulary", "cross_entropy", "products"],
}
OWN = {
    "cosmology": ["workload.model.width=16", "workload.data.samples=4", "workload.data.valid_samples=2"],
    "gpt2": WIDE,
}
#: Every training is a fork of a process that has loaded torch and none of the kernels.
SCRIPT = """
import json, os, sys
from podium.cli import app
from podium.commands import train  # what has to be loaded once
hidden = [name for name in sys.modules if name in json.loads(sys.argv[2])]
assert not hidden, f"loaded before anything asked for them: {hidden}"
for files, args in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        for file in files:
            sys.modules[file] = None
        app(args, standalone_mode=False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, files
"""


@pytest.mark.slow
@pytest.mark.parametrize("workload", USERS)
def test_a_workload_trains_without_any_one_file_of_its_kernels(workload, tmp_path):
    files = {file: name for name in USERS[workload] for file in KERNELS[name].files}
    if workload == "mnist":
        files["podium.kernels.jit.llvm"] = "attention"  # and all others that are made at run time
    recipe = ["train", *TINY[workload], *SHORT, ALL, *OWN.get(workload, [])]
    trainings = [([file], [*recipe, "--out", str(tmp_path / file)]) for file in files]
    trainings.append(([], [*recipe, "--out", str(tmp_path / "with all")]))
    known = json.dumps([file for kernel in KERNELS.values() for file in kernel.files if ".data." not in file])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(trainings), known], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    whole = Run(tmp_path / "with all")
    assert whole.environment()["kernels"] == sorted(KERNELS)
    for file, name in files.items():
        run = Run(tmp_path / file)
        assert name not in run.environment()["kernels"]
        assert run.summary()["train"]["last"]["loss"] == pytest.approx(
            whole.summary()["train"]["last"]["loss"], rel=1e-3
        )


def test_every_kernel_with_a_file_is_used_by_a_workload_here():
    assert sorted(name for names in USERS.values() for name in names) == sorted(
        name for name, kernel in KERNELS.items() if kernel.files
    )
