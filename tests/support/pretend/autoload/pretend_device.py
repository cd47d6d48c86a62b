"""The pretend accelerator in a process of its own: torch loads it by the entry point `torch.backends`, as those of
other makers. `pretend/__init__.py` builds the library and sets the variables that this reads.

    PRETEND_LIBRARY    the compiled library
    PRETEND_DEVICES    number of devices
    PRETEND_RECORD     folder for what happened: waits of the host and messages, a file of JSON lines per process
"""

import atexit
import importlib.util
import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

_native = None
#: (what, file and function) -> number of waits of the host; messages in order
waits = {}
messages = []


def load():
    """Make `pretend` a device type of torch."""
    global _native
    spec = importlib.util.spec_from_file_location("pretend_device_native", os.environ["PRETEND_LIBRARY"])
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    import torch.distributed as dist

    dist.Backend.register_backend("pretendccl", _backend, devices=["pretend"])
    _native.set_wait_hook(_on_wait)
    if folder := os.environ.get("PRETEND_RECORD"):
        _native.set_message_hook(lambda *message: messages.append(message))
        atexit.register(write_record, Path(folder))
        leave = os._exit  # instances end so, to not wait for each other's groups

        def leave_after_record(code):
            write_record(Path(folder))
            leave(code)

        os._exit = leave_after_record


def write_record(folder):
    """Write what has happened so far in this process."""
    if not waits and not messages:
        return
    folder.mkdir(exist_ok=True)
    named = [[*key, count] for key, count in waits.items()]
    (folder / f"{os.getpid()}.json").write_text(json.dumps({"waits": named, "messages": messages, "argv": sys.argv}))


def _on_wait(what):
    frame, place = sys._getframe(), None  # of a thread of torch's, it is the only one
    while frame is not None:
        name = frame.f_code.co_filename
        if "/podium/" in name and "/tests/" not in name:
            place = f"{name.rpartition('/podium/')[2]} {frame.f_code.co_name}"
            break
        frame = frame.f_back
    key = what, place or "elsewhere"
    waits[key] = waits.get(key, 0) + 1


def _backend(store, rank, size, timeout):
    import torch.distributed as dist

    return _native.messages(dist.ProcessGroupGloo(dist.PrefixStore("pretendccl", store), rank, size, timeout=timeout))


# --- what torch asks of a device module -------------------------------------------------------------------------------


def is_available():
    return device_count() > 0


def is_initialized():
    return True


def _is_in_bad_fork():
    return False


def _lazy_init():
    pass


def device_count():
    return _native.device_count()


def current_device():
    return _native.current_device()


def set_device(device):
    _native.set_device(torch.device(device).index if not isinstance(device, int) else device)


def get_device_name(device=None):
    return os.environ.get("PRETEND_NAME", "Pretend 1")


def Stream(priority=0):  # noqa: N802
    return torch.Stream(device=f"pretend:{current_device()}", priority=priority)


def Event():  # noqa: N802
    return torch.Event(device="pretend")


def current_stream(device=None):
    return torch.accelerator.current_stream(device)


def stream(entered):
    return entered or nullcontext()


def synchronize(device=None):
    torch.accelerator.synchronize()


def manual_seed(seed):
    _generator(None).manual_seed(seed)


def manual_seed_all(seed):
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(seed)


def get_rng_state(device=None):
    return _generator(device).get_state()


def set_rng_state(state, device=None):
    _generator(device).set_state(state)


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


@contextmanager
def device(index):
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def _generator(device):
    index = None if device is None else device if isinstance(device, int) else torch.device(device).index
    return _native.default_generator(current_device() if index is None else index)
