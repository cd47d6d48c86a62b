"""One replica's micro-batches, written down operator by operator, so that two passes can be compared bit for bit.

Where weights differ between numbers of instances, some operator, module or sample of a replica depends on what ran
before it. `record_replica` runs a replica in a newly built training, alone or after the others, and `first_difference`
says where the two part.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn

from podium.engine.replicas import LocalReplicas
from podium.kernels.eligibility import Observer
from podium.machine import foreach
from podium.machine.recording import TorchDispatchMode
from podium.recipe.loading import Recipe
from podium.training.build import Training, build_training
from podium.training.feeding import samples_of_updates

Kind = Literal["samples", "operator", "module", "gradient"]
#: operators by which the host reads a value from the device, and so waits for it
_HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")
_OWN = Path(__file__).parents[1]


@dataclass(frozen=True)
class Event:
    """Something that ran, with checksums of what it took and what it gave."""

    kind: Kind
    #: the operator, the module's path and class, the parameter, or the field of the samples
    name: str
    taken: int
    given: int


@dataclass
class Record:
    """All events of a replica's passes in their order, the lines at which the host waited, and its loss."""

    events: list[Event] = field(default_factory=list)
    host_waits: list[str] = field(default_factory=list)
    loss: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Difference:
    """Where two records part."""

    event: Event
    #: the next module or parameter whose output or gradient was complete after it
    before: str
    #: what it took was the same in both records, so it is the cause itself
    is_cause: bool

    def sentence(self) -> str:
        event, near = self.event, f" (before {self.before})" if self.before else ""
        match event.kind:
            case "samples":
                return f"the samples differ in {event.name}: the source gives other values when it is read again"
            case "gradient":
                return f"the gradient of {event.name} differs"
            case "module":
                return f"the output of {event.name} differs"
        if self.is_cause:
            return f"{event.name} gives other values for the same inputs{near}"
        return f"{event.name} takes other values{near}: they come from outside torch's operators"


def record_replica(recipe: Recipe, *, after_others: bool, times: int = 1) -> list[Record]:
    """Build a training and record the passes of its last replica in update 0, after the other replicas or only itself.

    `times`: how often the same passes are recorded, each from the same buffers.
    """
    training = build_training(recipe, fresh=True)
    state, batch = training.state, recipe.batch
    buffers = list(state.model.buffers())
    start = [buffer.clone() for buffer in buffers]
    replicas = LocalReplicas(
        training.task.workload,
        range(batch.num_replicas),
        batch.num_accumulation,
        recipe.seed,
        buffers,
        training.placement.device,
        state.loss_scale,
    )
    with samples_of_updates(training, 0, 1) as all_samples:
        samples = {name: rows.clone() for name, rows in next(all_samples).items()}
    replicas.begin(0, samples)
    # Unrecorded passes come first in any case: kernels and blocks look at what they get the first time only.
    for slot in range(batch.num_replicas - 1) if after_others else [batch.num_replicas - 1]:
        _restore(buffers, start)
        _run(replicas, training, slot)
    records = []
    for _ in range(times):
        _restore(buffers, start)
        state.model.zero_grad()
        records.append(_recorded(replicas, training, samples, batch.num_replicas - 1))
    return records


def first_difference(one: Record, other: Record) -> Difference | None:
    """Return the first event whose checksums differ, or None where both are equal."""
    for number, (mine, theirs) in enumerate(zip(one.events, other.events, strict=False)):
        if (mine.kind, mine.name, mine.given) == (theirs.kind, theirs.name, theirs.given):
            continue
        return Difference(mine, _near(one.events, number), mine.name == theirs.name and mine.taken == theirs.taken)
    if len(one.events) != len(other.events):
        longer = max(one.events, other.events, key=len)
        number = min(len(one.events), len(other.events))
        return Difference(longer[number], _near(longer, number), is_cause=False)
    return None


def _near(events: Sequence[Event], number: int) -> str:
    """Return the module or parameter that is complete next."""
    for event in events[number:]:
        if event.kind == "module":
            return f"the output of {event.name}"
        if event.kind == "gradient":
            return f"the gradient of {event.name}"
    return ""


def _restore(buffers: list[Tensor], start: list[Tensor]) -> None:
    if buffers:
        foreach.copy_(buffers, start)


def _run(replicas: LocalReplicas, training: Training, slot: int) -> None:
    for index in range(replicas.num_micro_batches):
        replicas.backward(replicas.forward(training.state.model, slot, index))


def _recorded(replicas: LocalReplicas, training: Training, samples: dict[str, Tensor], slot: int) -> Record:
    record = Record()
    record.events += [Event("samples", name, 0, _checksum([rows[slot]])) for name, rows in samples.items()]
    with _observed(training.state.model, record):
        for index in range(replicas.num_micro_batches):
            with _Recorder(record):
                loss = replicas.forward(training.state.model, slot, index)
                replicas.backward(loss)
            record.loss += float(loss.sum.detach())
            record.count += loss.count
    return record


class _Recorder(TorchDispatchMode):
    """Writes down every operator of torch that runs."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        taken = _checksum([args, {key: value for key, value in (kwargs or {}).items() if key != "out"}])
        result = func(*args, **(kwargs or {}))
        if name.startswith(_HOST_READS) and (line := _line_of_the_caller()):
            self._record.host_waits.append(line)
        # A view computes nothing, and both it and new memory may hold what nobody has written yet.
        if not (func.is_view or "view" in name or "empty" in name):
            self._record.events.append(Event("operator", name, taken, _checksum([result])))
        return result


class _Outputs(Observer):
    """Writes down the output of a module. Kernels that do the work of several modules stay in use despite it."""

    def __init__(self, record: Record, paths: dict[nn.Module, str]) -> None:
        self._record, self._paths = record, paths

    def look(self, modules: Sequence[nn.Module], output: Any) -> None:
        last = modules[-1]
        name = f"{self._paths.get(last, '') or 'the model'} ({type(last).__name__})"
        self._record.events.append(Event("module", name, 0, _checksum([output])))


@contextmanager
def _observed(model: nn.Module, record: Record) -> Iterator[None]:
    """Write down the outputs of all modules, and the gradients of all parameters, while this is entered."""
    paths = {module: path for path, module in model.named_modules()}
    handles = [module.register_forward_hook(_Outputs(record, paths)) for module in paths]

    def written(name: str) -> Any:
        def write(param: nn.Parameter) -> None:
            record.events.append(Event("gradient", name, 0, _checksum([param.grad])))

        return write

    handles += [
        param.register_post_accumulate_grad_hook(written(name))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checksum(values: Any) -> int:
    """Return a checksum of all tensors and numbers in `values`."""
    digest = xxhash.xxh3_64()
    for leaf in _leaves(values):
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided and not leaf.is_meta:
                flat = leaf.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(leaf, int | float | str):
            digest.update(repr(leaf).encode())
    return digest.intdigest()


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _line_of_the_caller() -> str:
    """Return file and line of the workload's code that reads a value; nothing where Podium itself reads it."""
    torch_folder = Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(torch_folder) or path == Path(__file__):
            continue
        if path.is_relative_to(_OWN) and not path.is_relative_to(_OWN / "workloads"):
            return ""
        return f"{path.name}:{frame.lineno} ({frame.line})"
    return ""
