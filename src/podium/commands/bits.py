"""`podium compare --bits A B`: where two runs begin to differ by the digests in their records, and in which tensors by
their checkpoints. `podium verify` compares a run with itself in the same way.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.chain import LINK, LOSS_MARKS, WEIGHT_MARKS, WEIGHTS, first_other_mark
from podium.checkpoints import reading
from podium.checkpoints.reading import Checkpoint
from podium.errors import UserError
from podium.runs.folder import Run, open_run
from podium.ui.console import number, out, show_table, warn
from podium.ui.table import Table
from podium.ui.visible import visible

#: parts of a record that are the same in equal trainings, and what of them is not
_SAME, _OWN = ("train/", "valid/", "weights/"), ("train/samples_per_second",)
#: tensors that a table shows
_MAX_ROWS = 20

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RecordDifference:
    """The first update whose records differ."""

    update: int
    #: by name of the field, what each of the two has; None where one lacks it
    fields: dict[str, tuple[Any, Any]]
    #: the last update before it whose records are equal
    equal_until: int | None
    #: the first update whose losses differ, and the first after which the weights do, where the records tell
    first_losses: int | None = None
    first_weights: int | None = None

    def sentence(self) -> str:
        """Return the fields that differ, the weights first."""
        names = sorted(
            self.fields.keys() - {LOSS_MARKS, WEIGHT_MARKS} or self.fields, key=lambda name: (name != WEIGHTS, name)
        )
        shown = [f"{visible(name)} {_text(self.fields[name][0])} and {_text(self.fields[name][1])}" for name in names]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        return f"{', '.join(shown[:4])}{more}"

    def begin(self) -> str:
        """Return in which update it began, as far as the records tell; empty where they do not."""
        losses, weights, before = self.first_losses, self.first_weights, self.equal_until
        if weights is not None:
            also = f", and its losses {'do, too' if losses == weights else 'do not'}" if losses is not None else ""
            return f"it began in update {weights}: the weights after it are the first that differ{also}"
        if losses is None:
            return ""
        if before is not None and before + 1 == losses:
            return f"it began in update {losses}: the weights before it are equal, and its losses differ"
        first = f" after update {before}" if before is not None else ""
        return f"it began{first} at the latest in update {losses}, whose losses are the first that differ"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    #: elements that differ, of how many
    num: int
    total: int
    #: the largest difference of two of them; None where types or shapes differ, or one side has no such tensor
    largest: float | None
    note: str = ""


def first_difference(ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[RecordDifference | None, list[int]]:
    """Return the first difference of two runs' records, and the updates whose records were compared and are equal.

    Only updates of which both have a record are compared, and of these the fields that equal trainings share.
    """
    known, equal = {record["update"]: record for record in theirs}, list[int]()
    alike = _same_places(ours, theirs)
    for record in ours:
        other = known.get(record["update"])
        if other is None:
            continue
        fields = {
            name: (record.get(name), other.get(name))
            for name in sorted({*record, *other})
            if _is_shared(name, record, other, alike=alike) and record.get(name) != other.get(name)
        }
        if fields:
            first = (first_other_mark(field, record, other) for field in (LOSS_MARKS, WEIGHT_MARKS))
            return RecordDifference(record["update"], fields, equal[-1] if equal else None, *first), equal
        equal.append(record["update"])
    return None, equal


def _updates(records: Sequence[Record]) -> list[int]:
    return [record["update"] for record in records]


def _same_places(ours: Sequence[Record], theirs: Sequence[Record]) -> bool:
    """Return whether the shorter list has records of the same updates as the longer one, from the first on."""
    first = max(min(_updates(ours), default=0), min(_updates(theirs), default=0))
    last = min(max(_updates(ours), default=0), max(_updates(theirs), default=0))
    inside = [[update for update in _updates(each) if first <= update <= last] for each in (ours, theirs)]
    return inside[0] == inside[1]


def _is_shared(name: str, one: Record, other: Record, *, alike: bool) -> bool:
    """Return whether equal trainings have the same value of a field. Unless their records are `alike`, of the same
    updates, links and means since the last record say nothing."""
    if name in (WEIGHTS, LINK, LOSS_MARKS, WEIGHT_MARKS):  # records of earlier versions have none
        return name in one and name in other and (alike or name == WEIGHTS)
    return name.startswith(_SAME if alike else "valid/") and name not in _OWN


def different_tensors(one: Checkpoint, other: Checkpoint) -> list[TensorDifference]:
    """Return the tensors that differ between two checkpoints: weights and buffers, then averages, then the optimiser's
    state."""
    found = []
    # Names of the optimiser's state are those of a slot and a parameter: exp_avg/0.weight.
    for prefix, kind in (("", "weights"), ("average/", "average"), ("", "optimiser")):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                found.append(TensorDifference(prefix + name, 0, 0, None, "only one of them has it"))
            elif (difference := _difference(prefix + name, ours[name], theirs[name])) is not None:
                found.append(difference)
    return found


def _difference(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    if one.dtype != other.dtype or one.shape != other.shape:
        note = f"{_form(one)} and {_form(other)}"
        return TensorDifference(name, 0, one.numel(), None, note)
    rows = [
        tensor.contiguous().reshape(-1).view(torch.uint8).view(-1, tensor.element_size()) for tensor in (one, other)
    ]
    differs = (rows[0] != rows[1]).any(1)
    num = int(differs.sum())
    if not num:
        return None
    places = differs.nonzero().squeeze(1)
    apart = one.reshape(-1)[places].double() - other.reshape(-1)[places].double()
    return TensorDifference(name, num, one.numel(), float(apart.abs().max()))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {' × '.join(map(str, tensor.shape))}"


def shared_checkpoints(one: Run, other: Run, first: int = 0) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Yield the checkpoints that both runs have of an update, from update `first` on; damaged ones are warned of and
    left out."""
    theirs = {path.name: path for path in reading.checkpoint_paths(other.checkpoints)}
    for path in reading.checkpoint_paths(one.checkpoints):
        if path.name in theirs and int(path.name.removeprefix(reading.PREFIX)) >= first:
            try:
                yield reading.load(path), reading.load(theirs[path.name])
            except UserError as error:
                warn(str(error))


def tensor_table(update: int, different: Sequence[TensorDifference]) -> Table:
    """Return the table of the tensors that differ after an update."""
    rows = [
        [visible(each.name), each.note or f"{each.num:,} of {each.total:,}", _largest(each)]
        for each in different[:_MAX_ROWS]
    ]
    more = f"and {len(different) - _MAX_ROWS} more tensors" if len(different) > _MAX_ROWS else ""
    return Table(
        f"different after update {update}", ["tensor", "elements that differ", "largest difference"], rows, more
    )


def _largest(difference: TensorDifference) -> str:
    return "–" if difference.largest is None else f"{difference.largest:.3g}"


def _text(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else repr(value)


def has_digests(records: Sequence[Record]) -> bool:
    return any(WEIGHTS in record for record in records)


def compare_bits(folders: Sequence[Path], form: str) -> bool:
    """Print where two runs begin to differ; return whether they are equal as far as both go."""
    if len(folders) != 2:
        raise UserError(f"--bits compares two runs, but {len(folders)} {'is' if len(folders) == 1 else 'are'} given")
    one, other = (open_run(folder) for folder in folders)
    ours, theirs = one.records(digests=True), other.records(digests=True)
    difference, equal = first_difference(ours, theirs)
    first = 0 if difference is None else difference.update
    different, update, num_compared = list[TensorDifference](), 0, 0
    for mine, matching in shared_checkpoints(one, other, first):
        num_compared, update = num_compared + 1, mine.update
        if different := different_tensors(mine, matching):
            break
    if not equal and difference is None and not num_compared:
        raise UserError(f"{one.path} and {other.path} have neither records nor checkpoints of the same updates")
    same = difference is None and not different
    if form == "json":
        tree = {
            "equal": same,
            "records_equal": len(equal),
            "first_difference": None if difference is None else asdict(difference),
            "checkpoint": update if different else None,
            "tensors": [asdict(each) for each in different],
        }
        print(json.dumps(tree, indent=1))
        return same
    for run, records in ((one, ours), (other, theirs)):
        if records and not has_digests(records):
            warn(f"{run.path} has no digests of its weights: losses and metrics are compared")
    out.print(_verdict(difference, equal), soft_wrap=True, markup=False)
    if different:
        show_table(tensor_table(update, different))
    elif difference is not None:
        what = "are equal" if num_compared else "of the same update are not kept by both"
        out.print(f"in which tensors is not known: checkpoints from there on {what}", soft_wrap=True)
    elif num_compared:
        num = f"{number(num_compared)} checkpoint{'' if num_compared == 1 else 's'}"
        out.print(f"the weights and optimiser state of {num} of both are equal to the bit", soft_wrap=True)
    return same


def _verdict(difference: RecordDifference | None, equal: Sequence[int]) -> str:
    if difference is None:
        count = f"{len(equal)} record{'' if len(equal) == 1 else 's'}"
        return (
            f"{count} of the same updates are equal, the last of update {equal[-1]}" if equal else "no common records"
        )
    until = "" if difference.equal_until is None else f"; equal up to update {difference.equal_until}"
    begin = difference.begin()
    return (
        f"the records of update {difference.update} are the first that differ: {difference.sentence()}{until}"
        f"{'; ' if begin else ''}{begin}"
    )
