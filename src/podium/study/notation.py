"""`key=v1,v2` on the command line: several values, a range, or one value for all runs.

optim.lr=1e-3,2e-3                    two values
optim.betas=[0.9,0.99],[0.9,0.999]    two lists: commas inside brackets, braces and quotes divide nothing
workload.data.path="a,b",c            two texts: double quotes are taken off
optim.lr=1e-4..1e-2:log               a range, for random and tpe; batch.micro=8..64:8 has a step
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from podium.errors import UserError
from podium.recipe.overrides import COMMAND_LINE, parse_override
from podium.recipe.section import Section

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|{_NUMBER}))?")
_CLOSING = {"[": "]", "{": "}"}
#: of one key; more are for a file
_MAX_CHARACTERS = 100_000


def read_words(words: Iterable[str], schema: type[Section], ranges: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that have one value, and those that have several or (with `ranges`) a range."""
    fixed: dict[str, Any] = {}
    varied: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if len(text) > _MAX_CHARACTERS:
            raise UserError(f"{COMMAND_LINE}: {key[:80]} has more than {_MAX_CHARACTERS:,} characters of values")
        if not equals or not key:
            parse_override(word)  # says what is wrong
        if key in fixed or key in varied:
            raise UserError(f"{COMMAND_LINE}: {key[:80]} is given twice: put its values into one list, {key[:80]}=a,b")
        span = read_range(text) if ranges else None
        pieces = split_values(text)
        if span is not None:
            varied[key] = span
        elif len(pieces) == 1:
            fixed[key] = _value(key, pieces[0], schema)
        elif not all(piece.strip() for piece in pieces):
            raise UserError(f"{COMMAND_LINE}: {key[:80]}={text[:80]} has an empty value between its commas")
        else:
            varied[key] = [_value(key, piece.strip(), schema) for piece in pieces]
    return fixed, varied


def split_values(text: str) -> list[str]:
    """Return the parts between commas that are outside of brackets, braces and double quotes."""
    parts, part, closing = list[str](), list[str](), list[str]()
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted, escaped = char != '"' or escaped, char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            parts.append("".join(part))
            part = []
            continue
        part.append(char)
    return [*parts, "".join(part)]


def read_range(text: str) -> dict[str, Any] | None:
    """Return `1..8`, `1e-4..1e-2:log` or `8..64:8` as the section of a range; None where it is something else."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first, last, more = match.groups()
    span: dict[str, Any] = {"from": _number(first), "to": _number(last)}
    if more == "log":
        span["log"] = True
    elif more is not None:
        span["step"] = _number(more)
    return span


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)


def _value(key: str, text: str, schema: type[Section]) -> Any:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        try:
            return json.loads(text)
        except ValueError:
            raise UserError(f"{COMMAND_LINE}: {key[:80]}: {text[:80]} is not text in double quotes") from None
    return parse_override(f"{key}={text}", schema)[1]
