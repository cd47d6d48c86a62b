"""Weights for other programs: a file of the safetensors library, whose errors and file modes are its own."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor


def write_weights(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and facts; raise OSError where that fails. Whoever may read other files here may read this one."""
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(facts))
    except safetensors.SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    others = os.umask(0)
    os.umask(others)
    path.chmod(0o666 & ~others)
