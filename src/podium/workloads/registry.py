"""The table of workloads: where to find each class and, without importing torch, the sections of its recipe.

A name that is not in the table leads to a user's code, which importing it runs: `own/code.py` says how it is found.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podium.recipe.section import Section
from podium.workloads.own import code
from podium.workloads.own.code import announced as announced
from podium.workloads.own.code import code_files as code_files
from podium.workloads.own.code import code_identity as code_identity
from podium.workloads.own.code import file_sha256 as file_sha256
from podium.workloads.own.code import is_file_name as is_own_file  # noqa: F401
from podium.workloads.own.code import own_member as own_member
from podium.workloads.own.code import renamed_file as renamed_file
from podium.workloads.own.code import resolved_name as resolved_name
from podium.workloads.own.code import short_name as short_name
from podium.workloads.own.code import stop_imported_script as stop_imported_script
from podium.workloads.own.frames import explain_own as explain_own
from podium.workloads.own.observer_class import check_events as check_events
from podium.workloads.own.observer_class import observer_class as observer_class

#: name -> module that holds its `Workload` class; a module `section` beside it holds `ModelSection` and `DataSection`
WORKLOADS = {
    "bert": "podium.workloads.bert.workload",
    "mnist": "podium.workloads.mnist.workload",
    "cnn": "podium.workloads.cnn.workload",
    "neuron": "podium.workloads.neuron.workload",
    "gpt2": "podium.workloads.gpt2.workload",
    "cosmology": "podium.workloads.cosmology.workload",
}
#: what `podium.fit` trains: a model and samples given in Python
FITTED = "fit"
_HIDDEN = {FITTED: "podium.workloads.own.fitted"}


class WorkloadSections(NamedTuple):
    """The schemas of `workload.model` and `workload.data`."""

    model: type[Section]
    data: type[Section]


def is_known(name: str) -> bool:
    """Return whether a workload may have this name; whether its code can be imported is seen when it is."""
    return name in WORKLOADS or name in _HIDDEN or is_own(name)


def is_own(name: str) -> bool:
    """Return whether a name leads to code that does not come with Podium."""
    return name not in WORKLOADS and name not in _HIDDEN and (code.is_own_name(name) or name in code.announced())


def identity(name: str) -> str:
    """Return what identifies a workload: its name and, for a user's, the checksum of the code."""
    return code.code_identity(name) if is_own(name) else name


def known_names() -> list[str]:
    """Return the names of shipped workloads and of those that installed packages announce."""
    return [*WORKLOADS, *(name for name in code.announced() if name not in WORKLOADS)]


def workload_class(name: str) -> Callable[[Any, Any], Any]:
    """Return what builds the workload called `name` (which must be known) from the two sections of its recipe."""
    if is_own(name):
        base: Any = importlib.import_module("podium.workloads.own.base")  # imports torch
        adapted: Callable[[Any, Any], Any] = base.adapted(code.own_class(name), code.short_name(name))
        return adapted
    found: type = importlib.import_module(_module_of(name)).Workload
    return found


def workload_sections(name: str) -> WorkloadSections:
    """Return a workload's sections: from the module `section` beside its class if there is one, as that does not import
    torch; otherwise from the class."""
    owner: Any
    if is_own(name):
        owner = importlib.import_module("podium.workloads.own.base").with_defaults(code.own_class(name))
        return code.checked_sections(owner, WorkloadSections)
    beside = f"{_module_of(name).rpartition('.')[0]}.section"
    owner = importlib.import_module(beside) if importlib.util.find_spec(beside) else workload_class(name)
    return WorkloadSections(owner.ModelSection, owner.DataSection)


def _module_of(name: str) -> str:
    return WORKLOADS.get(name) or _HIDDEN[name]


def fitted_observers(workload: object) -> Sequence[Any]:
    """Return the observers that came with a workload of `podium.fit` for this process to call."""
    fitted: Any = sys.modules.get(_HIDDEN[FITTED])
    return workload.observers if fitted is not None and isinstance(workload, fitted.Workload) else ()
