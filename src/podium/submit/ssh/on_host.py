"""One host's part of a job by ssh, on that host: looked at, started, and ended. What it must not see comes on standard
input."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from podium import __version__
from podium.errors import UserError, writing
from podium.launch.addresses import local_names
from podium.machine.bounded_files import append_regular, parse_mapping, read_mapping
from podium.recipe.loading import recipe_from_tree
from podium.recipe.reading import parse_yaml
from podium.runs.folder import JOB, write_json
from podium.topology import usable_cores

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """The files of one host's part. Hosts may share the folder, so they are called after the host."""

    run: Path
    host: str

    @property
    def log(self) -> Path:
        return self.run / JOB / f"log-{self.host}"

    @property
    def process(self) -> Path:
        return self.run / JOB / f"process-{self.host}.json"

    @property
    def code(self) -> Path:
        return self.run / JOB / f"exit-code-{self.host}"


def given() -> dict[str, Any]:
    """Return what stands on standard input."""
    try:
        return parse_mapping(sys.stdin.buffer.read(_MAX_BYTES))
    except ValueError as error:
        raise UserError(f"standard input: {error}") from None


def facts(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must fit before a training starts here; `wanted` has the recipe, unless it needs code that is sent
    later."""
    recipe = recipe_from_tree(parse_yaml(str(wanted["recipe"])), "the recipe") if "recipe" in wanted else None
    path = None if recipe is None else getattr(recipe.workload.data, "path", None)
    cores = len(usable_cores())
    return {
        "podium": __version__,
        "torch": metadata.version("torch"),
        "recipe_sha256": "" if recipe is None else recipe.sha256(),
        "data": str(path) if path is not None and not Path(path).expanduser().exists() else "",
        "time": time.time(),
        "cores": cores,
        "free_cores": max(0.0, round(cores - os.getloadavg()[0], 1)),
        "names": sorted(local_names()),
    }


def start(part: Part, wanted: Mapping[str, Any]) -> int:
    """Start this host's part, which goes on when the connection ends; return its process id.

    `wanted`: what to train (`words_of`), and variables of the environment, the run's secret among them.
    """
    if _alive(part) is not None:
        raise UserError(f"{part.run} is being trained already")
    words = words_of(part, wanted)
    env = {**os.environ, **{str(name): str(value) for name, value in dict(wanted["environment"]).items()}}
    with writing(part.log):
        part.code.unlink(missing_ok=True)
        log = append_regular(part.log)
    # A shell stays beside it for one purpose: to write down how it has ended.
    watch = ["/bin/sh", "-c", 'code=$1; shift; "$@"; printf %s "$?" >"$code"', "sh", str(part.code)]
    with log:
        process = subprocess.Popen(
            [*watch, sys.executable, "-m", "podium", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    write_json(part.process, {"pid": process.pid, "began": psutil.Process(process.pid).create_time()})
    return process.pid


def state(part: Part) -> dict[str, Any]:
    """Return whether this host's part is there, and how it ended if it has."""
    process = _alive(part)
    code = part.code.read_text(encoding="utf-8")[:8] if part.code.is_file() else ""
    return {"pid": process.pid if process else None, "code": int(code) if code.isdecimal() else None}


def stop(part: Part) -> bool:
    """Have this host's part save and end, and with it those of the others; return whether it was there."""
    process = _alive(part)
    if process is not None:
        for child in process.children():
            child.terminate()
    return process is not None


def _alive(part: Part) -> psutil.Process | None:
    known = read_mapping(part.process, "remove it")
    try:
        process = psutil.Process(int(known["pid"])) if known else None
        # The same number may by now be another process's.
        same = process is not None and abs(process.create_time() - float(known["began"] if known else 0)) < 0.5
        return process if same and process and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, ValueError, TypeError):
        return None


def answer(value: Mapping[str, Any]) -> None:
    """Print what another host's Podium reads."""
    print(json.dumps(value))


def words_of(part: Part, wanted: Mapping[str, Any]) -> list[str]:
    """Return the words after `podium` that train in a folder: a run on all of `hosts`, or a share of a study's runs,
    at most `at_once` of them at the same time."""
    if "at_once" in wanted:
        return ["on-host", "share", str(part.run), part.host, "--at-once", str(int(wanted["at_once"]))]
    folder, hosts = part.run, {str(name): int(count) for name, count in dict(wanted["hosts"]).items()}
    words = ["train", str(folder / JOB / "recipe.yaml"), "--out", str(folder)]
    if len(hosts) == 1:
        return [*words, "--instances", str(*hosts.values())]
    return [*words, "--hosts", ",".join(f"{host}:{count}" for host, count in hosts.items()), "--join"]
