"""The pretend accelerator (`pretend.cpp`): built once per source and torch, and used by processes with `environment()`.

Needs a C++ compiler and the headers of Python; where there is none, tests that use it skip (`why_not`).
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch

_HERE = Path(__file__).parent
#: recipes compute the same bits on a pretended device and on the CPU with these
SAME_BITS = ("engine.layout=default", "engine.kernels=off", "engine.threads=1")


@cache
def why_not() -> str:
    """Return why the device cannot be built here; nothing where it can."""
    if shutil.which("g++") is None:
        return "no g++ to build the pretend accelerator with"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "no headers of Python to build the pretend accelerator with"
    return ""


@cache
def library() -> Path:
    """Build the library, unless this source has been built with this torch, and return its path."""
    source = _HERE / "pretend.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = _HERE / "built" / f"pretend-{key}.so"
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        root, aside = Path(torch.__file__).parent, built.with_suffix(f".{os.getpid()}")
        paths = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        words = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DPRETEND_MODULE=pretend_device_native"]
        words += [str(source), "-o", str(aside), *(f"-I{path}" for path in paths), f"-L{root / 'lib'}"]
        words += [f"-l{name}" for name in ("torch", "torch_cpu", "c10", "torch_python")]
        subprocess.run([*words, f"-Wl,-rpath,{root / 'lib'}"], check=True, timeout=500)
        aside.replace(built)
    return built


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
