"""Hooks in plain functions for faster implementations. Filled from outside, by `kernels/registry.py`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Slot:
    """A place for a faster implementation, empty by default. It gets the arguments of the plain function and returns
    the result, or None to leave the work to the plain function."""

    def __init__(self) -> None:
        self.guest: Callable[..., Tensor | None] | None = None

    def __call__(self, *args: Any) -> Tensor | None:
        return None if self.guest is None else self.guest(*args)
