"""What a process has for all of its code: random states, settings of torch, working folder, variables, signals.

Code of a user that a training calls may set any of it; here it is put back.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from podium.machine.signals import can_handle_signals, stop_signals


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back what the code inside may have set for the whole process, whether it raises or not."""
    rng = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    threads, dtype, grad, device = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
    )
    precision, mkldnn = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    folder, variables = _working_folder(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in stop_signals()} if can_handle_signals() else {}
    try:
        yield
    finally:
        torch.set_rng_state(rng[0])
        np.random.set_state(rng[1])
        random.setstate(rng[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_float32_matmul_precision(precision)
        torch.backends.mkldnn.enabled = mkldnn
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        _put_back(folder, variables)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _put_back(folder: str | None, variables: dict[str, str]) -> None:
    if folder is not None:
        os.chdir(folder)
    if os.environ != variables:
        os.environ.clear()
        os.environ.update(variables)


def _working_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 (text, as it goes back to the system as it came)
    except OSError:  # it was removed
        return None
