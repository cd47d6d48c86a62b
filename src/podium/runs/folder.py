"""The run folder: every path in it, the record of the environment, the summary. Nobody else builds these names.

Reading a run loads no torch; only `environment`, which describes the machine for a new one, does.
"""

import copy
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium import __version__
from podium.errors import UserError, system_reason, writing
from podium.launch.environment import user_command
from podium.machine import processor
from podium.machine.bounded_files import write_new
from podium.machine.folder_lock import is_taken, only_here
from podium.machine.numerics import numerics_variables
from podium.recipe.loading import Recipe, read_yaml, recipe_from_tree, to_yaml
from podium.runs import observer_code, own_code
from podium.runs.facts import iterate_records, read_environment, read_records, read_summary, record_line
from podium.topology import usable_cores
from podium.workloads.registry import FITTED

if TYPE_CHECKING:
    import torch

#: What must agree for two runs of one recipe to give the same bits.
BIT_CONDITIONS = (
    "torch",
    "torch_build",
    "instruction_set",
    "threads_per_replica",
    "busy_threads",
    "device",
    "accelerator",
    "kernels",
    "numerics_variables",
)


#: folder of a run or study that was submitted to a scheduler: its recipe, script and log (`podium.submit`)
JOB = "job"


@dataclass(frozen=True)
class Run:
    """A run and its folder."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def average(self) -> Path:
        return self.path / "average"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def instance_log(self, index: int) -> Path:
        return self.log / f"instance-{index}.log"

    @property
    def monitor(self) -> Path:
        return self.path / "monitor"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep any other process from training in this folder; the system unlocks it when this process ends."""
        with only_here(self.lock_file, f"{self.path} is being trained by another process"):
            yield

    def state(self) -> str:
        """Return what the run is doing, for people: that of the summary, but `killed` where nobody trains any more.

        A process that is killed cannot say so: its summary goes on saying `running`, yet its lock is gone.
        """
        state = str(self.summary().get("state", "not started"))
        return "killed" if state == "running" and not is_taken(self.lock_file) else state

    def command(self) -> list[str]:
        """Return the command that started the run, in the words that a person would type."""
        return ["podium", *self.environment().get("command", ["podium"])[1:]]

    def recipe(self, tree: Mapping[str, Any] | None = None) -> Recipe:
        """Return the resolved recipe that this run was started with. `tree`: as a checkpoint has it, not the file."""
        tree = self.tree() if tree is None else copy.deepcopy(dict(tree))
        for part, name in own_code.names_in(tree).items():
            tree[part]["name"] = own_code.name_to_use(self.path, part, name, self.environment())
        workload = tree.get("workload")
        if isinstance(workload, dict) and workload.get("name") == FITTED:
            workload["model"] = own_code.fitted_objects(self.path, workload.get("model"))
        return recipe_from_tree(tree, where=str(self.recipe_file))

    def tree(self) -> dict[str, Any]:
        """Return the recipe as it was saved, read without importing a workload."""
        return read_yaml(self.recipe_file)

    def summary(self, *, whole: bool = False) -> dict[str, Any]:
        """Return the summary, empty where there is none yet; `whole`: raise if anything that is shown is missing."""
        return read_summary(self.summary_file, whole=whole)

    def environment(self) -> dict[str, Any]:
        return read_environment(self.environment_file)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_file, {**summary, "written": _now()})

    def records(self, *, digests: bool = False) -> list[dict[str, Any]]:
        """Return the metric records written so far; a last line cut short by a kill is left out. `digests`: with those
        of the weights, which are text."""
        return read_records(self.metrics_file, digests=digests)

    def forget_after(self, update: int) -> None:
        """Drop metric records of updates that will be done again after a resume."""
        if self.metrics_file.exists():
            records = iterate_records(self.metrics_file, digests=True)
            replace_file(self.metrics_file, (record_line(record) for record in records if record["update"] <= update))


def next_free_folder(root: Path, name: str) -> Path:
    """Return `runs/neuron-quick-001` and so on: the first number that is free."""
    stem = name.removesuffix(".yaml").removesuffix(".yml").strip("./").replace("/", "-")
    taken = {path.name for path in root.glob(f"{stem}-*")}
    number = next(n for n in range(1, 10**6) if f"{stem}-{n:03d}" not in taken)
    return root / f"{stem}-{number:03d}"


def check_free(path: Path) -> None:
    """Raise UserError where a run (or anything else) is in the way."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another folder with --out")
    if (path / "recipe.yaml").exists():
        raise UserError(f"{path} already holds a run: continue it with `podium resume {path}` or choose another --out")
    if path.is_dir() and any(child.name not in (own_code.OBJECTS, JOB) for child in path.iterdir()):
        raise UserError(f"{path} is not empty: choose another folder with --out")


def create_run(path: Path, recipe: Recipe, environment: Mapping[str, Any]) -> Run:
    """Create the folder with recipe and environment in it, or leave nothing."""
    check_free(path)
    run = Run(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        run.log.mkdir()  # of two that start here at the same time, one succeeds
    except FileExistsError:
        raise UserError(f"another run is starting in {path}: choose another folder with --out") from None
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        raise UserError(f"the run folder {path} cannot be created: {system_reason(error)}") from error
    try:
        own_code.keep(path, own_code.names_in(recipe.tree()))
        write_json(run.environment_file, {**environment, **observer_code.keep(path, recipe.log.observers)})
        replace_file(run.recipe_file, to_yaml(recipe.tree()).encode())
    except UserError:
        _empty(path)
        raise
    return run


def _empty(path: Path) -> None:
    """Remove a folder that had nothing of a run in it; what a job has brought stays."""
    for child in path.iterdir():
        if child.name != JOB:
            shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def open_run(path: Path) -> Run:
    """Return an existing run."""
    run = Run(path)
    if not path.exists():
        raise UserError(f"the run folder {path} does not exist")
    if not run.recipe_file.is_file():
        raise UserError(f"{path} is not a run folder (it has no recipe.yaml)")
    return run


def environment(
    threads_per_replica: int,
    device: "torch.device",
    busy_threads: int | None = None,
    tree: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a run that starts now runs on, and everything its bits depend on beside the recipe.

    `tree`: that of the recipe, whose names may lead to a user's code.
    """
    import psutil
    import torch

    from podium.kernels import registry
    from podium.machine.device import accelerator_facts

    return {
        "started": _now(),
        "podium": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": torch.__config__.show(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads_per_replica": threads_per_replica,
        "busy_threads": busy_threads or threads_per_replica,
        "device": device.type,  # its number is that of a process
        "accelerator": accelerator_facts(device),
        "kernels": registry.in_use(),
        "numerics_variables": numerics_variables(os.environ),
        "num_cores": len(usable_cores()),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": processor.name(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": {name: metadata.version(name) for name in ("numpy", "h5py", "safetensors", "pydantic")},
        "command": user_command(os.environ),
        **own_code.record(own_code.names_in(tree or {})),
    }


def differing_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the conditions of bit-equality that differ between two environments, as text."""
    differing = [name for name in BIT_CONDITIONS if before.get(name) != now.get(name)]
    for name in ("accelerator", "kernels", "numerics_variables"):
        if name not in before and name in differing:  # a run from before they were recorded
            differing.remove(name)
    code: list[str] = []
    for place in own_code.PLACES.values():
        had_code, has_code = (side.get(place, {}).get("files", {}) for side in (before, now))
        code += sorted(path for path in had_code if has_code.get(path, had_code[path]) != had_code[path])
    texts = {name: f"{name} {before.get(name)} → {now.get(name)}" for name in differing}
    if "accelerator" in differing:
        had, has = ((side.get("accelerator") or {}) for side in (before, now))
        texts["accelerator"] = ", ".join(
            f"{key} of the accelerator {had.get(key, 'not set')} → {has.get(key, 'not set')}"
            for key in {**had, **has}
            if had.get(key) != has.get(key)
        )
    if "kernels" in differing:
        had, has = set(before["kernels"]), set(now.get("kernels", ()))
        changes = {"without": sorted(had - has), "with": sorted(has - had)}
        texts["kernels"] = "kernels " + " and ".join(
            f"{word} {', '.join(names)}" for word, names in changes.items() if names
        )
    if "numerics_variables" in differing:
        had, has = before["numerics_variables"], now.get("numerics_variables", {})
        texts["numerics_variables"] = ", ".join(
            f"{name} {had.get(name, 'not set')} → {has.get(name, 'not set')}"
            for name in sorted({**had, **has})
            if had.get(name) != has.get(name)
        )
    return ["torch_build" if name == "torch_build" else texts[name] for name in differing] + code


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file; a reader sees the old or the new one, never half of one."""
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def replace_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write aside and rename; where that fails, a UserError says why and the file stays as it was."""
    aside = path.with_name(f".{path.name}.writing")
    with writing(path):
        try:
            write_new(aside, [data] if isinstance(data, bytes) else data)
            aside.replace(path)
        except (OSError, UserError):
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
