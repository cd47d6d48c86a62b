"""What `torch.compile` makes of a model, kept in the cache folder: compiled once for all instances and later runs.

A folder for each model, micro-batch and number of threads. torch's own caches lie in it, and `kept.json`: size and
checksum of every file, written last. One without it, or with a file that is not as it says, is made anew: a program
cut short by a kill would take the process down with it when it is loaded.
Whether something was compiled or loaded is what torch's own counters say.
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

from podium import console
from podium.data.cache import cache_folder
from podium.engine.instances import Instances
from podium.engine.lost import InstanceLost

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_LIST = "kept.json"
_NOT_KEPT = (_LIST, "locks")
#: how often those who compile say that they still do
_BEAT_S = 1.0
_WORKING, _DONE, _FAILED = range(3)


@dataclass(frozen=True)
class Executable:
    """The machine code of a model's passes, ready to run."""

    state: Literal["compiled", "loaded"]
    #: until it was ready; those of a wait for another instance included
    seconds: float
    #: the folder it is kept in: its name, or the whole path where it is the user's own
    cache: str

    def sentence(self) -> str:
        took = f"{self.state} in {self.seconds:.1f} s"
        return f"{took}, kept for later runs" if self.state == "compiled" else took


def folder_name(model: nn.Module, samples: Mapping[str, Tensor]) -> str:
    """Tells executables apart; torch itself decides whether what it finds in a folder is what it needs."""
    params = [
        f"{name} {p.dtype} {tuple(p.shape)} {p.stride()} {p.requires_grad}" for name, p in model.named_parameters()
    ]
    device = next(model.parameters()).device.type
    facts = [torch.__version__, torch.backends.cpu.get_cpu_capability(), device, str(torch.get_num_threads()),
             repr(model), *params, *(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in samples.items())]  # fmt: skip
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"{type(model).__name__.lower()}-{digest[:12]}"


def make(name: str, instances: Instances, first_passes: Callable[[], None]) -> Executable:
    """Collective: `first_passes` compiles or loads, on the first instance of each host and then on all others.

    Hosts need no file system in common. `first_passes` may be called again, where what was kept is damaged.
    """
    began = time.perf_counter()
    own = _users_own()
    path = Path(own) if own else cache_folder("compiled", name)

    def on_first() -> bool:
        if own:
            try:
                return _passed(path, first_passes)
            except Exception as error:
                console.warn(f"what is in {_VARIABLE}={own} cannot be used ({_in_short(error)}): compiling without it")
                return _kept(cache_folder("compiled", name), first_passes)
        return _kept(path, first_passes)

    def on_others() -> bool:
        return _passed(path, first_passes) if not own else on_first()

    loaded = _first_of_hosts(instances, on_first, on_others)
    return Executable("loaded" if loaded else "compiled", time.perf_counter() - began, own or name)


def _users_own() -> str:
    """The folder that the user has set; empty where it is one of ours, or torch's own, which it sets by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.environ.get(_VARIABLE, "")
    ours = folder and Path(folder).is_relative_to(cache_folder("compiled").absolute())
    return "" if ours or folder == default_cache_dir() else folder


def _kept(folder: Path, first_passes: Callable[[], None]) -> bool:
    """Passes with what is kept in a folder of ours, or that are kept there from now on; True where it was loaded."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{folder.name}.lock")):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        found = folder.exists()
        try:
            loaded = _passed(folder, first_passes)
        except Exception as error:
            if not found:
                raise
            console.warn(f"the compiled model in {folder} cannot be used ({_in_short(error)}): compiling it again")
            shutil.rmtree(folder, ignore_errors=True)
            loaded = _passed(folder, first_passes)
        if not loaded:
            _list(folder)
    return loaded


def _passed(folder: Path, first_passes: Callable[[], None]) -> bool:
    """True where every graph was found compiled."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    if os.environ.get(_VARIABLE) != str(folder):
        os.environ[_VARIABLE] = str(folder.absolute())
        clear_caches()  # of this process: what is in them is in no file of this folder
    counted = counters["inductor"]
    before = dict(counted)
    first_passes()
    hits, *others = (
        counted[f"fxgraph_cache_{what}"] - before.get(f"fxgraph_cache_{what}", 0) for what in ("hit", "miss", "bypass")
    )
    return hits > 0 and not any(others)


def _is_whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / _LIST).read_bytes())
        return all(_facts(folder / name) == facts for name, facts in listed.items())
    except (OSError, ValueError, AttributeError):
        return False


def _list(folder: Path) -> None:
    """Written aside and renamed, after all it names."""
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
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: others find the work done."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # file systems without locks: both compile
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _first_of_hosts(instances: Instances, on_first: Callable[[], bool], on_others: Callable[[], bool]) -> bool:
    """`on_first` by the first instance of each host, then `on_others` by all the rest.

    However long it takes: those at work give a sign of life every second, so that only silence is taken for a loss.
    """
    if instances.num_mates == 1:
        return on_first()
    if instances.index % instances.num_mates:
        while True:
            states = instances.gather(torch.tensor(_DONE, dtype=torch.uint8)).tolist()
            if _FAILED in states:
                raise InstanceLost(states.index(_FAILED), "it could not compile the model")
            if _WORKING not in states:
                return on_others()
    state, ended = _WORKING, threading.Event()
    lost: list[InstanceLost] = []

    def say() -> None:
        while True:
            ended.wait(_BEAT_S)
            try:
                states = instances.gather(torch.tensor(state, dtype=torch.uint8)).tolist()
            except InstanceLost as error:
                lost.append(error)
                return
            if _FAILED in states or _WORKING not in states:
                return
            time.sleep(_BEAT_S if ended.is_set() else 0)  # another host is still at it

    teller = threading.Thread(target=say, name="podium-compiling", daemon=True)
    teller.start()
    try:
        loaded = on_first()
        state = _DONE
    except BaseException:
        state = _FAILED
        raise
    finally:
        ended.set()
        teller.join()
    if lost:
        raise lost[0]
    return loaded


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
