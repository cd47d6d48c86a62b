"""The `workload` section: what is trained. `model` and `data` are defined in the workload's own `section.py`."""

from pathlib import Path
from typing import Any

from podium.recipe.section import Section


class WorkloadSection(Section):
    """What is trained; `model` and `data` get the workload's own schemas once its name is known."""

    name: str
    model: Any
    data: Any
    #: folder in Hugging Face's format whose weights a new training starts from
    init_from: Path | None = None
