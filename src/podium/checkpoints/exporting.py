"""Models for other programs: safetensors, torch's exported programs, ONNX. Each is read back and compared.

`huggingface.py` writes the folders of Hugging Face's libraries.
"""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from podium.checkpoints.weights_file import write_weights
from podium.errors import PodiumError, TrainingFailed, UserError, system_reason
from podium.machine.atomic_files import write_files

#: relative to the largest output: other operators add in another order
_TOLERANCE = 1e-4
SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
FORMATS = (*SUFFIXES, "huggingface")


def export_model(
    form: str, model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], path: Path, facts: Mapping[str, str]
) -> str:
    """Write the plain `model` as one file; return a sentence on how it was compared with the original.

    `inputs`: what its forward takes, for two different numbers of samples. `facts` go into the file where it has a
    place for them.
    """
    if path.suffix != SUFFIXES[form]:
        raise UserError(f"{path}: expected a name ending in {SUFFIXES[form]}")
    if path.exists():
        raise UserError(f"{path} already exists: choose another name with --out")
    write: Callable[[nn.Module, Sequence[tuple[Tensor, ...]], Path, Mapping[str, str]], str]
    write = {"safetensors": _safetensors, "torch_export": _torch_export, "onnx": _onnx}[form]
    was_training = model.training
    model.eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_files(path) as (temporary,), torch.no_grad():
            return write(model, inputs, temporary, facts)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from None
    finally:
        model.train(was_training)


def _safetensors(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], path: Path, facts: Mapping[str, str]) -> str:
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    write_weights(path, weights, {"format": "pt", **facts})
    again = safetensors.torch.load_file(path)
    if again.keys() != weights.keys() or not all(torch.equal(again[name], weights[name]) for name in weights):
        raise TrainingFailed("the file read back differs from the model")
    return f"read back: {len(weights)} tensors, equal to the bit"


def _torch_export(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], path: Path, facts: Mapping[str, str]) -> str:
    program, sizes = _program(model, inputs)
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    return _compared(model, lambda given: loaded(*given), inputs, sizes)


def _onnx(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], path: Path, facts: Mapping[str, str]) -> str:
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise UserError(f"ONNX needs {' and '.join(missing)}: pip install 'podium[onnx]'")
    program, sizes = _program(model, inputs)
    with _quiet():
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    exported.save(str(path), external_data=False)
    if importlib.util.find_spec("onnxruntime") is None:
        return "not compared, as onnxruntime is not installed"
    import onnxruntime  # an optional package

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(given: tuple[Tensor, ...]) -> list[Tensor]:
        fed = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        return [torch.from_numpy(np.asarray(array)) for array in session.run(None, fed)]

    return _compared(model, run, inputs, sizes)


def _program(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> tuple[torch.export.ExportedProgram, str]:
    """Return the exported program, for any number of samples where the model allows it."""
    samples = torch.export.Dim("samples")
    first = inputs[0]
    problem: Exception | None = None
    for shapes, sizes in (([{0: samples}] * len(first), "any number of samples"), (None, f"{len(first[0])} samples")):
        try:
            with _quiet():
                dynamic = None if shapes is None else tuple(shapes)
                return torch.export.export(_Plain(model), first, dynamic_shapes=_per_argument(dynamic)), sizes
        except PodiumError:
            raise
        except Exception as error:  # torch raises many kinds
            problem = error
    reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    raise UserError(f"torch cannot export this model: {reason}")


def _per_argument(shapes: tuple[dict[int, Any], ...] | None) -> Any:
    return None if shapes is None else {"inputs": shapes}


class _Plain(nn.Module):
    """The model behind one signature, whatever its arguments are called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)


def _compared(
    model: nn.Module, run: Callable[[tuple[Tensor, ...]], Any], inputs: Sequence[tuple[Tensor, ...]], sizes: str
) -> str:
    """Raise TrainingFailed unless the exported model gives the outputs of the original, for every input it takes."""
    largest = 0.0
    for given in inputs if sizes.startswith("any") else inputs[:1]:
        expected, got = _tensors(model(*given)), _tensors(run(given))
        if len(expected) != len(got):
            raise TrainingFailed(f"the exported model gives {len(got)} outputs, not {len(expected)}")
        for one, other in zip(expected, got, strict=True):
            scale = float(one.abs().max()) if one.numel() else 0.0
            difference = float((one.double() - other.double()).abs().max()) / max(scale, 1e-12) if one.numel() else 0.0
            largest = max(largest, difference)
    if not largest <= _TOLERANCE:
        raise TrainingFailed(f"the exported model gives other outputs: they differ by {largest:.1e} of the largest")
    return f"takes {sizes}; outputs compared: " + ("equal to the bit" if largest == 0 else f"equal to {largest:.0e}")


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values for tensor in _tensors(value)]


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep what torch's exporters print about themselves from the user."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
