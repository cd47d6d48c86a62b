"""The `workload` section: what is trained. `model` and `data` are defined in the workload's own `section.py`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from podium.recipe.section import Section


class InitSection(Section):
    """The weights that a new training starts from. `workload.init_from: PATH` alone sets the path."""

    #: a run, a checkpoint, a safetensors file, or a folder in Hugging Face's format
    path: Path
    #: of a run: which checkpoint; of it or of a checkpoint: the averaged weights
    checkpoint: Literal["last", "best", "average"] = "last"
    #: whether all tensors of the file and of the model must match in name and shape
    strict: bool = True
    #: prefixes of names in the file, and what replaces them
    rename: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        """Take a path alone: runs from before there were other keys have one in their recipe."""
        return {"path": value} if isinstance(value, str | Path) else value


class WorkloadSection(Section):
    """What is trained; `model` and `data` get the workload's own schemas once its name is known."""

    name: str
    model: Any
    data: Any
    #: the weights that a new training starts from
    init_from: InitSection | None = None
