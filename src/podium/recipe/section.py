"""The base class of all sections of a recipe. `recipe/sections` has Podium's own; each workload adds two."""

import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A section of a recipe: typed, immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> Collection[str]:
        """Return the keys of `inherited` (from base recipes) that contradict what is `written` later.

        They are dropped: a user who writes `optim.name=adamw` did not write the momentum that a base set for another
        optimiser.
        """
        return ()


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """Return the types of section that a field may hold."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def all_keys(schema: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema."""
    for name, field in schema.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        yield dotted
        for kind in sections_of(field):
            yield from all_keys(kind, f"{dotted}.")
