"""The table of workloads: where to find each class and, without importing torch, the sections of its recipe."""

import importlib
import importlib.util
from typing import Any, NamedTuple

from podium.recipe.section import Section

#: name -> module that holds its `Workload` class; a module `section` beside it holds `ModelSection` and `DataSection`
WORKLOADS = {
    "bert": "podium.workloads.bert.workload",
    "mnist": "podium.workloads.mnist.workload",
    "cnn": "podium.workloads.cnn.workload",
    "neuron": "podium.workloads.neuron.workload",
    "gpt2": "podium.workloads.gpt2.workload",
    "cosmology": "podium.workloads.cosmology.workload",
}


class WorkloadSections(NamedTuple):
    """The schemas of `workload.model` and `workload.data`."""

    model: type[Section]
    data: type[Section]


def workload_class(name: str) -> type:
    """Return the `Workload` class registered under `name` (which must be in the table)."""
    found: type = importlib.import_module(WORKLOADS[name]).Workload
    return found


def workload_sections(name: str) -> WorkloadSections:
    """Return a workload's sections: from the module `section` beside its class if there is one, as that does not import
    torch; otherwise from the class."""
    beside = f"{WORKLOADS[name].rpartition('.')[0]}.section"
    owner: Any = importlib.import_module(beside) if importlib.util.find_spec(beside) else workload_class(name)
    return WorkloadSections(owner.ModelSection, owner.DataSection)
