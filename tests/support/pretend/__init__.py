"""The pretend accelerator (`pretend.cpp`): built once per source and torch, and used by processes with `environment()`.

Needs a C++ compiler and the headers of Python; where there is none, tests that use it skip (`why_not`).
"""

import hashlib
import json
import os
import shutil
import subprocess
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
