"""The outputs of a trained model for new inputs. Used by `podium predict --input` and the Python interface."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.contract import Batch, Workload, named_outputs
from podium.data.source import Field, SampleRequest, Source, empty_buffers, start_gather
from podium.errors import UserError


def input_fields(workload: Workload, fields: Mapping[str, Field]) -> list[str]:
    """Return which fields of a sample the model takes, by looking at what the workload's `inputs` asks for."""
    asked = _Asked(workload.example(1))
    workload.inputs(asked)
    return [name for name in fields if name in asked.names]


def fitting_inputs(
    arrays: Mapping[str, NDArray], needed: Mapping[str, Field], what: object = "input"
) -> dict[str, NDArray]:
    """Return the arrays the model takes, in the shapes and types that it takes; `what` names them in errors."""
    if len(needed) == 1 and len(arrays) == 1:
        arrays = dict(zip(needed, arrays.values(), strict=True))  # nothing to confuse, whatever its name
    if missing := [name for name in needed if name not in arrays]:
        found = ", ".join(name or "one without a name" for name in arrays) or "none"
        raise UserError(f"{what}: no array {', '.join(missing)}: expected {', '.join(needed)} (there are: {found})")
    fitting = {name: _fitting(arrays[name], name, field, what) for name, field in needed.items()}
    lengths = {name: len(array) for name, array in fitting.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise UserError(f"{what}: arrays have different numbers of samples: {shown}")
    return fitting


def _fitting(array: NDArray, name: str, field: Field, what: object) -> NDArray:
    expected = tuple(field.shape)
    if array.ndim and array.shape[1:] != expected and array[0:1].size == int(np.prod(expected)) * len(array[0:1]):
        array = array.reshape(len(array), *expected)
    if array.shape[1:] != expected or not array.ndim:
        raise UserError(
            f"{what}: {name} has the shape {array.shape}: expected (samples, {', '.join(map(str, expected))})"
        )
    if not np.can_cast(array.dtype, field.dtype, "same_kind"):
        raise UserError(f"{what}: {name} holds {array.dtype}: expected {np.dtype(field.dtype)}")
    return array.astype(field.dtype, copy=False)


def array_batches(arrays: Mapping[str, NDArray], micro_batch: int, device: torch.device) -> Iterator[Batch]:
    """Yield arrays in parts, as the model takes them."""
    num_samples = min(map(len, arrays.values()), default=0)
    for start in range(0, num_samples, micro_batch):
        parts = {name: np.array(array[start : start + micro_batch]) for name, array in arrays.items()}
        yield {name: torch.from_numpy(part).to(device) for name, part in parts.items()}


def source_batches(source: Source, micro_batch: int, device: torch.device) -> Iterator[Batch]:
    """Yield all samples of a source in their order."""
    for start in range(0, len(source), micro_batch):
        numbers = np.arange(start, min(start + micro_batch, len(source)), dtype=np.int64)
        buffers = empty_buffers(source.fields, len(numbers))
        start_gather(source, SampleRequest(numbers), buffers)()
        yield {name: torch.from_numpy(rows).to(device) for name, rows in buffers.items()}


def model_outputs(
    model: nn.Module, take: Callable[[Batch], Sequence[Tensor]], batches: Iterable[Batch]
) -> dict[str, NDArray]:
    """Return the model's outputs in evaluation mode, by name; a single one is called `output`.

    `take` returns what the model's forward takes of a batch.
    """
    outputs: dict[str, list[NDArray]] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                for name, rows in named_outputs(model(*take(batch))).items():
                    rows = rows.float() if rows.dtype == torch.bfloat16 else rows  # which numpy does not know
                    outputs.setdefault(name, []).append(rows.cpu().numpy())
    finally:
        model.train(was_training)
    return {name: np.concatenate(parts) for name, parts in outputs.items()}


class _Asked(Mapping[str, Tensor]):
    """A batch that remembers which fields were asked for."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self._batch, self.names = batch, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        self.names.update(self._batch)
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)
