"""Recipes: reading, `base:` inheritance, `key=value` overrides, validation, the resolved form.

Defaults < base files < the file < the command line. Nothing unknown is allowed; every error names where the value
came from, the key, the value and what was expected. Only `cli.py` and `train.py` handle a whole `Recipe`.
"""

import difflib
import hashlib
import io
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from podium.averaging import AverageSection
from podium.batch import BatchSection
from podium.checkpoint import CheckpointSection
from podium.durations import Duration, Seconds
from podium.engine.precision import PrecisionSection
from podium.engine.update import EngineSection
from podium.errors import UserError
from podium.evaluate import ValidSection
from podium.launch.plan import LaunchSection
from podium.optim.optimisers import OptimSection
from podium.optim.schedules import ScheduleSection
from podium.parallel import ParallelSection
from podium.schema import Section
from podium.shipped import SHIPPED, shipped_recipes
from podium.telemetry import LogSection
from podium.workloads.base import WORKLOADS, workload_class

COMMAND_LINE = "command line"
Tree = dict[str, Any]
SectionT = TypeVar("SectionT", bound=Section)


class TrainSection(Section):
    """How long to train."""

    length: Duration
    #: wall-clock time after which the run saves itself and exits 75, to be resumed
    time_limit: Seconds | None = None


class WorkloadSection(Section):
    """What is trained; `model` and `data` get the workload's own schemas once its name is known."""

    name: str
    model: Any
    data: Any
    #: folder in Hugging Face's form whose weights a new training starts from
    init_from: Path | None = None


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
        """The resolved tree, ready for YAML; reading it again gives an equal recipe."""
        tree: Tree = self.model_dump(mode="json", by_alias=True)
        return tree

    def sha256(self) -> str:
        """Identifies the training: any change of a resolved value changes it."""
        return hashlib.sha256(json.dumps(self.tree(), sort_keys=True).encode()).hexdigest()


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe called `name` (shipped name or path) with `section.key=value` overrides."""
    tree, origins = _read(name, ())
    for text in overrides:
        dotted, value = parse_override(text)
        _merge(tree, _nested(dotted, value), origins, COMMAND_LINE)
    return recipe_from_tree(tree, origins, name)


def recipe_from_tree(tree: Tree, origins: Mapping[str, str] | None = None, where: str = "recipe") -> Recipe:
    """Validates a tree; `origins` says for each dotted key which file (or the command line) set it."""
    origins = origins or {}
    workload = tree.get("workload")
    name = workload.get("name") if isinstance(workload, dict) else None
    if not isinstance(name, str) or name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        shown = f"workload.name = {json.dumps(name)}" if name is not None else "workload.name is missing"
        near = difflib.get_close_matches(str(name), WORKLOADS, 1)
        raise UserError(
            f"{origins.get('workload.name', where)}: {shown}: expected one of {known}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )
    return validated(_schema(name), tree, origins, where)


def recipe_with(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    """The recipe with other values for some dotted keys. Batch sizes that are not given are derived anew."""
    tree = recipe.tree()
    if any(key.startswith("batch.") for key in keys):
        tree["batch"]["global"] = None
    for dotted, value in keys.items():
        _merge(tree, _nested(dotted, value), {}, None)
    return recipe_from_tree(tree)


def validated(
    schema: type[SectionT], tree: Tree, origins: Mapping[str, str] | None = None, where: str = COMMAND_LINE
) -> SectionT:
    """`tree` as a section; UserError with every mistake in one sentence."""
    try:
        # JSON's strict rules: a string is never a number and true is never 1, but a list may become a tuple.
        return schema.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise UserError(_explain(error, schema, origins or {}, where)) from None


def to_yaml(tree: Mapping[str, Any]) -> str:
    """YAML text of a tree, keys in their order, short lists on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.representer.add_representer(
        list, lambda out, items: out.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
    )
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(dict(tree), out)
    return out.getvalue()


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe (`neuron`, `mnist/exercise`) or of a path."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"recipe file {name} does not exist")
        return path
    for candidate in (f"{name}.yaml", f"{name}/default.yaml", f"{name}/quick.yaml"):
        path = SHIPPED / candidate
        if path.is_file() and path.resolve().is_relative_to(SHIPPED.resolve()):
            return path
    names = [shipped for shipped, _ in shipped_recipes()]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else "`podium recipes` lists them; a file of your own ends in .yaml"
    raise UserError(f"there is no recipe {name!r} ({hint})")


# --- reading ------------------------------------------------------------------------------------------------------


def _read(name: str, chain: tuple[Path, ...]) -> tuple[Tree, dict[str, str]]:
    path = recipe_path(name)
    if path.resolve() in chain:
        loop = " -> ".join(p.name for p in (*chain, path))
        raise UserError(f"{path}: `base:` goes round in a circle ({loop})")
    own = read_yaml(path)
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: base = {json.dumps(bases, default=str)}: expected a recipe name or a list of them")
    tree: Tree = {}
    origins: dict[str, str] = {}
    for base in bases:
        if base.endswith((".yaml", ".yml")):
            base = str(path.parent / base)
        parent, parent_origins = _read(base, (*chain, path.resolve()))
        _merge(tree, parent, origins, None)
        origins.update(parent_origins)
    shown = path.relative_to(SHIPPED.parent) if path.is_relative_to(SHIPPED) else path
    _merge(tree, own, origins, str(shown))
    return tree, origins


def read_yaml(path: Path) -> Tree:
    """A YAML 1.2 mapping; duplicate keys are errors and nothing in the file is executed."""
    try:
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        problem = (error.problem or str(error)).strip().splitlines()[0]
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"{path}: expected sections such as `batch:` at the top level")
    return tree


def parse_override(text: str) -> tuple[str, Any]:
    """`section.key=value` as key and value, the value read as YAML."""
    dotted, equals, raw = text.partition("=")
    if not equals or not dotted or not all(dotted.split(".")):
        raise UserError(f"{COMMAND_LINE}: {text!r} is not of the form section.key=value")
    try:
        return dotted, YAML(typ="safe", pure=True).load(raw) if raw else None
    except YAMLError:
        return dotted, raw


def _nested(dotted: str, value: Any) -> Tree:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    tree: Tree = value
    return tree


#: sections that may be given by their most important key alone: `precision: 16.16`
_SHORT = {"precision": "mode", "average": "method"}


def _merge(into: Tree, tree: Tree, origins: dict[str, str], origin: str | None, prefix: str = "") -> None:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if dotted in _SHORT and not isinstance(value, dict | None):
            value = {_SHORT[dotted]: value}
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, origins, origin, f"{dotted}.")
            continue
        into[key] = json.loads(json.dumps(value, default=str)) if isinstance(value, dict) else value
        if origin:
            origins[dotted] = origin
            if isinstance(value, dict):
                origins.update((f"{dotted}.{leaf}", origin) for leaf in _leaves(value))


def _leaves(tree: Tree) -> Iterator[str]:
    for key, value in tree.items():
        yield str(key)
        if isinstance(value, dict):
            yield from (f"{key}.{leaf}" for leaf in _leaves(value))


# --- schema and errors ----------------------------------------------------------------------------------------------


@cache
def _schema(workload: str) -> type[Recipe]:
    cls: Any = workload_class(workload)
    section = create_model(
        "WorkloadSection",
        __base__=WorkloadSection,
        model=(cls.ModelSection, Field(default_factory=cls.ModelSection)),
        data=(cls.DataSection, Field(default_factory=cls.DataSection)),
    )
    return create_model("Recipe", __base__=Recipe, workload=(section, ...))


def _sections_of(field: FieldInfo) -> list[type[Section]]:
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def all_keys(schema: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key the schema knows."""
    for name, field in schema.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        yield dotted
        for kind in _sections_of(field):
            yield from all_keys(kind, f"{dotted}.")


#: what other systems call it
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "batch.micro",
    "micro_batch": "batch.micro",
    "gradient_accumulation": "batch.accumulation",
    "global_batch": "batch.global",
    "num_replicas": "batch.replicas",
    "num_stages": "parallel.stages",
    "epochs": "train.length",
    "optimizer": "optim.name",
    "wd": "optim.weight_decay",
}


def _nearest(dotted: str, keys: list[str]) -> str | None:
    """The valid key most likely meant: the same name in another section, or a similar spelling."""
    leaf, keys = dotted.rpartition(".")[2], [key for key in keys if key != dotted]
    if leaf in _ELSEWHERE and _ELSEWHERE[leaf] in keys:
        return _ELSEWHERE[leaf]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if same_leaf:  # what is written may be the end of it (`model.dropout`); else the first section that has it
        return next((key for key in same_leaf if key.endswith(f".{dotted}")), same_leaf[0])
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == dotted.rpartition(".")[0]}
    near = difflib.get_close_matches(leaf, siblings, 1, cutoff=0.5)
    if near:
        return siblings[near[0]]
    whole = difflib.get_close_matches(dotted, keys, 1, cutoff=0.6)
    return whole[0] if whole else None


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section with keys of its own",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
}


def _explain(error: ValidationError, schema: type[Section], origins: Mapping[str, str], where: str) -> str:
    details = error.errors()
    keys = list(all_keys(schema))
    # A value that fits no branch of `X | None` reports every branch: the first error of each key says it.
    first: dict[str, ErrorDetails] = {}
    for detail in details:
        first.setdefault(_dotted(detail, keys), detail)
    sentences = [_sentence(dotted, detail, keys, origins, where) for dotted, detail in first.items()]
    more = f" (and {len(sentences) - 1} more: {'; '.join(sentences[1:4])})" if len(sentences) > 1 else ""
    return sentences[0] + more


def _dotted(detail: ErrorDetails, keys: list[str]) -> str:
    """Location as a dotted key, without list positions and names of union branches."""
    parts: list[str] = []
    for part in detail["loc"]:
        grown = ".".join([*parts, str(part)])
        if detail["type"] == "extra_forbidden" or any(key == grown or key.startswith(f"{grown}.") for key in keys):
            parts.append(str(part))
    return ".".join(parts)


def _sentence(dotted: str, detail: ErrorDetails, keys: list[str], origins: Mapping[str, str], where: str) -> str:
    origin = origins.get(dotted) or next(
        (origins[key] for key in sorted(origins) if dotted and key.startswith(f"{dotted}.")), where
    )
    kind = detail["type"]
    if kind == "extra_forbidden":
        near = _nearest(dotted, keys)
        return f"{origin}: unknown key {dotted}" + (f" (did you mean {near}?)" if near else "")
    if kind == "missing":
        return f"{origin}: {dotted} is required and missing"
    value = json.dumps(detail["input"], default=str)
    shown = f"{dotted} = {value}" if len(value) <= 80 else dotted
    if kind == "value_error":
        problem = str(detail["ctx"]["error"])
        # Checks between keys of a section see the whole section: their sentence names the keys already.
        return f"{origin}: {problem}" if isinstance(detail["input"], dict) else f"{origin}: {shown}: {problem}"
    if kind == "literal_error":
        expected = f"one of {detail['ctx']['expected'].replace(chr(39), '').replace(' or ', ', ')}"
        alike = difflib.get_close_matches(str(detail["input"]), expected.removeprefix("one of ").split(", "), 1)
        return f"{origin}: {shown}: expected {expected}" + (f" (did you mean {alike[0]}?)" if alike else "")
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{origin}: {shown}: expected {_EXPECTED.get(kind, message)}"
