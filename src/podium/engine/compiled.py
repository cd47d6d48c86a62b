"""Compilation of a model's passes with `torch.compile`, kept in the cache folder for later runs and other instances."""

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from podium.data.cache import cache_folder
from podium.errors import UserError


class Compiled(nn.Module):
    """The model, compiled when it is first called. A module of our own: torch leaves a bare Sequential uncompiled.

    Parameters are those of the model, in its order; names get a prefix, so checkpoints are written from the original.
    """

    def __init__(self, model: nn.Module, took: Callable[[float], None]) -> None:
        super().__init__()
        self.plain = model
        self._took = took
        self._compiled: Callable[..., Any] = torch.compile(self._plain_pass, dynamic=False)
        self._first = True

    def forward(self, *args: Tensor) -> Any:
        if not self._first:
            return self._compiled(*args)
        began = time.perf_counter()
        result = self._compiled(*args)
        self._first = False
        self._took(time.perf_counter() - began)
        return result

    def _plain_pass(self, *args: Tensor) -> Any:
        return self.plain(*args)


def has_compiler() -> bool:
    """Whether torch finds a C++ compiler, with which it makes code for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


def compiled(model: nn.Module, device: torch.device, took: Callable[[float], None]) -> nn.Module:
    """`took` is told the seconds of the first call, in which the forward pass is compiled or loaded."""
    if device.type == "cpu" and not has_compiler():
        raise UserError("engine.compile = true needs a C++ compiler (g++ or clang++), and there is none here")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))
    return Compiled(model, took)
