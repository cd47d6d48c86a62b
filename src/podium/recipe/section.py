"""The base class of all sections of a recipe. `recipe/sections` has Podium's own; each workload adds two."""

import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

#: a user's code, named with its file or module: `mine.py:Lion`, `my_package.module:Lion`
OwnName = Annotated[str, Field(pattern=r"^(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*$")]


def is_own_name(name: str) -> bool:
    """Return whether an optimiser or schedule is named with its file or module: shipped names have no colon."""
    return ":" in name


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

    # `podium train --pretend` asks the two sections of a workload, `workload.model` and `workload.data`:

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys that make it small, with as many blocks and the same structure; `generated`: the samples are
        random, and need not fit any files."""
        return {}

    def stand_in(self) -> dict[str, Any]:
        """Return the keys that put random samples of the same shapes, and about as many, in the place of files."""
        return {}


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
