"""docs/architecture.md says what is there: packages, their order, and who uses private names of torch."""

import ast
import configparser
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "podium"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
TREES = {
    path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
}


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return text


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_package_has_a_row_and_a_docstring_of_one_sentence():
    assert [name for cell, _ in rows(section("The packages")) for name in in_code(cell)] == sorted(PACKAGES)
    for name, tree in TREES.items():
        if name.endswith("__init__.py"):
            docstring = ast.get_docstring(tree) or ""
            assert re.fullmatch(r"[A-Z].+\.", docstring), name


def test_the_drawing_has_the_order_of_the_import_contract():
    (drawing,) = re.findall(r"```\n(.*?)```", section("The packages"), re.DOTALL)
    drawn = [re.findall(r"recipe: sections|[\w/.]+", line[:45]) for line in drawing.splitlines()]
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    lines = [line for line in contract["importlinter:contract:order"]["layers"].splitlines() if line.strip()]
    layers = [re.findall(r"podium\.([\w.]+)", line) for line in lines if not line.strip().startswith("#")]
    sections = {name for layer in layers for name in layer if name.startswith("recipe.") and name != "recipe.loading"}
    assert sections >= {"recipe.section", "recipe.sections"}

    def as_drawn(name: str) -> str:
        path = name.replace(".", "/")
        return "recipe: sections" if name in sections else path if (SOURCE / path).is_dir() else f"{path}.py"

    expected: list[list[str]] = []
    for layer in layers:
        names = sorted({as_drawn(name) for name in layer} - {"__main__.py"})
        if names and names != ["recipe: sections"]:  # drawn once
            expected.append(names)
    assert [sorted(line) for line in drawn] == expected


def test_every_module_has_a_place_in_the_import_contract():
    text = (ROOT / ".importlinter").read_text(encoding="utf-8")
    placed = set(re.findall(r"podium\.([\w.]+)", text.split("[importlinter:contract:workloads]")[0]))
    modules = {name.removesuffix(".py").replace("/", ".") for name in TREES} - {"__init__", "recipe.__init__"}
    assert {name for name in modules if not any(f"{name}.".startswith(f"{place}.") for place in placed)} == set()


# --------------------------------------------------------------------------- files and functions


def defined_in(tree: ast.Module) -> set[str]:
    """Return the functions, classes, methods (`Class.method`) and values that a module defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def named_places(text: str) -> list[tuple[str, list[str]]]:
    """Return (path, names in brackets behind it) of everything in the form `file.py` (`function`, `Class.method`)."""
    return [
        (path, in_code(names))
        for path, names in re.findall(r"`([\w/]+(?:\.py)?)`(?: \((`[\w.]+`(?:, `[\w.]+`)*)\))?", text)
    ]


@pytest.mark.parametrize("title", ["The packages", "The path of one update", "Where do I change …"])
def test_files_and_functions_on_the_page_exist(title):
    places = [(path, names) for path, names in named_places(section(title)) if "/" in path or path.endswith(".py")]
    assert places
    for path, names in places:
        assert (SOURCE / path).exists(), path
        if names:
            assert set(names) <= defined_in(TREES[path]), path


def test_one_update_passes_at_most_ten_files():
    passed = [path for _, where, _ in rows(section("The path of one update")) for path, _ in named_places(where)]
    assert len(passed) == len(set(passed)) <= 10
    assert {"recipe/loading.py", "train.py", "engine/update.py", "checkpoints/writing.py"} <= set(passed)


# --------------------------------------------------------------------------- private names of torch


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_here() -> set[str]:
    """Return every name that Podium itself defines: a private name that is none of these is somebody else's."""
    names = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


DEFINED = defined_here()
#: names of `nn.Module`, and of ours too
SHARED = {"_buffers", "_parameters", "_modules"}


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names that a module uses and that are neither Podium's nor those of `os`."""
    found = set()
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch |= {alias.asname for alias in node.names if alias.name.startswith("torch") and alias.asname}
            found |= {part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            of_torch |= {alias.asname or alias.name for alias in node.names}
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root = root_of(node.value)
            of_self = isinstance(node.value, ast.Name) and root in ("self", "cls")
            known = DEFINED if of_self else DEFINED - SHARED
            if root in of_torch or (root != "os" and node.attr not in known):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


USED = {name: private_names(tree) for name, tree in TREES.items()}


def test_private_names_of_torch_are_used_where_the_page_says_and_nowhere_else():
    table = rows(section("Private interfaces of torch"))
    listed = {path: in_code(names) for names, module, _ in table for path in in_code(module)}
    assert {name for name, found in USED.items() if found} == set(listed)
    for name, patterns in listed.items():
        parts = [part for pattern in patterns for part in pattern.split(".")]
        unlisted = {used for used in USED[name] if not any(fnmatch.fnmatchcase(used, part) for part in parts)}
        assert not unlisted, f"{name} uses {unlisted}, which docs/architecture.md does not list"
        for pattern in patterns:
            if is_private(pattern):
                assert any(fnmatch.fnmatchcase(used, pattern.split(".")[-1]) for used in USED[name]), pattern


def test_a_private_name_of_torch_is_used_in_one_module_only():
    places: dict[str, list[str]] = {}
    for name, found in USED.items():
        for used in found:
            places.setdefault(used, []).append(name)
    assert {used: names for used, names in places.items() if len(names) > 1} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._foreach_add_([], 1)", {"_foreach_add_"}),
        ("import torch\ntorch._C._current_graph_task_id()", {"_C", "_current_graph_task_id"}),
        ("import torch.distributed as dist\ndist._broadcast_coalesced()", {"_broadcast_coalesced"}),
        ("from torch.nn.modules.conv import _ConvNd", {"_ConvNd"}),
        ("from torch import nn\nnn.modules.conv._ConvNd", {"_ConvNd"}),
        ("from torch._inductor.utils import clear_caches", {"_inductor"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("def f(module):\n    return module._buffers", {"_buffers"}),
        ("import os\nos._exit(1)", set()),
        ("class A:\n    def f(self):\n        return self._buffers", set()),
    ],
)
def test_private_names_are_found_in_every_form(source, found):
    assert private_names(ast.parse(source)) == found
