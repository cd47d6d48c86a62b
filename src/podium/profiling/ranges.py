"""Names for what torch's profiler records: which module of a model was at work, and which part of an update.

Modules get their names from around `nn.Module.__call__`, not from hooks: kernels leave modules with hooks to torch, and
the profile would be of another program.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.profiler import record_function

MODULE, PART = "podium module: ", "podium part: "


@contextmanager
def modules_named(model: nn.Module) -> Iterator[None]:
    """Have the profiler record the calls of this model's modules, by their names in it."""
    names = {id(module): f"{MODULE}{name}" for name, module in model.named_modules()}
    plain = nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return plain(self, *args, **kwargs)
        with record_function(name):
            return plain(self, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def part(name: str) -> AbstractContextManager:
    """Return a context that the profiler records as a part of an update."""
    return record_function(f"{PART}{name}")
