"""The cache of compiled models: each is compiled once for all instances and later runs.

The cache has a folder for each model, micro-batch and number of threads, with torch's own caches in it and `kept.json`:
the size and checksum of every file, written last. A folder without it, or with a file that does not match, is compiled
again: loading a program that was truncated by a kill would crash the process.
torch's own counters tell whether something was compiled or loaded.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.machine.cache_folder import cache_folder
from podium.ui import console

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_LIST = "kept.json"
_NOT_KEPT = (_LIST, "locks")
#: how often an instance that compiles signals that it is still working
_BEAT_S = 1.0
_WORKING, _DONE, _FAILED = range(3)


@dataclass(frozen=True)
class Executable:
    """The machine code of a model's passes, ready to run."""

    state: Literal["compiled", "loaded"]
    #: time until it was ready, including any wait for another instance
    seconds: float
    #: the folder it is kept in: its name, or the full path if the user chose the folder
    cache: str

    def sentence(self) -> str:
        took = f"{self.state} in {self.seconds:.1f} s"
        return f"{took}, kept for later runs" if self.state == "compiled" else took


def folder_name(model: nn.Module, samples: Mapping[str, Tensor]) -> str:
    """Return a name that differs between executables; torch itself decides whether a folder's content is usable."""
    params = [
        f"{name} {p.dtype} {tuple(p.shape)} {p.stride()} {p.requires_grad}" for name, p in model.named_parameters()
    ]
    device = next(model.parameters()).device.type
    facts = [torch.__version__, torch.backends.cpu.get_cpu_capability(), device, str(torch.get_num_threads()),
             repr(model), *params, *(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in samples.items())]  # fmt: skip
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"{type(model).__name__.lower()}-{digest[:12]}"


def make(name: str, instances: Instances, first_passes: Callable[[], None]) -> Executable:
    """Compile or load by calling `first_passes`, on the first instance of each host and then on all others. Collective.

    Hosts need not share a file system. `first_passes` may be called again if the cached files are damaged.
    """
    began = time.perf_counter()
    own = user_folder()
    path = Path(own) if own else cache_folder("compiled", name)

    def on_first() -> bool:
        if own:
            try:
                return run_with_cache(path, first_passes)
            except Exception as error:
                console.warn(
                    f"the cache in {_VARIABLE}={own} cannot be used ({_in_short(error)}): compiling without it"
                )
                return _run_verified(cache_folder("compiled", name), first_passes)
        return _run_verified(path, first_passes)

    def on_others() -> bool:
        return run_with_cache(path, first_passes) if not own else on_first()

    loaded = first_of_hosts(instances, on_first, on_others)
    return Executable("loaded" if loaded else "compiled", time.perf_counter() - began, own or name)


def user_folder() -> str:
    """Return the folder that the user has set; empty if it is one of ours, or torch's default, which torch sets."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.environ.get(_VARIABLE, "")
    ours = folder and Path(folder).is_relative_to(cache_folder("compiled").absolute())
    return "" if ours or folder == default_cache_dir() else folder


def _run_verified(folder: Path, first_passes: Callable[[], None]) -> bool:
    """Run the first passes with the cache in a folder of ours, if it is intact, and keep what they compile; return
    whether everything was loaded."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        found = folder.exists()
        try:
            loaded = run_with_cache(folder, first_passes)
        except Exception as error:
            if not found:
                raise
            console.warn(f"the compiled model in {folder} cannot be used ({_in_short(error)}): compiling it again")
            shutil.rmtree(folder, ignore_errors=True)
            loaded = run_with_cache(folder, first_passes)
        if not loaded:
            _write_list(folder)
    return loaded


def run_with_cache(folder: Path, first_passes: Callable[[], None]) -> bool:
    """Run the first passes with torch's caches in `folder`; return whether every graph was found in them."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    if os.environ.get(_VARIABLE) != str(folder):
        os.environ[_VARIABLE] = str(folder.absolute())
        clear_caches()  # those in memory, whose content is not in the files of this folder
    counted = counters["inductor"]
    before = dict(counted)
    first_passes()
    hits, *others = (
        counted[f"fxgraph_cache_{what}"] - before.get(f"fxgraph_cache_{what}", 0) for what in ("hit", "miss", "bypass")
    )
    return hits > 0 and not any(others)


def is_whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / _LIST).read_bytes())
        return all(_facts(folder / name) == facts for name, facts in listed.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write_list(folder: Path) -> None:
    """Write the list of files under a temporary name and rename it, after all files that it names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    listed = {name: _facts(folder / name) for name in names if name.split("/")[0] not in _NOT_KEPT}
    aside = folder / f".{_LIST}"
    aside.write_text(json.dumps(listed), encoding="utf-8")
    aside.replace(folder / _LIST)


def _facts(file: Path) -> list[int | str]:
    data = file.read_bytes()
    return [len(data), hashlib.sha256(data).hexdigest()]


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Let one process in at a time; the others then find the work done."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # on file systems without locks, both compile
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def first_of_hosts(instances: Instances, on_first: Callable[[], bool], on_others: Callable[[], bool]) -> bool:
    """Call `on_first` on the first instance of each host, then `on_others` on all others.

    However long it takes: instances at work send a heartbeat every second, so that only silence counts as a loss.
    """
    if max(instances.host_sizes) == 1:
        return on_first()
    if instances.index != instances.neighbours.start:
        while True:
            states = instances.gather(torch.tensor(_DONE, dtype=torch.uint8)).tolist()
            if _FAILED in states:
                raise InstanceLost(states.index(_FAILED), "it could not compile the model")
            if _WORKING not in states:
                return on_others()
    state, ended = _WORKING, threading.Event()
    lost: list[InstanceLost] = []

    def send_heartbeats() -> None:
        while True:
            ended.wait(_BEAT_S)
            try:
                states = instances.gather(torch.tensor(state, dtype=torch.uint8)).tolist()
            except InstanceLost as error:
                lost.append(error)
                return
            if _FAILED in states or _WORKING not in states:
                return
            time.sleep(_BEAT_S if ended.is_set() else 0)  # another host is still working

    heartbeat = threading.Thread(target=send_heartbeats, name="podium-compiling", daemon=True)
    heartbeat.start()
    try:
        loaded = on_first()
        state = _DONE
    except BaseException:
        state = _FAILED
        raise
    finally:
        ended.set()
        heartbeat.join()
    if lost:
        raise lost[0]
    return loaded


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
