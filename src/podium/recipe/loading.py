"""Recipes: reading, `base:` inheritance, `key=value` overrides, validation, the resolved form.

Defaults < base files < the file < the command line. What is written later overrides inherited keys that contradict it
(`Section.overruled`). Unknown keys are errors; `messages.py` says what is wrong, and where.
Only `cli`, `train.py` and the commands handle a whole `Recipe`.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError, create_model
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from podium.errors import UserError
from podium.layers.section import NormSection
from podium.recipe.messages import did_you_mean, explain
from podium.recipe.overrides import COMMAND_LINE, SHORT, parse_override
from podium.recipe.reading import Tree, read_yaml
from podium.recipe.section import Section, is_own_name, sections_of
from podium.recipe.sections.average import AverageSection
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.checkpoint import CheckpointSection
from podium.recipe.sections.engine import EngineSection
from podium.recipe.sections.launch import LaunchSection
from podium.recipe.sections.log import LogSection
from podium.recipe.sections.optim import OptimSection
from podium.recipe.sections.parallel import ParallelSection
from podium.recipe.sections.precision import PrecisionSection
from podium.recipe.sections.schedule import ScheduleSection
from podium.recipe.sections.train import TrainSection
from podium.recipe.sections.valid import ValidSection
from podium.recipe.sections.workload import WorkloadSection
from podium.recipe.shipped import SHIPPED, shipped_recipes
from podium.recipe.starting_weights import drop_inherited_sizes, take_sizes_of_folder
from podium.topology import Blocks
from podium.workloads.registry import (
    FITTED,
    WorkloadSections,
    code_identity,
    identity,
    is_known,
    known_names,
    resolved_name,
    short_name,
    workload_sections,
)

#: the most files that a recipe is put together from, itself and its bases
_MAX_FILES = 64
#: sections beside the workload whose name may lead to a user's code
OWN_PARTS = ("optim", "schedule")
SectionT = TypeVar("SectionT", bound=Section)


class Recipe(Section):
    """Everything about a training."""

    workload: WorkloadSection
    batch: BatchSection
    train: TrainSection
    optim: OptimSection
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    average: AverageSection = AverageSection()
    parallel: ParallelSection = ParallelSection()
    engine: EngineSection = EngineSection()
    valid: ValidSection = ValidSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
    seed: Annotated[int, Field(ge=0)] = 1

    def tree(self) -> Tree:
        """Return the resolved tree, ready for YAML; reading it again gives an equal recipe."""
        tree: Tree = self.model_dump(mode="json", by_alias=True)
        return tree

    @property
    def blocks(self) -> Blocks:
        """What the blocks of replicas must be like that instances carry, as far as the recipe tells: a model of the
        user's own may ask for more when it is built."""
        norm = getattr(self.workload.model, "norm", None)
        return Blocks(norm.span if isinstance(norm, NormSection) else 1, self.parallel.shard == "parameters")

    def sha256(self) -> str:
        """Return a hash that identifies the training: it changes with any resolved value, and with a user's code."""
        tree = self.tree()
        tree["workload"]["name"] = identity(self.workload.name)
        for part in OWN_PARTS:
            if is_own_name(tree[part]["name"]):
                tree[part]["name"] = code_identity(tree[part]["name"])
        if self.workload.name == FITTED:
            tree["workload"]["model"].pop("objects")  # where the run lies
        tree["log"]["observers"] = [short_name(name) for name in self.log.observers]  # wherever they lie
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


class Layer(NamedTuple):
    """The content of one file, or of the command line."""

    origin: str
    tree: Tree


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe called `name` (a shipped name or a path) with `section.key=value` overrides."""
    layers, given = list(_read(name, (), {}).values()), list(overrides)
    plain: Tree = {}
    for layer in (*layers, _command_line(given)):
        _merge(plain, layer.tree)
    origins = {key: layer.origin for layer in (*layers, _command_line(given)) for key in _leaves(layer.tree)}
    schema = _workload_schema(plain, origins, name)
    if given:
        layers.append(_command_line(given, schema))
    tree: Tree = {}
    origins = {}
    for layer in layers:
        _drop_overruled(schema, tree, layer.tree, origins)
        drop_inherited_sizes(schema, tree, layer.tree, origins)
        _merge(tree, layer.tree)
        for key in _leaves(layer.tree):
            origins.pop(key, None)  # the key set last moves to the end
            origins[key] = layer.origin
    take_sizes_of_folder(schema, tree, origins)
    return validated(schema, tree, origins, name)


def recipe_from_tree(tree: Tree, where: str = "recipe") -> Recipe:
    """Return the recipe of a whole tree; `where` is the origin that error messages name."""
    return validated(_workload_schema(tree, {}, where), tree, {}, where)


def recipe_with(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other values for some dotted keys; batch sizes that are not given are derived again."""
    tree = recipe.tree()
    if any(key.startswith("batch.") for key in keys):
        tree["batch"]["global"] = None
    for dotted, value in keys.items():
        nested = _nested(dotted, value)
        _resolve_code(nested, Path())
        _merge(tree, nested)
    return recipe_from_tree(tree)


def validated(
    schema: type[SectionT], tree: Tree, origins: Mapping[str, str] | None = None, where: str = COMMAND_LINE
) -> SectionT:
    """Return `tree` as a section; raise UserError with the mistakes in one sentence."""
    try:
        # JSON's strict rules: a string is never a number and true is never 1, but a list may become a tuple.
        return schema.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise UserError(explain(error, schema, origins or {}, where)) from None


class _ShortLists(SafeRepresenter):
    """A class of its own, as representers are the class's."""


_ShortLists.add_representer(
    list, lambda out, items: out.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return the YAML text of a tree, with keys in their order and short lists on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _ShortLists
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(dict(tree), out)
    return out.getvalue()


def recipe_path(name: str) -> Path:
    """Return the file of a shipped recipe (`neuron`, `mnist/exercise`) or of a path."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"recipe file {name} does not exist")
        return path
    for candidate in (f"{name}.yaml", f"{name}/default.yaml", f"{name}/quick.yaml"):
        path = SHIPPED / candidate
        if path.is_file() and path.resolve().is_relative_to(SHIPPED.resolve()):
            return path
    hint = did_you_mean(name, (shipped for shipped, _ in shipped_recipes()))
    raise UserError(
        f"there is no recipe {name!r}{hint or ' (`podium recipes` lists them; a file of your own ends in .yaml)'}"
    )


# --- reading ------------------------------------------------------------------------------------------------------


def _read(name: str, chain: tuple[Path, ...], known: dict[Path, dict[Path, Layer]]) -> dict[Path, Layer]:
    """Return the content of the recipe and of those it is based on by file, the lowest base first.

    `known` has the files read so far: each is read once. One that is a base in several ways counts where it comes last.
    """
    path = recipe_path(name)
    place = path.resolve()
    if place in chain:
        loop = " -> ".join(p.name for p in (*chain, path))
        raise UserError(f"{path}: base is circular ({loop})")
    if place in known:
        return known[place]
    if len(known) + len(chain) >= _MAX_FILES:
        raise UserError(f"{path}: a recipe is put together from at most {_MAX_FILES} files, and this one needs more")
    own = read_yaml(path)
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: base = {json.dumps(bases, default=str)}: expected a recipe name or a list of them")
    layers: dict[Path, Layer] = {}
    for base in bases:
        if base.endswith((".yaml", ".yml")):
            base = str(path.parent / base)
        for file, layer in _read(base, (*chain, place), known).items():
            layers.pop(file, None)
            layers[file] = layer
    shown = path.relative_to(SHIPPED.parent) if path.is_relative_to(SHIPPED) else path
    tree: Tree = {}
    _merge(tree, own)
    _resolve_code(tree, path.parent)
    layers[place] = Layer(str(shown), tree)
    known[place] = layers
    return layers


def _command_line(overrides: Iterable[str], schema: type[Section] | None = None) -> Layer:
    """Return what is written on the command line; with a schema, each value by the type of its key."""
    written: Tree = {}
    for text in overrides:
        _merge(written, _nested(*parse_override(text, schema)))
    _resolve_code(written, Path())
    return Layer(COMMAND_LINE, written)


def _resolve_code(tree: Tree, folder: Path) -> None:
    """Make the paths of a user's code independent of `folder`, which their relative forms start from."""
    for part in ("workload", *OWN_PARTS):
        section = tree.get(part)
        if isinstance(section, dict) and isinstance(section.get("name"), str):
            section["name"] = resolved_name(section["name"], folder)
    log = tree.get("log")
    if isinstance(log, dict) and isinstance(names := log.get("observers"), list):
        log["observers"] = [resolved_name(name, folder) if isinstance(name, str) else name for name in names]


def _nested(dotted: str, value: Any) -> Tree:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    tree: Tree = value
    return tree


def _merge(into: Tree, tree: Tree, prefix: str = "") -> None:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if dotted in SHORT and not isinstance(value, dict | None):
            value = {SHORT[dotted]: value}
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, f"{dotted}.")
        else:
            into[key] = json.loads(json.dumps(value, default=str)) if isinstance(value, dict) else value


def _drop_overruled(
    schema: type[Section], inherited: Tree, written: Tree, origins: dict[str, str], prefix: str = ""
) -> None:
    """Drop the inherited keys that contradict what is written later."""
    for key in schema.overruled(inherited, written):
        inherited.pop(key, None)
        origins.pop(f"{prefix}{key}", None)
    for name, field in schema.model_fields.items():
        key = field.alias or name
        below, above = inherited.get(key), written.get(key)
        if isinstance(below, dict) and isinstance(above, dict):
            for kind in sections_of(field):
                _drop_overruled(kind, below, above, origins, f"{prefix}{key}.")


def _leaves(tree: Tree) -> Iterator[str]:
    """Yield the dotted key of everything in a tree, sections included."""
    for key, value in tree.items():
        yield str(key)
        if isinstance(value, dict):
            yield from (f"{key}.{leaf}" for leaf in _leaves(value))


# --- schema ---------------------------------------------------------------------------------------------------------


def _workload_schema(tree: Tree, origins: Mapping[str, str], where: str) -> type[Recipe]:
    """Return the schema of the recipe's workload."""
    workload = tree.get("workload")
    name = workload.get("name") if isinstance(workload, dict) else None
    if isinstance(name, str) and is_known(name):
        return schema_of(name)
    shown = f"workload.name = {json.dumps(name, default=str)}" if name is not None else "workload.name is missing"
    names = known_names()
    raise UserError(
        f"{origins.get('workload.name', where)}: {shown}: expected one of {', '.join(names)}, or a file of your own "
        f"such as mine.py" + did_you_mean(name, names)
    )


def schema_of(workload: str) -> type[Recipe]:
    """Return the schema of recipes for a workload, shipped or a user's."""
    return _schema_with(workload_sections(workload))


@cache
def _schema_with(sections: WorkloadSections) -> type[Recipe]:
    section = create_model(
        "WorkloadSection",
        __base__=WorkloadSection,
        model=(sections.model, Field(default_factory=sections.model)),
        data=(sections.data, Field(default_factory=sections.data)),
    )
    return create_model("Recipe", __base__=Recipe, workload=(section, ...))
