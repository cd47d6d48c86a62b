"""Small native libraries of the tests, built once per source and torch; tests that need one skip where it cannot be."""

import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path


@cache
def why_not() -> str:
    """Return why none can be built here; nothing where they can."""
    if shutil.which("g++") is None:
        return "no g++ to build the tests' devices with"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "no headers of Python to build the tests' devices with"
    return ""


def built(source: Path, libraries: tuple[str, ...], *words: str) -> Path:
    """Build a source of C++ against torch into the folder `built` beside it, unless that has been done; return the
    library's path. `libraries` of torch are linked; `words` are further options of the compiler."""
    import torch  # here, as what loads a library before torch imports this module, too

    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = source.parent / "built" / f"{source.stem}-{key}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        root, aside = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        paths = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", *words, str(source), "-o", str(aside)]
        command += [*(f"-I{path}" for path in paths), f"-L{root / 'lib'}"]
        command += [f"-l{name}" for name in libraries]
        subprocess.run([*command, f"-Wl,-rpath,{root / 'lib'}"], check=True, timeout=500)
        aside.replace(library)
    return library
