"""Folders of runs that were not trained: files as a training writes them, with the numbers that a test asks for."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from podium.recipe.loading import load_recipe, to_yaml

UPDATES_PER_EPOCH = 20


def make_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    losses: Sequence[float] = (1.0, 0.5, 0.25),
    rate: float = 1000.0,
    instances: int = 1,
    state: str = "done",
    weights: str = "ab" * 32,
    seconds_per_epoch: float = 10.0,
    every: int = 10,
    energy_j: float | None = None,
    picture: str = "",
    tree: Mapping[str, Any] | None = None,
    extra: Mapping[str, float] | None = None,
) -> Path:
    """A run with one validation at the end of each epoch, whose losses these are."""
    path.mkdir(parents=True)
    if tree is None:
        tree = load_recipe("neuron/quick", overrides).tree()
    (path / "recipe.yaml").write_text(to_yaml(dict(tree)))
    topology = {"hosts": 1, "instances": instances, "replicas": instances, "stages": 1}
    updates = len(losses) * UPDATES_PER_EPOCH
    with (path / "metrics.jsonl").open("w") as file:
        for update in range(every, updates + 1, every):
            epoch = update / UPDATES_PER_EPOCH
            record = {
                "update": update, "epoch": epoch, "samples": update * 64,
                "train/loss": 1.5 * math.exp(-epoch / 2) + 0.05 * math.sin(update),
                "train/lr": 1e-3 * (1 - update / (updates + 1)),
                "train/samples_per_second": rate * (1 + 0.03 * math.sin(update)),
                "time/total_s": epoch * seconds_per_epoch, "device/cpu_percent": 97.0, **(extra or {}),
            }  # fmt: skip
            if energy_j is not None:
                record["system/energy_j"] = energy_j * update / updates
            if update % UPDATES_PER_EPOCH == 0:
                record["valid/loss"] = losses[update // UPDATES_PER_EPOCH - 1]
            file.write(json.dumps(record) + "\n")
    best = min(losses)
    at = (list(losses).index(best) + 1) * UPDATES_PER_EPOCH
    total = len(losses) * seconds_per_epoch
    summary = {
        "state": state, "updates": updates, "total_updates": updates, "epochs": float(len(losses)),
        "samples": updates * 64, "train": {"last": {"loss": 0.3}, "best": {"loss": 0.3}},
        "valid": {"last": {"loss": losses[-1]}, "best": {"loss": best, "update": at}},
        "samples_per_second": rate, "cpu_percent": 97.0, "num_parameters": 1000,
        "seconds": {"startup": 0.1 * total, "train": 0.8 * total, "valid": 0.1 * total, "total": total},
        "topology": topology, "weights_sha256": weights, "recipe_sha256": "cd" * 32,
        "written": "2026-11-18T12:00:00+00:00",
    }  # fmt: skip
    if energy_j is not None:
        summary["energy"] = {"processor_j": energy_j, "measured_s": total}
    (path / "summary.json").write_text(json.dumps(summary))
    environment = {
        "started": "2026-11-18T11:00:00+00:00", "podium": "0.1.0", "torch": "2.13.0", "device": "cpu",
        "threads_per_replica": 1, "command": ["podium", "train", "neuron/quick", *overrides],
    }  # fmt: skip
    (path / "environment.json").write_text(json.dumps(environment))
    if picture:
        (path / "pictures").mkdir()
        Image.radial_gradient("L").resize((900, 600)).convert("RGB").save(path / "pictures" / "picture.png")
        listed = {"title": picture, "path": "picture.png", "caption": ""}
        tables = [{"title": picture, "columns": ["a", "b"], "rows": [["1", picture]], "caption": ""}]
        (path / "pictures" / "prediction.json").write_text(json.dumps({"pictures": [listed], "tables": tables}))
    return path
