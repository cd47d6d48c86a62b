"""Settings of torch on which the bits of an accelerator depend beside the operators: deterministic algorithms, TF32,
what is chosen by timing. On a CPU there is nothing to set: torch's operators for it repeat their bits.
"""

import os

import torch

#: two workspaces of cuBLAS of fixed sizes, with which it repeats its bits on one stream
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_determinism(device: torch.device, *, exact: bool, tf32: bool) -> None:
    """Make an accelerator compute the same bits every time, where they are to be `exact`.

    With deterministic algorithms torch refuses operators that have none on the device, in a sentence of its own.
    `tf32`: let products of single-precision numbers round their factors to ten bits, where the device can.
    """
    if device.type == "cpu":
        return
    if exact:  # read when cuBLAS is opened, so before anything is computed
        os.environ.setdefault(*_WORKSPACE)
    torch.use_deterministic_algorithms(exact)
    # Filling memory costs time, and nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    # By the older of torch's two names for them: its compiler reads these, and fails where the newer ones are set.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def settings(device: torch.device) -> dict[str, str]:
    """Return these settings as they are, by name; nothing for a CPU."""
    if device.type == "cpu":
        return {}
    exact = torch.are_deterministic_algorithms_enabled()
    return {
        "deterministic_algorithms": "off" if not exact else "strict",
        "cudnn_benchmark": "on" if torch.backends.cudnn.benchmark else "off",
        "tf32": "on" if torch.backends.cudnn.allow_tf32 else "off",
        **({"cublas_workspace": os.environ.get(_WORKSPACE[0], "none")} if exact else {}),
    }
