"""A run as Python sees it: its numbers, its checkpoints, its model, predictions for new samples."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.checkpoints import reading
from podium.contract import Workload
from podium.data.source import Source
from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.runs import folder as run_folder
from podium.runs import own_code
from podium.training.inference import model_outputs, source_batches
from podium.ui.console import clock_text, number
from podium.workloads.own.data import as_arrays, as_source
from podium.workloads.own.fitted import FittedData, FittedModel, Given, given
from podium.workloads.own.fitted import Workload as FittedWorkload
from podium.workloads.own.losses import TARGETS
from podium.workloads.registry import workload_class

_MICRO_BATCH = 256


class Run:
    """A run and its folder. Nothing is read before it is asked for, and everything is read anew."""

    def __init__(self, path: str | Path, objects: Given | None = None) -> None:
        """Take a run's folder; `objects`: what `podium.fit` was given in this session."""
        self.path = Path(path)
        self._folder = run_folder.Run(self.path)
        self._objects = objects

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds: state, updates, metrics, speed, `weights_sha256`."""
        return self._folder.summary()

    @property
    def state(self) -> str:
        """One of running, done, interrupted, failed, killed."""
        return self._folder.state()

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self._folder.recipe()

    @property
    def report(self) -> Path:
        """The page with curves, pictures and tables."""
        return self._folder.report_file

    def metrics(self) -> Any:
        """Return the records of training and validation: a pandas DataFrame, or a list where pandas is missing."""
        records = self._folder.records()
        try:
            import pandas
        except ImportError:
            return records
        return pandas.DataFrame(records)

    @property
    def checkpoints(self) -> "list[SavedModel]":
        """All checkpoints, oldest first."""
        return [SavedModel(self, _update_of(path)) for path in reading.checkpoint_paths(self._folder.checkpoints)]

    @property
    def best(self) -> "SavedModel":
        """The checkpoint with the best validation loss."""
        update = self.summary.get("valid", {}).get("best", {}).get("update")
        if update is None:
            raise UserError(f"{self.path} has no validated checkpoint yet")
        return SavedModel(self, update)

    @property
    def last(self) -> "SavedModel":
        """The newest checkpoint."""
        if not (paths := reading.checkpoint_paths(self._folder.checkpoints)):
            raise UserError(f"{self.path} has no checkpoint yet")
        return SavedModel(self, _update_of(paths[-1]))

    def predict(self, samples: Any, *, micro_batch: int = _MICRO_BATCH) -> Any:
        """Return what the best model returns for samples: arrays, tensors, a Dataset or any other form that fit takes.

        An array, or a tuple of them, is what the model takes; samples by name may have a target, which is left out. The
        result is an array, or arrays by name where the model returns several tensors.
        """
        return self.best.predict(samples, micro_batch=micro_batch)

    def _workload(self) -> Workload:
        workload: Workload
        if self._objects is not None:
            with given(self._objects):
                workload = FittedWorkload(FittedModel(), FittedData())
        else:
            section = self.recipe.workload
            workload = workload_class(section.name)(section.model, section.data)
        if hasattr(workload, "tries"):
            workload.tries = False  # its samples may be elsewhere
        return workload

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self._headline()})"

    def _headline(self) -> str:
        summary = self.summary
        if not summary:
            return self.state
        last = ", ".join(f"valid/{name} {number(value)}" for name, value in summary["valid"]["last"].items())
        return f"{self.state} after {summary['updates']:,} of {summary['total_updates']:,} updates" + (
            f", {last}" if last else ""
        )

    def _repr_html_(self) -> str:
        """Return the essentials of the report, as notebooks show them."""
        summary = self.summary
        head = f"<b>{html.escape(str(self.path))}</b>: {html.escape(self._headline())}"
        if not summary:
            return f"<div>{head}</div>"
        from podium.runs.curves import draw_curves  # with matplotlib, which takes long to import

        best = summary["valid"]["best"]
        rows = [
            (f"valid/{name}", number(value), number(best[name]) if name in best else "")
            for name, value in summary["valid"]["last"].items()
        ]
        rows += [(f"train/{name}", number(value), "") for name, value in summary["train"]["last"].items()]
        facts = (
            f"{summary['samples']:,} samples, {number(summary['samples_per_second'])} samples/s, "
            f"{clock_text(summary['seconds']['total'])}; weights {str(summary.get('weights_sha256'))[:16]}"
        )
        body = "".join(f"<tr><td>{html.escape(a)}</td><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
        curves = "".join(f'<div style="max-width: 420px">{drawing}</div>' for drawing in draw_curves(self._folder))
        colours = "--ink: #1f2933; --muted: #6b7785; --line: #e4e7eb; --accent: #2563eb"
        return (
            f'<div style="{colours}"><p>{head}</p><table><tr><th></th><th>last</th><th>best</th></tr>{body}</table>'
            f'<div style="display: flex; flex-wrap: wrap; gap: 12px">{curves}</div>'
            f"<p>{html.escape(facts)}; report: {html.escape(str(self.report))}</p></div>"
        )


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint of a run."""

    run: Run
    update: int

    @property
    def path(self) -> Path:
        return reading.path_of(run_folder.Run(self.run.path).checkpoints, self.update)

    @property
    def metrics(self) -> dict[str, float]:
        """The record of its update."""
        return next((r for r in reversed(run_folder.Run(self.run.path).records()) if r["update"] == self.update), {})

    @property
    def model(self) -> nn.Module:
        """The model with this checkpoint's weights, built anew, in evaluation mode."""
        return self.load().model

    def load(self) -> "Loaded":
        """Return the model and its workload."""
        workload = self.run._workload()
        model = workload.build_model()
        reading.load(self.path).restore(model)
        return Loaded(model.eval(), workload)

    def predict(self, samples: Any, *, micro_batch: int = _MICRO_BATCH) -> Any:
        """Return what the model returns for samples; see `Run.predict`."""
        return self.load().predict(samples, micro_batch=micro_batch)


@dataclass(frozen=True)
class Loaded:
    """A trained model, the workload that it belongs to, and what turns samples into the model's inputs."""

    model: nn.Module
    workload: Workload

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what the model takes of a batch."""
        return self.workload.inputs(batch)

    def predict(self, samples: Any, *, micro_batch: int = _MICRO_BATCH) -> Any:
        """Return the model's outputs for samples as arrays; see `Run.predict`."""
        source, take = self._taken(samples)
        device = next((param.device for param in self.model.parameters()), torch.device("cpu"))
        joined = model_outputs(self.model, take, source_batches(source, micro_batch, device))
        return joined["output"] if list(joined) == ["output"] else joined

    def _taken(self, samples: Any) -> "tuple[Source, Callable[[Mapping[str, Tensor]], Sequence[Tensor]]]":
        """Return the samples as a source, and what takes the model's inputs out of a batch of them."""
        if not isinstance(samples, Mapping) and (arrays := as_arrays(samples)) is not None:
            numbered = {str(place): array for place, array in enumerate(arrays.values())}
            return as_source(numbered, seed=0, where="samples"), lambda batch: list(batch.values())
        source = as_source(samples, seed=0, where="samples")
        if any(name in TARGETS for name in source.fields):
            return source, self.workload.inputs
        return source, lambda batch: list(batch.values())


def open_run(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> Run:
    """Return an existing run. `model`: for one of `podium.fit` whose model the run could not keep, such as one that was
    defined in a notebook. `trust`: let a run that was not made here run its code."""
    if trust:
        own_code.CHOICE.trust = True
    run = run_folder.open_run(Path(path))
    return Run(run.path, Given(model, "mse") if model is not None else None)


def load(run: str | Path | Run, *, checkpoint: str | int = "best", trust: bool = False) -> Loaded:
    """Return the trained model of a run with its workload; `checkpoint` is best, last or the number of an update."""
    found = run if isinstance(run, Run) else open_run(run, trust=trust)
    if checkpoint in ("best", "last"):
        saved: SavedModel = getattr(found, str(checkpoint))
    elif isinstance(checkpoint, int):
        saved = SavedModel(found, checkpoint)
    else:
        raise UserError(f"checkpoint = {checkpoint!r}: expected best, last or the number of an update")
    return saved.load()


def _update_of(path: Path) -> int:
    return int(path.name.removeprefix(reading.PREFIX))
