"""JAX + Flax + optax: the lane's model written anew in Flax, in an environment of its own (`make race` sets it up).

This side gives it the same weights, samples, order and values of the optimiser, and reads the trained weights back. The
loop and the models are in `bench/race/flax_side`.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.race.contenders import JAX_PYTHON
from bench.race.heat import Heat, Outcome
from bench.race.lane import Flattened, Task

_TRAIN = Path(__file__).parents[1] / "flax_side" / "train.py"
_STATISTICS = {"running_mean": "mean", "running_var": "var"}
_NOT_THERE = ("num_batches_tracked", "head.out.weight")  # a tied head is the table itself
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)


@dataclass(frozen=True)
class _Weight:
    """One tensor of the model and how Flax has it."""

    #: `layer/leaf`
    name: str
    tensor: Tensor
    #: the axis of torch's tensor along which Flax has features in another order, and that order
    axis: int = 0
    order: NDArray | None = None

    @property
    def is_kernel(self) -> bool:
        return self.name.endswith("/kernel")

    def to_flax(self) -> NDArray:
        array = self.tensor.detach().numpy()
        if self.order is not None:
            array = np.take(array, self.order, self.axis)
        # torch has (out, in, sizes…), Flax (sizes…, in, out)
        return np.ascontiguousarray(np.moveaxis(array, (0, 1), (-1, -2)) if self.is_kernel else array)

    def from_flax(self, array: NDArray) -> None:
        if self.is_kernel:
            array = np.moveaxis(array, (-1, -2), (0, 1))
        if self.order is not None:
            array = np.take(array, np.argsort(self.order), self.axis)
        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(np.array(array)))


def weights_of(model: nn.Module, flattened: Flattened) -> list[_Weight]:
    """Return the parameters and running statistics of a model, with what it takes to turn them."""
    found = []
    for full_name, tensor in model.state_dict(keep_vars=True).items():
        if full_name.endswith(_NOT_THERE):
            continue
        layer, _, leaf = full_name.rpartition(".")
        module = model.get_submodule(layer)
        is_norm = isinstance(module, _NORMS)
        if leaf == "weight":
            leaf = "scale" if is_norm else "embedding" if isinstance(module, nn.Embedding) else "kernel"
        name = f"{layer}/{_STATISTICS.get(leaf, leaf)}"
        turned = layer in flattened and (is_norm or leaf == "kernel")
        order = _channels_last(flattened[layer]) if turned else None
        found.append(_Weight(name, tensor, 0 if is_norm else 1, order))
    return found


def _channels_last(shape: tuple[int, ...]) -> NDArray:
    """Return, for features (channels, sizes…) flattened with channels last, their numbers with channels first."""
    return np.moveaxis(np.arange(np.prod(shape)).reshape(shape), 0, -1).reshape(-1)


def _optimiser(task: Task) -> dict[str, Any]:
    """Return the values of the task's optimiser, which optax is to have too."""
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    values = {name: task.optimiser.defaults[name] for name in names if name in task.optimiser.defaults}
    return {"kind": type(task.optimiser).__name__, **values}


def _write(task: Task, heat: Heat, weights: list[_Weight]) -> None:
    folder, lane = Path(heat.folder), heat.lane
    for name, tensor in zip(task.fields, task.dataset.tensors, strict=True):
        rows = tensor.movedim(1, -1) if tensor.dim() == 4 else tensor
        rows = rows if rows.is_floating_point() else rows.to(torch.int32)
        np.save(folder / f"sample.{name}.npy", rows.contiguous().numpy())
    np.save(folder / "order.npy", np.array(list(task.order), np.int32))
    turned = {weight.name: weight.to_flax() for weight in weights}
    np.savez(folder / "weights.npz", **turned)  # type: ignore[arg-type]
    told = {
        "model": lane.flax_model,
        "options": heat.recipe().workload.model.model_dump(mode="json"),
        "optimiser": _optimiser(task),
        "fields": task.fields,
        "batch_size": task.batch_size,
        "num_warmup": heat.num_warmup,
        "generator": "rbg",
    }
    (folder / "task.json").write_text(json.dumps(told))


def race(heat: Heat) -> Outcome:
    task = heat.task()
    weights = weights_of(task.model, heat.lane.flattened)
    _write(task, heat, weights)
    began = time.perf_counter()
    done = subprocess.run([str(JAX_PYTHON), str(_TRAIN), heat.folder], capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stderr)
    folder = Path(heat.folder)
    trained = np.load(folder / "trained.npz")
    for weight in weights:
        weight.from_flax(trained[weight.name])
    seconds = json.loads((folder / "done.json").read_text())["seconds"]
    return Outcome(seconds, task.model, os.cpu_count() or 1, took)
