"""`key=value` on the command line: the type that the schema gives a key says how its value is read.

Text and paths are taken as they are given, to the character; everything else is read as YAML.
"""

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union

from ruamel.yaml.error import YAMLError

from podium.errors import UserError
from podium.recipe.reading import MAX_DEPTH, first_line, parse_yaml
from podium.recipe.section import Section, sections_of

COMMAND_LINE = "command line"
_NOTHING = ("", "null", "~")
#: sections that may be given by their most important key alone: `precision: 16.16`
SHORT = {"precision": "mode", "average": "method", "workload.init_from": "path"}


def parse_override(text: str, schema: type[Section] | None = None) -> tuple[str, Any]:
    """Split `section.key=value` into key and value; without a schema, the value is read as YAML in any case."""
    dotted, equals, raw = text.partition("=")
    parts = dotted.split(".")
    if not equals or not dotted or not all(parts):
        raise UserError(f"{COMMAND_LINE}: {text[:200]!r} is not of the form section.key=value")
    if len(parts) > MAX_DEPTH:
        raise UserError(f"{COMMAND_LINE}: {dotted[:80]}… is not a key: it has {len(parts):,} parts")
    kinds = set() if schema is None else set(_kinds(_annotation(schema, dotted)))
    if schema is not None and dotted in SHORT:
        kinds |= set(_kinds(_annotation(schema, f"{dotted}.{SHORT[dotted]}")))
    is_text = bool(kinds & {str, Path}) and not kinds & {int, float, bool}
    if type(None) in kinds and raw in _NOTHING:
        return dotted, None
    if any(typing.get_origin(kind) in (list, tuple) and typing.get_args(kind)[0] in (str, Path) for kind in kinds):
        items = _load(dotted, raw, "base")  # every scalar is text
        if isinstance(items, list) or not is_text:
            return dotted, items
    if is_text:
        return dotted, raw if raw or str in kinds else None
    return dotted, _load(dotted, raw, "safe")


def _load(dotted: str, raw: str, typ: str) -> Any:
    try:
        return parse_yaml(raw, typ) if raw else None
    except YAMLError:
        return raw
    except ValueError as error:
        raise UserError(f"{COMMAND_LINE}: {dotted}: {first_line(error)}") from None


def _annotation(schema: type[Section], dotted: str) -> Any:
    """Return the type of a dotted key; None where the schema has no such key."""
    key, _, rest = dotted.partition(".")
    for name, field in schema.model_fields.items():
        if key == (field.alias or name):
            if not rest:
                return field.annotation
            found = (_annotation(kind, rest) for kind in sections_of(field))
            return next((annotation for annotation in found if annotation is not None), None)
    return None


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value may have."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for kind in typing.get_args(annotation):
            yield from _kinds(kind)
    else:
        yield annotation
