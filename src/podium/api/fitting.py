"""`podium.fit`: a model and samples of a Python session, trained as any recipe is, with every promise that it has."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from inspect import isclass
from pathlib import Path
from typing import Any

from torch import nn

from podium.api.run import Run
from podium.api.session import SessionStop, session_kept
from podium.api.training import check_instances, interruptions_told, is_complete, run_elsewhere, run_here
from podium.errors import UserError, writing
from podium.recipe.loading import Recipe, recipe_from_tree, to_yaml
from podium.runs import own_code
from podium.runs.folder import Run as Folder
from podium.runs.folder import check_free, next_free_folder
from podium.runs.observers import watched_by
from podium.train import resume as resume_run
from podium.workloads.own.blueprint import Unreachable, source_files, write_objects
from podium.workloads.own.code import file_sha256
from podium.workloads.own.fitted import Given, given
from podium.workloads.own.losses import LossFunction
from podium.workloads.registry import FITTED, check_events, stop_imported_script

_LR = 1e-3


def fit(
    model: nn.Module,
    train: Any,
    valid: Any = 0.1,
    *,
    loss: str | Mapping[str, Any] | Callable,
    length: str = "10ep",
    micro_batch: int = 32,
    replicas: int = 1,
    accumulation: int = 1,
    optim: Mapping[str, Any] | str | None = None,
    test: Any = None,
    out: str | Path | None = None,
    instances: int = 1,
    resume: bool = False,
    seed: int = 1,
    workers: int = 0,
    init_from: str | Path | Mapping[str, Any] | None = None,
    members: Mapping[str, Callable] | None = None,
    observers: Sequence[Any] = (),
    **sections: Any,
) -> Run:
    """Train `model` on samples and return the run. The given model stays as it is; `run.best.model` is trained.

    train, valid, test   arrays or tensors ((x, y) or by name), a map-style Dataset, an HDF5 file with the names of its
                         datasets ("data.h5", "x", "y"), a Hugging Face dataset, a folder that `podium data make text`
                         wrote with the tokens that are read at once ("books", 128); `valid=0.1` holds that share out
    loss                 mse, l1, huber, cross_entropy, nll, bce; {"name": "cross_entropy", "label_smoothing": 0.1};
                         a function (output, target) of samples' losses or their mean, or (model, batch) of a Loss
    length               "20ep", "500up", "1e6sa"
    micro_batch, replicas, accumulation    their product is the global batch; replicas are what instances share
    optim                {"name": "adamw", "lr": 1e-3} and any other key of that section
    out                  the run folder, by default the next free one in `runs`
    instances            processes that train; with the same weights to the bit as one
    resume               continue the run in `out`, if there is one
    workers              processes that prepare the samples of a Dataset
    init_from            weights to start from, as `workload.init_from` of a recipe; default: those of the model
    members              functions for `predict`, `inputs`, `param_groups`, `stages` instead of the defaults
    observers            objects or classes with methods of `podium.Observer`, told what happens in the training; where
                         other processes train, a copy of each of them is
    **sections           any other section of a recipe: schedule={"name": "cosine"}, precision="16.32", …
    """
    stop_imported_script()
    check_instances(instances)
    watching = _watching(observers)
    objects = _checked(model, train, valid, test, loss, members or {})
    objects.observers = watching
    folder = Path(out) if out is not None else next_free_folder(Path("runs"), type(model).__name__.lower())
    tree = {
        "workload": {
            "name": FITTED,
            "model": {"class_name": type(model).__name__, "loss": _described_loss(loss)},
            "data": {
                "train": _described(train),
                "valid": f"{valid:g} of train" if isinstance(valid, float) else _described(valid),
                "seed": seed,
                "workers": workers,
            },
            **({"init_from": _initial(init_from)} if init_from is not None else {}),
        },
        "batch": {"micro": micro_batch, "replicas": replicas, "accumulation": accumulation},
        "train": {"length": str(length)},
        "optim": _optim(optim),
        "seed": seed,
        **{name: _section(name, value) for name, value in sections.items()},
    }
    recipe = recipe_from_tree(_merged(tree, sections), "podium.fit")
    with session_kept(), watched_by(watching):
        if resume and (folder / "recipe.yaml").exists():
            return _continued(recipe, folder, objects, instances)
        check_free(folder)
        if instances > 1 or recipe.parallel.num_stages > 1:
            return _launched(recipe, folder, objects, instances)
        run = run_here(recipe, folder, objects)
        _keep_model(folder, objects)
        return run


def _checked(model: Any, train: Any, valid: Any, test: Any, loss: Any, members: Mapping[str, Callable]) -> Given:
    if not isinstance(model, nn.Module):
        raise UserError(f"model = {type(model).__name__}: expected a torch.nn.Module")
    if isinstance(valid, int | float) and not (isinstance(valid, float) and 0 < valid < 1):
        raise UserError(
            f"valid = {valid!r}: expected samples, or the share of the training samples to hold out, as 0.1"
        )
    if train is None or valid is None:
        raise UserError(f"{'train' if train is None else 'valid'} = None: expected samples")
    known = ("predict", "inputs", "param_groups", "stages", "example")
    for name in members:
        if name not in known:
            raise UserError(f"members: {name} is none of {', '.join(known)}")
    LossFunction(loss)
    return Given(model, loss, train, valid, test, dict(members))


def _watching(observers: Sequence[Any]) -> list[Any]:
    """Return the observers as objects."""
    for observer in observers:
        check_events(observer, f"observers: {observer.__name__ if isclass(observer) else type(observer).__name__}")
    return [observer() if isclass(observer) else observer for observer in observers]


def _initial(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {"path": str(given)}


def _optim(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if given is None or isinstance(given, str):
        return {"name": given or "adamw", "lr": _LR}
    return {"name": "adamw", **given} if "name" not in given else dict(given)


def _section(name: str, value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _merged(tree: dict[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys that a section was given besides what has an argument of its own; short forms as in a recipe."""
    for name, key in (("precision", "mode"), ("average", "method")):
        if name in sections and not isinstance(sections[name], Mapping):
            tree[name] = {key: sections[name]}
    return tree


def _described_loss(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Mapping):
        return ", ".join(f"{key} {value}" for key, value in loss.items())
    return getattr(loss, "__qualname__", type(loss).__name__)


def _described(samples: Any) -> str:
    kind = type(samples).__name__
    if isinstance(samples, tuple | list) and samples and isinstance(samples[0], str | Path):
        return " ".join(map(str, samples))
    return kind


def _launched(recipe: Recipe, folder: Path, objects: Given, instances: int) -> Run:
    """Write what other processes need into the run's folder, and have them train."""
    was_there = folder.exists()
    try:
        path = _write_recipe(recipe, folder, objects)
        return run_elsewhere(["train", str(path), "--out", str(folder)], folder, instances, objects)
    finally:
        if not (folder / "recipe.yaml").exists():  # nothing half-written stays
            shutil.rmtree(folder / own_code.OBJECTS, ignore_errors=True)
            if not was_there and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def _write_recipe(recipe: Recipe, folder: Path, objects: Given) -> Path:
    place = folder / own_code.OBJECTS
    tree = recipe.tree()
    tree["workload"]["model"] |= _written(place, objects, data=True)
    path = place / "recipe.yaml"
    with writing(path):
        path.write_text(to_yaml(tree), encoding="utf-8")
    return path


def _written(place: Path, objects: Given, *, data: bool) -> dict[str, Any]:
    """Write the objects; return the keys of `workload.model` that lead to them."""
    with writing(place):
        path = write_objects(objects.objects(data=data), place)
    own_code.remember(FITTED, [file_sha256(path)])
    return {"objects": str(place.resolve()), "files": {str(file): file_sha256(file) for file in source_files(path)}}


def _keep_model(folder: Path, objects: Given) -> None:
    """Write the model into the run, so that another session can open it; one that cannot be written is left out."""
    try:
        _written(folder / own_code.OBJECTS, objects, data=False)
    except Unreachable:
        shutil.rmtree(folder / own_code.OBJECTS, ignore_errors=True)


def _continued(recipe: Recipe, folder: Path, objects: Given, instances: int) -> Run:
    if is_complete(folder):
        return Run(folder, objects)
    saved = Folder(folder).tree()
    for name, section in recipe.tree().items():
        if name not in ("workload", "launch", "parallel", "log") and saved.get(name) != section:
            raise UserError(
                f"{name} differs from that of the run in {folder}, which cannot change when it continues: choose "
                "another out to begin a new one"
            )
    if instances > 1:
        _written(folder / own_code.OBJECTS, objects, data=True)
        return run_elsewhere(["resume", str(folder), "--trust"], folder, instances, objects)
    with given(objects), interruptions_told(fitted=True):
        resume_run(Folder(folder), recipe, stop=SessionStop())
    return Run(folder, objects)
