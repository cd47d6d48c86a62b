"""The pretend accelerator (`pretend.cpp`): built once per source and torch, and used by processes with `environment()`.

Needs a C++ compiler and the headers of Python; where there is none, tests that use it skip (`why_not`).
"""

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.native import built, why_not

__all__ = ["environment", "library", "read_records", "trained", "why_not"]
_HERE = Path(__file__).parent
#: recipes compute the same bits on a pretended device and on the CPU with these
SAME_BITS = ("engine.layout=default", "engine.kernels=off", "engine.threads=1")


@cache
def library() -> Path:
    """Build the library, unless this source has been built with this torch, and return its path."""
    libraries = ("torch", "torch_cpu", "c10", "torch_python")
    return built(_HERE / "pretend.cpp", libraries, "-DPRETEND_MODULE=pretend_device_native")


def environment(num_devices: int, record: Path | None = None, **others: str) -> dict[str, str]:
    """Return the variables of a process, and of those that it starts, in which torch finds that many devices."""
    path = os.pathsep.join(filter(None, [str(_HERE / "autoload"), os.environ.get("PYTHONPATH")]))
    found = {"PYTHONPATH": path, "PRETEND_LIBRARY": str(library()), "PRETEND_DEVICES": str(num_devices)}
    return {**os.environ, **found, **({"PRETEND_RECORD": str(record)} if record else {}), **others}


def read_records(folder: Path) -> list[dict]:
    """Return what processes have recorded: `waits`, as [what, where, how often], and `messages`."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def trained(
    folder: Path, trainings: dict[str, list[str]], num_instances: int = 1, num_devices: int | None = None
) -> dict[str, dict]:
    """Train recipes one after the other on pretended devices (none: 0, the CPU) by instances that stay for all of
    them.

    Return of each, as instance 0 sees it, its weights, its validation and its folder, or its error. On devices also the
    waits of the host, and the messages of every instance."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainings.json").write_text(json.dumps(trainings))
    num_devices = num_instances if num_devices is None else num_devices
    env = environment(num_devices, folder / "record") if num_devices else dict(os.environ)
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = [sys.executable, "-m", "tests.support.pretend.trainings", str(folder)]
    processes = []
    for index in range(num_instances):
        with (folder / f"stderr-{index}").open("w") as errors:
            command = [*words, str(index), str(num_instances), str(port)]
            processes.append(subprocess.Popen(command, cwd=_HERE.parents[2], env=env, stdout=errors, stderr=errors))
    try:
        codes = [process.wait(500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("stderr-*")))
    assert codes == [0] * num_instances, told
    everyone = [json.loads((folder / f"answers-{index}.json").read_text()) for index in range(num_instances)]
    for name, answer in everyone[0].items():
        answer["messages"] = [answers[name].get("messages") for answers in everyone]
    answers: dict[str, dict] = everyone[0]
    return answers
