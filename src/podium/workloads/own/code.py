"""Code of a user: where a workload's name leads, which files belong to it, and how it is imported.

    mine.py, mine.py:Inverter       a file, relative to the recipe that names it
    my_package.module:Inverter      a module that can be imported, or lies beside the recipe
    inverter                        announced by an installed package in the entry-point group `podium.workloads`

A file's folder is searched for the modules that it imports, as for a script. Nothing here imports torch itself.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from podium.errors import UserError, system_reason
from podium.recipe.section import Section
from podium.workloads.own.frames import explain_import

GROUP = "podium.workloads"
T = TypeVar("T")
_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<member>[A-Za-z_]\w*))?")
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<member>[A-Za-z_]\w*)")
#: members that a workload must have; `datasets` does for `source`
NEEDED = (("build_model",), ("source", "datasets"), ("loss",))
#: a larger file is not somebody's source code
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Code:
    """A module of a user that has been imported."""

    module: ModuleType
    path: Path | None
    #: folder from which it imports its own modules; None: it was installed
    root: Path | None
    sha256: str
    #: modules of the same folder that it has imported: name, module, checksum of the file
    beside: tuple[tuple[str, ModuleType, str], ...] = ()

    def is_current(self) -> bool:
        """Return whether the modules beside it are still those that it has imported."""
        return all(
            sys.modules.get(name) is module and Path(str(module.__file__)).is_file() and _sha256_of(module) == digest
            for name, module, digest in self.beside
        )


_loaded: dict[Path, Code] = {}
#: files that are being imported right now
_importing: list[Path] = []


class ScriptReached(BaseException):
    """A script that is imported for what it defines has come to the line that trains."""


def stop_imported_script() -> None:
    """Called first by what trains from a script: in another process, which imports the script, nothing is to train."""
    if _importing:
        raise ScriptReached


def is_file_name(name: str) -> bool:
    """Return whether a workload is named by its file."""
    return _FILE.fullmatch(name) is not None


def is_own_name(name: str) -> bool:
    """Return whether a name leads to a user's file or module."""
    return is_file_name(name) or _MODULE.fullmatch(name) is not None


def resolved_name(name: str, folder: Path) -> str:
    """Return the name in a form that does not depend on `folder`, from which relative paths are meant."""
    if found := _FILE.fullmatch(name):
        path = (folder / Path(found["path"]).expanduser()).resolve()
        return f"{path}:{found['member']}" if found["member"] else str(path)
    if found := _MODULE.fullmatch(name):
        beside = folder.joinpath(*found["module"].split("."))
        for path in (beside.with_suffix(".py"), beside / "__init__.py"):
            if path.is_file():
                return f"{path.resolve()}:{found['member']}"
    return name


def short_name(name: str) -> str:
    """Return a name for messages and folders: that of the file without its folder."""
    found = _FILE.fullmatch(name)
    return name if found is None else Path(found["path"]).name + (f":{found['member']}" if found["member"] else "")


def announced() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the workloads that installed packages announce, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def own_class(name: str) -> type:
    """Return the class that a name leads to, imported; raise UserError where there is none or it lacks a member."""
    if found := _FILE.fullmatch(name):
        code = load_file(Path(found["path"]))
        return _class_in(code, found["member"])
    if found := _MODULE.fullmatch(name):
        return _class_in(load_module(found["module"]), found["member"])
    point = announced()[name]
    return _class_in(load_module(point.module), point.attr or None)


def own_member(name: str, key: str) -> Any:
    """Return the class or function that the value of a recipe's `key` leads to, imported; raise UserError where there
    is none."""
    found = _FILE.fullmatch(name) or _MODULE.fullmatch(name)
    assert found is not None
    code = code_of(name, key)
    if found["member"] not in vars(code.module):
        raise UserError(f"{key}: {code.path or code.module.__name__} has no {found['member']}")
    return vars(code.module)[found["member"]]


def code_of(name: str, key: str = "workload.name") -> Code:
    """Return the imported code that a name leads to, the value of a recipe's `key`."""
    if found := _FILE.fullmatch(name):
        return load_file(Path(found["path"]), key)
    found = _MODULE.fullmatch(name)
    return load_module(found["module"] if found else announced()[name].module, key)


def code_identity(name: str) -> str:
    """Return what identifies a user's code wherever its file lies: its short name and the checksum of its code."""
    found = _FILE.fullmatch(name)
    # The code that runs: a file may have been changed since it was imported.
    code = (_loaded.get(Path(found["path"])) if found else None) or code_of(name)
    return f"{short_name(name)} sha256:{code.sha256}"


@dataclass(frozen=True)
class CodeFiles:
    """The files of a user's workload that have been imported: paths below `root`, with their checksums."""

    root: Path
    sha256: dict[str, str]


def code_files(name: str) -> CodeFiles:
    """Return the files that a workload consists of, as far as they have been imported by now."""
    code = code_of(name)
    if code.path is None:
        return CodeFiles(Path(), {})
    if code.root is None:
        return CodeFiles(code.path.parent, {code.path.name: code.sha256})
    found = {path: file_sha256(path) for path in own_files(code.root)}
    found[code.path] = code.sha256
    return CodeFiles(code.root, {path.relative_to(code.root).as_posix(): found[path] for path in sorted(found)})


def renamed_file(name: str, path: Path) -> str:
    """Return the name of the same workload in another file."""
    found = _FILE.fullmatch(name)
    assert found is not None
    return f"{path}:{found['member']}" if found["member"] else str(path)


# --- importing --------------------------------------------------------------------------------------------------------


def load_file(path: Path, key: str = "workload.name") -> Code:
    """Import a file as a module, once for as long as it does not change."""
    path = path.resolve()
    digest = file_sha256(path, key)
    known = _loaded.get(path)
    if known is not None and known.sha256 == digest and known.is_current():
        return known
    root, dotted = _place(path)
    with searching(root, forget=known is not None):
        spec = importlib.util.find_spec(dotted) if _can_be(dotted) and not _is_others(dotted) else None
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != path.resolve():
            dotted = f"podium_own_{path.stem}_{digest[:12]}"
            spec = importlib.util.spec_from_file_location(dotted, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(dotted)
        sys.modules[dotted] = module
        _importing.append(path)
        try:
            spec.loader.exec_module(module)
        except ScriptReached:
            pass  # all that comes before is defined
        except BaseException as error:
            if before is None:
                sys.modules.pop(dotted, None)
            else:
                sys.modules[dotted] = before
            raise explain_import(error, path) from error
        finally:
            _importing.pop()
    own = own_modules(root)
    beside = tuple((name, each, _sha256_of(each)) for name, each in own.items() if each is not module)
    code = Code(module, path, root, digest, beside)
    _loaded[path] = code
    return code


def load_module(dotted: str, key: str = "workload.name") -> Code:
    """Import a module by its name."""
    try:
        module = importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is not None and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            raise UserError(
                f"{key}: there is no module {error.name}: install its package, or give the path of the file, "
                "as in mine.py:Inverter"
            ) from None
        raise explain_import(error, None, dotted) from error
    except Exception as error:
        raise explain_import(error, None, dotted) from error
    path = Path(module.__file__) if module.__file__ else None
    return Code(module, path, None, file_sha256(path) if path is not None else "")


def file_sha256(path: Path, key: str = "workload.name") -> str:
    """Return the checksum of a file of source code; raise UserError where it cannot be read."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path} has more than {_MAX_BYTES >> 20} MiB: it is no Python file")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}, which {key} leads to") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


@contextmanager
def searching(root: Path, *, forget: bool = False) -> Iterator[None]:
    """Put a folder first where modules are searched for, and leave it there, last, for what is imported later.

    Modules of the same name that came from another user's folder give way; with `forget`, those of this one, too.
    """
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str) or not _is_own(Path(origin)):
            continue
        top = name.partition(".")[0]
        here = (root / f"{top}.py").is_file() or (root / top / "__init__.py").is_file()
        if here and (forget or not Path(origin).is_relative_to(root)):
            del sys.modules[name]
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        if str(root) not in sys.path:
            sys.path.append(str(root))


def own_files(root: Path) -> list[Path]:
    """Return the files below a folder that have been imported by now, without installed packages."""
    return sorted({Path(str(module.__file__)).resolve() for module in own_modules(root).values()})


def own_modules(root: Path) -> dict[str, ModuleType]:
    """Return the modules whose files are below a folder, without installed packages."""
    found = {}
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str) and origin.endswith(".py"):
            path = Path(origin).resolve()
            if path.is_relative_to(root) and "site-packages" not in path.parts and path.is_file():
                found[name] = module
    return found


def _sha256_of(module: ModuleType) -> str:
    return file_sha256(Path(str(module.__file__)))


def _is_own(path: Path) -> bool:
    return any(code.root is not None and path.is_relative_to(code.root) for code in _loaded.values()) and (
        "site-packages" not in path.parts
    )


def _place(path: Path) -> tuple[Path, str]:
    """Return the folder that modules are searched in and the dotted name of a file, which may be part of a package."""
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def session_module(path: Path) -> ModuleType | None:
    """Return the module of a file that this session has imported itself, the script that it runs included."""
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str) and Path(origin).resolve() == path:
            return module
    return None


def _is_others(dotted: str) -> bool:
    """Return whether a module of this name was imported by somebody else, who goes on using it."""
    module = sys.modules.get(dotted)
    return module is not None and all(code.module is not module for code in _loaded.values())


def _can_be(dotted: str) -> bool:
    """Return whether a module may have this name: it belongs to nobody else."""
    top = dotted.partition(".")[0]
    return top.isidentifier() and top not in sys.stdlib_module_names and top != "__main__"


def _class_in(code: Code, member: str | None) -> type:
    where = str(code.path or code.module.__name__)
    if member is None:
        own = [
            value
            for value in vars(code.module).values()
            if inspect.isclass(value) and value.__module__ == code.module.__name__ and hasattr(value, "build_model")
        ]
        if not own:
            raise UserError(f"{where} has no workload: a class with {_needed_text()}")
        if len(own) > 1:
            names = ", ".join(cls.__name__ for cls in own)
            raise UserError(f"{where} has several workloads: choose one of {names}, as in {where}:{own[0].__name__}")
        found = own[0]
    else:
        named: Any = getattr(code.module, member, None)
        if not inspect.isclass(named):
            known = [name for name, value in vars(code.module).items() if hasattr(value, "build_model")]
            raise UserError(f"{where} has no class {member}" + (f": it has {', '.join(known)}" if known else ""))
        found = named
    check_members(found, where)
    return found


def check_members(cls: type, where: str) -> None:
    """Raise UserError unless a class has what a workload needs."""
    for choice in NEEDED:
        if not any(getattr(cls, name, None) is not None for name in choice):
            raise UserError(f"{where}: the workload {cls.__name__} lacks {choice[0]}: it needs {_needed_text()}")


def checked_sections(cls: Any, form: Callable[[type[Section], type[Section]], T]) -> T:
    """Return a class's schemas of `workload.model` and `workload.data`; raise UserError unless they are sections."""
    for name in ("ModelSection", "DataSection"):
        section = getattr(cls, name)
        if not (inspect.isclass(section) and issubclass(section, Section)):
            raise UserError(f"the workload {cls.__name__}: {name} must be a class derived from podium.Section")
        required = [key for key, field in section.model_fields.items() if field.is_required()]
        if required:
            raise UserError(
                f"the workload {cls.__name__}: {name}.{required[0]} has no default; give it one, such as "
                f"`{required[0]}: int = 32`"
            )
    return form(cls.ModelSection, cls.DataSection)


def _needed_text() -> str:
    return "build_model, source (or datasets) and loss"
