"""The run folder: every path in it, the record of the environment, the summary. Nobody else builds these names."""

import fcntl
import json
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from podium import __version__
from podium.errors import UserError, system_reason, writing
from podium.recipe import Recipe, read_yaml, recipe_from_tree, to_yaml
from podium.topology import usable_cores

#: What must agree for two runs of one recipe to give the same bits.
BIT_CONDITIONS = ("torch", "torch_build", "instruction_set", "threads_per_replica", "busy_threads", "device")


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
    def pictures(self) -> Path:
        return self.path / "pictures"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps any other process from training in this folder; the system lets go when the process ends."""
        lock = self.path / ".lock"
        with writing(lock):
            file = lock.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path} is being trained by another process") from None
            yield

    def recipe(self) -> Recipe:
        """The resolved recipe this run was started with."""
        return recipe_from_tree(read_yaml(self.recipe_file), where=str(self.recipe_file))

    def summary(self) -> dict[str, Any]:
        return _read_json(self.summary_file)

    def environment(self) -> dict[str, Any]:
        return _read_json(self.environment_file)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_file, summary)

    def records(self) -> list[dict[str, Any]]:
        """The metric records written so far; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        records = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def forget_after(self, update: int) -> None:
        """Drops metric records of updates that will be done again after a resume."""
        kept = [record for record in self.records() if record["update"] <= update]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace_file(self.metrics_file, text.encode())


def next_free_folder(root: Path, name: str) -> Path:
    """`runs/neuron-quick-001` and so on: the first number not taken."""
    stem = name.removesuffix(".yaml").removesuffix(".yml").strip("./").replace("/", "-")
    taken = {path.name for path in root.glob(f"{stem}-*")}
    number = next(n for n in range(1, 10**6) if f"{stem}-{n:03d}" not in taken)
    return root / f"{stem}-{number:03d}"


def check_free(path: Path) -> None:
    """UserError where a run (or anything else) is in the way."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another folder with --out")
    if (path / "recipe.yaml").exists():
        raise UserError(f"{path} already holds a run: continue it with `podium resume {path}` or choose another --out")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path} is not empty: choose another folder with --out")


def create_run(path: Path, recipe: Recipe, environment: Mapping[str, Any]) -> Run:
    """Makes the folder with recipe and environment in it, or leaves nothing."""
    check_free(path)
    run = Run(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {path} cannot be made: {system_reason(error)}") from error
    try:
        with writing(path):
            run.log.mkdir()
        write_json(run.environment_file, environment)
        replace_file(run.recipe_file, to_yaml(recipe.tree()).encode())
    except UserError:
        shutil.rmtree(path, ignore_errors=True)  # it was empty or not there
        raise
    return run


def open_run(path: Path) -> Run:
    """An existing run."""
    run = Run(path)
    if not path.exists():
        raise UserError(f"there is no run folder {path}")
    if not run.recipe_file.is_file():
        raise UserError(f"{path} is not a run folder (it has no recipe.yaml)")
    return run


def environment(threads_per_replica: int, device: torch.device, busy_threads: int | None = None) -> dict[str, Any]:
    """What the run ran on, and everything its bits depend on beside the recipe."""
    return {
        "podium": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": torch.__config__.show(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads_per_replica": threads_per_replica,
        "busy_threads": busy_threads or threads_per_replica,
        "device": str(device),
        "num_cores": len(usable_cores()),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": processor(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": {name: metadata.version(name) for name in ("numpy", "h5py", "safetensors", "pydantic")},
        "command": sys.argv,
    }


def differing_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Conditions of bit-equality that differ between two environments, as text."""
    differing = [name for name in BIT_CONDITIONS if before.get(name) != now.get(name)]
    return [name if name == "torch_build" else f"{name} {before.get(name)} → {now.get(name)}" for name in differing]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A reader sees the old or the new file, never half of one."""
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Written aside and renamed; where that fails, a UserError says why and the file stays as it was."""
    aside = path.with_name(f".{path.name}.writing")
    with writing(path):
        try:
            aside.write_bytes(data)
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError:
        raise UserError(f"{path} is damaged: it is not JSON") from None
    return value


def processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
