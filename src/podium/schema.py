"""What every section of a recipe is made of. Each module owns the schema of its section and builds on `Section`."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of a recipe: typed, unchangeable once read, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
