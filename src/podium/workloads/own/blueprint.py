"""Objects of a Python session, written so that other processes can build them again: a JSON file and arrays beside it.

Classes and functions are named, by module or file, never copied; what an object holds is written as data. Reading calls
the classes that the file names, so a file is read only if it was written here or the user trusts it, as with code. Not
pickle: what this refuses (lambdas, objects of a notebook) is refused when it is written, in a sentence.
"""

import base64
import copyreg
import enum
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.errors import UserError
from podium.workloads.own.code import load_file, load_module, session_module

_ARRAYS = "arrays"
_MAX_BYTES = 1 << 28
_PLAIN = (type(None), bool, int, float, str)


class Unreachable(UserError):
    """An object that other processes cannot build: the sentence names it and says what to do."""


def write_objects(objects: dict[str, Any], folder: Path) -> Path:
    """Write objects by name; return the file. Raises Unreachable before anything is written."""
    encoder = _Encoder()
    tree = encoder.encode(objects, "the arguments of podium.fit")
    arrays = folder / _ARRAYS
    arrays.mkdir(parents=True, exist_ok=True)
    for number, array in enumerate(encoder.arrays):
        np.save(arrays / f"{number}.npy", array, allow_pickle=False)
    path = folder / "objects.json"
    # A script that is imported for its classes may look at its arguments.
    whole = {"objects": tree, "files": sorted(encoder.files), "arguments": sys.argv}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def read_objects(path: Path) -> dict[str, Any]:
    """Build the objects of a file again: calls classes that it names."""
    if path.stat().st_size > _MAX_BYTES:
        raise UserError(f"{path} is larger than {_MAX_BYTES >> 20} MiB: it is damaged")
    arguments = sys.argv
    try:
        whole = json.loads(path.read_bytes())
        sys.argv = list(whole["arguments"])
        found: dict[str, Any] = _Decoder(path.parent / _ARRAYS).decode(whole["objects"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path} is damaged, or its classes have changed: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = arguments
    return found


def source_files(path: Path) -> list[Path]:
    """Return the user's files that an objects file names, without building anything."""
    return [Path(file) for file in json.loads(path.read_bytes()).get("files", [])]


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[NDArray] = []
        self.files: set[str] = set()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids are reused once an object is gone

    def encode(self, value: Any, where: str) -> Any:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return value
        simple = self._simple(value, where)
        if simple is not None:
            return simple
        if id(value) in self._seen:
            return {"again": self._seen[id(value)]}
        number = self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return {"id": number, **self._object(value, where)}

    def _simple(self, value: Any, where: str) -> dict[str, Any] | None:
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype | torch.device):
            return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
        if isinstance(value, enum.Enum):
            return {"enum": self._reference(type(value), where), "value": value.name}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value))}
        if isinstance(value, np.dtype):
            return {"dtype": value.str}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, MethodType):
            return {"method": value.__name__, "of": self.encode(value.__self__, where)}
        if isinstance(value, type | FunctionType | BuiltinFunctionType) or hasattr(value, "__qualname__"):
            return {"reference": self._reference(value, where)}
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        return None

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise Unreachable(f"{where} holds an array of Python objects, which other processes cannot be given")
            return {"array": self._array(value)}
        if type(value) in (list, tuple, set, frozenset):
            return {type(value).__name__: [self.encode(item, where) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.encode(key, where), self.encode(item, f"{where}")] for key, item in value.items()]}
        return self._reduced(value, where)

    def _reduced(self, value: Any, where: str) -> dict[str, Any]:
        """Write an object as the protocol of copies describes it, as far as only classes are called."""
        where = f"{type(value).__name__}, in {where}" if isinstance(value, nn.Module) else where
        try:
            make, args, *rest = value.__reduce_ex__(4)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._unreachable(value, where) from error
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            cls, *args = args
            form = "new"
        elif inspect.isclass(make):
            cls, form = make, "call"
        else:
            raise self._unreachable(value, where)
        state, items, pairs = [*rest, None, None, None][:3]
        return {
            form: self._reference(cls, where),
            "args": [self.encode(arg, where) for arg in args],
            "state": self.encode(state, where),
            "items": [self.encode(item, where) for item in items or ()],
            "pairs": [[self.encode(key, where), self.encode(item, where)] for key, item in pairs or ()],
        }

    def _unreachable(self, value: Any, where: str) -> Unreachable:
        return Unreachable(
            f"{type(value).__name__} in {where} cannot be given to other processes: build it in a file of your own, or "
            "leave out instances"
        )

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        data = value.detach().cpu().contiguous()
        name = str(data.dtype).removeprefix("torch.")
        if data.dtype == torch.bfloat16:
            data = data.view(torch.int16)
        return {
            "tensor": self._array(data.numpy()),
            "dtype": name,
            "parameter": isinstance(value, nn.Parameter),
            "gradient": value.requires_grad,
        }

    def _array(self, array: NDArray) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _reference(self, value: Any, where: str) -> dict[str, str]:
        """Return where a class or function is defined; raise Unreachable where other processes would not find it."""
        name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
        if "<lambda>" in name:
            raise Unreachable(f"{where}: a lambda cannot be given to other processes: define a function in a file")
        if "<locals>" in name:
            raise Unreachable(
                f"{where}: {name.rpartition('.')[2]} is defined inside of a function, where other processes do not "
                "find it: define it at the top of a file"
            )
        owner = sys.modules.get(module or "")
        if isinstance(value, BuiltinFunctionType) and (builtin := _builtin_owner(value)) is not None:
            owner, module, name = builtin, builtin.__name__, value.__name__
        if owner is None or module is None:
            raise Unreachable(f"{where}: {name} belongs to no module: define it in a file")
        file = getattr(owner, "__file__", None)
        if module == "__main__" and (file is None or not Path(file).is_file()):
            raise Unreachable(
                f"{where}: {name} is defined in the notebook or on the command line, where other processes do not find "
                "it: move it to a file, such as mine.py, and import it from there"
            )
        if _resolve(owner, name) is not value:
            raise Unreachable(f"{where}: {module}.{name} is not found under its name: define it at the top of a file")
        if file is not None and _is_users(Path(file)):
            path = str(Path(file).resolve())
            self.files.add(path)
            return {"file": path, "name": name}
        return {"module": module, "name": name}


class _Decoder:
    def __init__(self, arrays: Path) -> None:
        self._arrays = arrays
        self._made: dict[int, Any] = {}

    def decode(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "again" in tree:
            return self._made[tree["again"]]
        if "id" not in tree:
            return self._simple(tree)
        number = tree["id"]
        if "new" in tree or "call" in tree:
            return self._reduced(number, tree)
        self._made[number] = made = self._object(tree)
        return made

    def _simple(self, tree: dict[str, Any]) -> Any:
        if "bytes" in tree:
            return base64.b64decode(tree["bytes"])
        if "torch" in tree:
            name = tree["torch"]
            return torch.device(name) if tree["kind"] == "device" else getattr(torch, name)
        if "enum" in tree:
            return referenced(tree["enum"])[tree["value"]]
        if "scalar" in tree:
            return self._load(tree["scalar"], mapped=False)[()]
        if "dtype" in tree:
            return np.dtype(tree["dtype"])
        if "path" in tree:
            return Path(tree["path"])
        if "method" in tree:
            return getattr(self.decode(tree["of"]), tree["method"])
        if "module" in tree:
            return importlib.import_module(tree["module"])
        return referenced(tree["reference"])

    def _object(self, tree: dict[str, Any]) -> Any:
        if "tensor" in tree:
            return self._tensor(tree)
        if "array" in tree:
            return self._load(tree["array"], mapped=True)
        if "dict" in tree:
            return {self.decode(key): self.decode(value) for key, value in tree["dict"]}
        for kind in (list, tuple, set, frozenset):
            if kind.__name__ in tree:
                return kind(self.decode(item) for item in tree[kind.__name__])
        raise KeyError(f"unknown object {sorted(tree)}")

    def _tensor(self, tree: dict[str, Any]) -> Tensor:
        data = torch.from_numpy(self._load(tree["tensor"], mapped=False))
        if tree["dtype"] == "bfloat16":
            data = data.view(torch.bfloat16)
        if tree["parameter"]:
            return nn.Parameter(data, requires_grad=tree["gradient"])
        return data.requires_grad_(tree["gradient"]) if tree["gradient"] else data

    def _reduced(self, number: int, tree: dict[str, Any]) -> Any:
        cls = referenced(tree.get("new") or tree["call"])
        args = [self.decode(arg) for arg in tree["args"]]
        made = cls.__new__(cls, *args) if "new" in tree else cls(*args)
        self._made[number] = made  # before its state, which may lead back to it
        state = self.decode(tree["state"])
        if state is not None:
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                own, slots = state if isinstance(state, tuple) else (state, None)
                vars(made).update(own or {})
                for name, value in (slots or {}).items():
                    setattr(made, name, value)
        for item in tree["items"]:
            made.append(self.decode(item))
        for key, value in tree["pairs"]:
            made[self.decode(key)] = self.decode(value)
        return made

    def _load(self, number: int, *, mapped: bool) -> NDArray:
        array: NDArray = np.load(self._arrays / f"{int(number)}.npy", "r" if mapped else None, allow_pickle=False)
        return array


def referenced(reference: dict[str, str]) -> Any:
    """Return the class or function that a reference names, importing its file or module."""
    if "file" not in reference:
        return _resolve(load_module(reference["module"]).module, reference["name"], strict=True)
    path = Path(reference["file"])
    return _resolve(session_module(path) or load_file(path).module, reference["name"], strict=True)


def _resolve(owner: Any, name: str, *, strict: bool = False) -> Any:
    get: Callable[[Any, str], Any] = getattr if strict else lambda value, part: getattr(value, part, None)
    return functools.reduce(get, name.split("."), owner)


def _builtin_owner(value: BuiltinFunctionType) -> ModuleType | None:
    """Return the module of a function written in C, of which torch's do not know themselves."""
    places = (torch, torch.nn.functional)
    return next((place for place in places if getattr(place, value.__name__, None) is value), None)


def _is_users(path: Path) -> bool:
    from podium.ui.user_frames import is_users

    return is_users(str(path))
