"""Golden losses: the first updates of every workload give the losses they always gave. Guards refactors.

To the bit where torch, instruction set and processor are those of `losses.json`, else to 1e-5 (valid: 1e-4). A change
that is meant to change numbers renews them, in the same commit:

    PODIUM_RENEW_GOLDEN=1 pytest tests/golden
"""

import json
import os
from pathlib import Path

import pytest
import torch

from podium.recipe.loading import load_recipe
from podium.runs.folder import environment
from podium.train import train
from podium.workloads.registry import WORKLOADS
from tests.support.recipes import TINY

GOLDEN = Path(__file__).with_name("losses.json")
SHORT = ["train.length=6up", "engine.updates_per_call=1", "engine.threads=1", "schedule.warmup=0"]
RENEW = os.environ.get("PODIUM_RENEW_GOLDEN") == "1"


def conditions() -> dict[str, str]:
    """Where these agree, bits agree."""
    here = environment(1, torch.device("cpu"))
    return {name: here[name] for name in ("torch", "instruction_set", "processor")}


def measured(workload: str, folder: Path) -> dict:
    run = train(load_recipe(TINY[workload][0], [*TINY[workload][1:], *SHORT]), folder)
    return {
        "train": [record["train/loss"] for record in run.records()],
        "valid": run.summary()["valid"]["last"]["loss"],
    }


@pytest.mark.parametrize("workload", WORKLOADS)
def test_losses_are_what_they_always_were(workload, tmp_path):
    found = measured(workload, tmp_path / "run")
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if RENEW:
        same = kept if kept.get("conditions") == conditions() else {}
        losses = {**same.get("losses", {}), workload: found}
        GOLDEN.write_text(
            json.dumps({"conditions": conditions(), "losses": dict(sorted(losses.items()))}, indent=1) + "\n"
        )
        pytest.skip("PODIUM_RENEW_GOLDEN=1: losses.json is written, not compared")
    assert workload in kept["losses"], "no golden losses yet: PODIUM_RENEW_GOLDEN=1 pytest tests/golden"
    golden = kept["losses"][workload]
    assert len(golden["train"]) == 6
    if kept["conditions"] == conditions():
        assert found == golden
    else:
        assert found["train"] == pytest.approx(golden["train"], rel=1e-5)
        # Biases before a batch norm get rounding noise for gradients, which adam makes steps of; seen in validation.
        assert found["valid"] == pytest.approx(golden["valid"], rel=1e-4)


def test_no_golden_losses_without_a_workload():
    assert json.loads(GOLDEN.read_text())["losses"].keys() == WORKLOADS.keys()
