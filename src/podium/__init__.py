"""Podium: trains deep-learning models from one recipe, with the same weights on any number of processes."""

# What is here is imported when it is first used: `import podium` loads no torch.
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.api import Run as Run
    from podium.api import fit as fit
    from podium.api import load as load
    from podium.api import open_run as open_run
    from podium.api import train as train
    from podium.contract import Batch as Batch
    from podium.contract import Loss as Loss
    from podium.contract import ParamGroup as ParamGroup
    from podium.contract import Picture as Picture
    from podium.contract import Prediction as Prediction
    from podium.contract import Target as Target
    from podium.data.indexed import IndexedDataset as IndexedDataset
    from podium.data.indexed import write_indexed as write_indexed
    from podium.data.padding import Pad as Pad
    from podium.data.padding import trimmed as trimmed
    from podium.data.sources.dataset import DatasetSource as DatasetSource
    from podium.data.sources.mixed import MixedSource as MixedSource
    from podium.errors import PodiumError as PodiumError
    from podium.errors import UserError as UserError
    from podium.recipe.section import Section as Section
    from podium.runs.observers import Observer as Observer
    from podium.ui.table import Table as Table
    from podium.workloads.own.base import OwnWorkload

    Workload = OwnWorkload

__version__ = "0.1.0"

#: public name -> (module, name in it)
_PUBLIC = {
    "Batch": ("podium.contract", "Batch"),
    "DatasetSource": ("podium.data.sources.dataset", "DatasetSource"),
    "IndexedDataset": ("podium.data.indexed", "IndexedDataset"),
    "Loss": ("podium.contract", "Loss"),
    "MixedSource": ("podium.data.sources.mixed", "MixedSource"),
    "Observer": ("podium.runs.observers", "Observer"),
    "Pad": ("podium.data.padding", "Pad"),
    "ParamGroup": ("podium.contract", "ParamGroup"),
    "Picture": ("podium.contract", "Picture"),
    "Prediction": ("podium.contract", "Prediction"),
    "Section": ("podium.recipe.section", "Section"),
    "Table": ("podium.ui.table", "Table"),
    "Target": ("podium.contract", "Target"),
    "Workload": ("podium.workloads.own.base", "OwnWorkload"),
    "PodiumError": ("podium.errors", "PodiumError"),
    "Run": ("podium.api", "Run"),
    "UserError": ("podium.errors", "UserError"),
    "fit": ("podium.api", "fit"),
    "load": ("podium.api", "load"),
    "open_run": ("podium.api", "open_run"),
    "train": ("podium.api", "train"),
    "trimmed": ("podium.data.padding", "trimmed"),
    "write_indexed": ("podium.data.indexed", "write_indexed"),
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'podium' has no attribute {name!r}")
    module, member = _PUBLIC[name]
    return getattr(importlib.import_module(module), member)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


class _Package(ModuleType):
    """This package, whose `train` is the function, although there is a module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "train" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
