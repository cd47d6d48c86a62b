"""YAML text, from recipe files and from values on the command line, which anybody may have written.

Nothing in it is executed, and it cannot take more time or memory than its limits allow: text is short, aliases
(`*name`) are counted as often as they are used, and nothing is nested endlessly.
"""

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_limited

#: limits of one file: its size, its values with aliases written out, and how deeply they are nested
MAX_BYTES = 128 << 10
MAX_VALUES = 100_000
MAX_DEPTH = 50
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep, or an alias contains itself"

Tree = dict[str, Any]


def read_yaml(path: Path) -> Tree:
    """Read a YAML 1.2 mapping; duplicate keys are errors and nothing in the file is executed."""
    try:
        tree = parse_yaml(read_limited(path, MAX_BYTES).decode("utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {first_line(error.problem or error)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {system_reason(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid YAML: it is not text in UTF-8") from None
    except (YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {first_line(error)}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"{path}: expected sections such as `batch:` at the top level")
    return tree


def parse_yaml(text: str, typ: str = "safe") -> Any:
    """Return what YAML text holds; raise YAMLError, or ValueError with the reason where it exceeds a limit.

    With the `typ` called base, every scalar is text.
    """
    _check_brackets(text)
    try:
        if "*" in text:
            # Looked at before anything is built: each level of aliases to the one below may multiply what there is.
            _check_aliases(YAML(typ="safe", pure=True).compose(text))
        value = YAML(typ=typ, pure=True).load(text)
    except RecursionError:
        raise _Limit(_TOO_DEEP) from None
    except (YAMLError, _Limit):
        raise
    except ValueError as error:  # dates that do not exist, numbers with thousands of digits
        raise ValueError("it has a number or a date that cannot be read") from error
    except (TypeError, AttributeError, KeyError, IndexError, AssertionError, OverflowError) as error:
        raise ValueError("it has tags or keys that a recipe cannot have") from error  # from inside the library
    _check_tree(value, 0)
    return value


class _Limit(ValueError):
    pass


def _check_brackets(text: str) -> None:
    """Raise where brackets are opened so often that the library would take long to find out; rough, and quick."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > 10 * MAX_DEPTH:
            raise _Limit(_TOO_DEEP)


def _check_aliases(top: Node | None) -> None:
    """Raise ValueError if the nodes, each as often as it is used, are too many or contain themselves."""
    count = 0
    open_nodes = [(top, 0)] if top is not None else []
    while open_nodes:
        node, depth = open_nodes.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _Limit(_TOO_DEEP)
        if count > MAX_VALUES:
            raise _Limit(f"with its aliases written out it has more than {MAX_VALUES:,} values")
        if not isinstance(node, ScalarNode):
            for part in node.value:
                open_nodes += [(each, depth + 1) for each in (part if isinstance(part, tuple) else (part,))]


def _check_tree(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _Limit(_TOO_DEEP)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | None):
                raise _Limit("a key is neither text nor a number")
            _check_tree(key, depth)
            _check_tree(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_tree(item, depth + 1)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise _Limit("a number has more digits than any key can take")
    elif isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise _Limit("a text holds half of a character")


def first_line(problem: object) -> str:
    """Return the first line of what a library says about a problem."""
    return next(iter(str(problem).strip().splitlines()), "it cannot be read")[:300]
