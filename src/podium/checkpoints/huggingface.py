"""Weights from and to Hugging Face's libraries: `podium export --format huggingface`, and `workload.init_from`.

Their folders hold `config.json` and `model.safetensors`, or several files of tensors with an index. The workload maps
the names of tensors (`to_huggingface`, `from_huggingface`). Nothing that is read is executed.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from podium.checkpoints.weights_file import write_weights
from podium.contract import Workload
from podium.errors import UserError, system_reason
from podium.machine.atomic_files import create_folder
from podium.machine.bounded_files import read_mapping

#: `from_huggingface` of a workload: copies tensors into its model
Convert = Callable[[nn.Module, Mapping[str, Any], Mapping[str, Tensor]], None]
#: indices of large models list thousands of tensors
_JSON_BYTES = 32 << 20
_CONFIG, _TENSORS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def export(workload: Workload, model: nn.Module, name: str, folder: Path) -> list[Path]:
    """Write the model as `transformers` reads it, with the tokenizer of its data; return the files."""
    convert = getattr(workload, "to_huggingface", None)
    if convert is None:
        raise UserError(f"the workload {name} has no form in Hugging Face's libraries")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: remove it, or choose another folder with --out")
    config, tensors = convert(model)
    tokenizer = workload.tokenizer_file() if hasattr(workload, "tokenizer_file") else None

    def make(aside: Path) -> None:
        (aside / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        contiguous = {key: tensor.detach().cpu().float().contiguous() for key, tensor in tensors.items()}
        write_weights(aside / _TENSORS, contiguous, {"format": "pt"})
        if tokenizer is not None:
            shutil.copyfile(tokenizer, aside / "tokenizer.json")

    try:
        create_folder(folder, make)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {system_reason(error)}") from error
    return sorted(folder.iterdir())


def start_from(convert: Convert, model: nn.Module, folder: Path) -> None:
    """Load the weights of a folder in Hugging Face's format into the model; `convert` is that of its workload."""
    config = _read_json(folder / _CONFIG)
    try:
        convert(model, config, read_tensors(folder))
    except UserError as error:
        raise UserError(f"workload.init_from = {folder}: {error}") from None
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise UserError(f"workload.init_from = {folder}: its tensors do not fit the model: {detail}") from None


def is_folder(path: Path) -> bool:
    """Return whether a folder is in Hugging Face's format."""
    return (path / _CONFIG).is_file()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from one file or several."""
    names = [_TENSORS]
    if not (folder / _TENSORS).exists() and (folder / _INDEX).exists():
        places = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(places, Mapping) or not all(
            isinstance(name, str) and Path(name).name == name for name in places.values()
        ):
            raise UserError(f"{_INDEX} does not say which file each tensor is in")
        names = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"there is no file {name} in it (formats other than safetensors are not supported)")
        try:
            tensors |= safetensors.torch.load_file(folder / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{name} cannot be read: {error}") from error
        except (RuntimeError, ValueError, TypeError, OverflowError, KeyError):  # from headers that no library writes
            raise UserError(f"{name} cannot be read: its header does not describe tensors") from None
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    tree = read_mapping(path, "download the folder again", _JSON_BYTES)
    if tree is None:
        raise UserError(f"workload.init_from: there is no file {path}")
    return tree
