"""Losses by name, and a user's function as a loss: sums with their counts, as the contract has them.

mse, l1, huber       a mean over the numbers of a sample; counted by samples
cross_entropy, nll   counted by labels: one for each sample, or one for each position of it
bce                  of logits; counted by labels
(output, target)     a user's function: losses of samples, or their mean
(model, batch)       a user's function that does everything and returns a `Loss`
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from podium.contract import Batch, Loss
from podium.errors import UserError
from podium.recipe.messages import did_you_mean
from podium.recipe.section import Section

NAMES = ("mse", "l1", "huber", "cross_entropy", "nll", "bce")
#: names of a target among fields
TARGETS = ("target", "targets", "label", "labels", "y")
#: a number that no class has
_NO_LABEL = -(1 << 31)
Kind = Literal["regression", "classification", "other"]


class LossSection(Section):
    """A loss by name, with the options of those that have some."""

    name: Literal["mse", "l1", "huber", "cross_entropy", "nll", "bce"]
    #: cross_entropy: share of the probability that is spread over all classes
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    #: cross_entropy, nll, bce: a factor for each class
    class_weights: tuple[float, ...] | None = None
    #: huber: where the square becomes a line
    delta: float = Field(1.0, gt=0)
    #: cross_entropy, nll: the label that is left out; None: there is none, and -100 is a mistake as any other
    ignore: int | None = None


class LossFunction:
    """`(model, batch) -> Loss` from a name or a user's function."""

    def __init__(self, given: object, where: str = "loss") -> None:
        """Take a name, a mapping with a name and its options, or a function; raise UserError where it is none."""
        self.where = where
        self.section: LossSection | None = None
        self._whole: Callable[[nn.Module, Batch], Loss] | None = None
        self._function: Callable[[Tensor, Tensor], Tensor] | None = None
        if isinstance(given, str | Mapping):
            self.section = _section(given)
        elif isinstance(given, LossSection):
            self.section = given
        elif callable(given):
            self.where = place_of(given) or where
            if _takes_model(given):
                self._whole = given
            else:
                self._function = given
        else:
            raise UserError(
                f"loss = {given!r}: expected one of {', '.join(NAMES)}, or a function (output, target) or "
                "(model, batch)"
            )
        self._weights: Tensor | None = None

    @property
    def takes_output(self) -> bool:
        """Whether it looks at one output and one target, so that everything else of a batch is the model's input."""
        return self._whole is None

    @property
    def kind(self) -> Kind:
        name = self.section.name if self.section else ""
        if name in ("mse", "l1", "huber"):
            return "regression"
        return "classification" if name in ("cross_entropy", "nll", "bce") else "other"

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        if self._whole is not None:
            return checked(self._whole(model, batch), model, self.where)
        field = target_field(batch)
        output = model(*(rows for name, rows in batch.items() if name != field))
        target = batch[field]
        if self._function is not None:
            return self._of_function(output, target, len(target), model)
        return self._named(output, target, model)

    def _of_function(self, output: Tensor, target: Tensor, num_samples: int, model: nn.Module) -> Loss:
        assert self._function is not None
        value = self._function(output, target)
        if not isinstance(value, Tensor):
            raise UserError(
                f"{self.where}: the loss returned {type(value).__name__}, expected a tensor: the losses of the "
                "samples, or their mean"
            )
        if value.dim() == 0:
            return checked(Loss(value * num_samples, num_samples), model, self.where)
        if len(value) != num_samples:
            raise UserError(
                f"{self.where}: the loss returned the shape {list(value.shape)}, expected ({num_samples},), a loss for "
                "each sample, or their mean"
            )
        return checked(Loss(value.reshape(num_samples, -1).mean(dim=1).sum(), num_samples), model, self.where)

    def _named(self, output: Any, target: Tensor, model: nn.Module) -> Loss:
        section = self.section
        assert section is not None
        if not isinstance(output, Tensor):
            raise UserError(
                f"loss = {section.name}: the model returns {type(output).__name__}, expected a tensor; a function "
                "(model, batch) as loss takes what it returns apart"
            )
        output = output.float()  # half precision is not precise enough for a sum over a micro-batch
        if section.name in ("mse", "l1", "huber"):
            return self._regression(section, output, target)
        if section.name == "bce":
            return self._binary(section, output, target, model)
        return self._classes(section, output, target, model)

    def _regression(self, section: LossSection, output: Tensor, target: Tensor) -> Loss:
        target = same_shape(section.name, output, target).to(output.dtype)
        if section.name == "mse":
            total = F.mse_loss(output, target, reduction="sum")
        elif section.name == "l1":
            total = F.l1_loss(output, target, reduction="sum")
        else:
            total = F.huber_loss(output, target, reduction="sum", delta=section.delta)
        per_sample = target.numel() // len(target)
        return Loss(total / per_sample if per_sample > 1 else total, len(target))

    def _binary(self, section: LossSection, output: Tensor, target: Tensor, model: nn.Module) -> Loss:
        target = same_shape(section.name, output, target).to(output.dtype)
        weights = self._class_weights(section, output.device, 2)
        each = F.binary_cross_entropy_with_logits(output, target, reduction="none")
        if weights is not None:
            each = each * torch.where(target > 0.5, weights[1], weights[0])
        count = target.numel()
        if model.training:
            return Loss(each.sum(), count)
        correct = ((output > 0) == (target > 0.5)).sum(dtype=torch.float32)
        return Loss(each.sum(), count, {"accuracy": (correct, count)})

    def _classes(self, section: LossSection, output: Tensor, target: Tensor, model: nn.Module) -> Loss:
        if target.dim() == output.dim() and target.shape[1:] == (1,):
            target = target.squeeze(1)
        if output.dim() < 2 or target.shape != (len(output), *output.shape[2:]):
            raise UserError(
                f"loss = {section.name}: the model returns the shape {list(output.shape)} and the target has "
                f"{list(target.shape)}: expected (samples, classes, …) and (samples, …)"
            )
        if target.is_floating_point():
            raise UserError(f"loss = {section.name}: the target holds real numbers, expected the numbers of classes")
        target = target.long()
        weights = self._class_weights(section, output.device, output.shape[1])
        ignored = _NO_LABEL if section.ignore is None else section.ignore
        if section.name == "nll":
            total = F.nll_loss(output, target, weights, reduction="sum", ignore_index=ignored)
        else:
            total = F.cross_entropy(
                output,
                target,
                weights,
                reduction="sum",
                ignore_index=ignored,
                label_smoothing=section.label_smoothing,
            )
        # The count of labels that are not ignored waits for the device.
        count = target.numel() if section.ignore is None else int((target != ignored).sum())
        if model.training:
            return Loss(total, count)
        correct = ((output.argmax(dim=1) == target) & (target != ignored)).sum(dtype=torch.float32)
        return Loss(total, count, {"accuracy": (correct, count)})

    def _class_weights(self, section: LossSection, device: torch.device, num_classes: int) -> Tensor | None:
        if section.class_weights is None:
            return None
        if len(section.class_weights) != num_classes:
            raise UserError(
                f"loss = {section.name}: class_weights has {len(section.class_weights)} numbers, expected {num_classes}"
            )
        if self._weights is None or self._weights.device != device:
            self._weights = torch.tensor(section.class_weights, device=device)
        return self._weights


def checked(loss: Any, model: nn.Module, where: str) -> Loss:
    """Return the loss of a user's function if it is a sum with a count; else raise UserError."""
    if type(loss) is not Loss:
        raise UserError(
            f"{where}: the loss returned {type(loss).__name__}, expected podium.Loss(sum, count): the sum over the "
            "micro-batch and the number of items in it"
        )
    if not isinstance(loss.sum, Tensor) or loss.sum.dim() != 0:
        shape = list(loss.sum.shape) if isinstance(loss.sum, Tensor) else type(loss.sum).__name__
        raise UserError(f"{where}: the sum of the loss is {shape}, expected one number as a tensor: add `.sum()`")
    if type(loss.count) is not int or loss.count < 0:
        raise UserError(
            f"{where}: the count of the loss is {loss.count!r}, expected a whole number, such as len(batch['target'])"
        )
    if model.training:
        if torch.is_grad_enabled() and not loss.sum.requires_grad:
            raise UserError(f"{where}: the loss does not depend on the model's weights, so there is nothing to train")
        return loss
    for name, entry in loss.metrics.items():
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], Tensor) and entry[0].dim() == 0):
            raise UserError(f"{where}: the metric {name} is {entry!r}, expected (sum as a tensor, count)")
    return loss


def target_field(fields: Mapping[str, object]) -> str:
    """Return which field of a batch is the target: by its name, else the last one."""
    return next((name for name in TARGETS if name in fields), None) or next(reversed(list(fields)))


def same_shape(loss: str, output: Tensor, target: Tensor) -> Tensor:
    """Return the target in the shape of the output, if they differ by dimensions of size 1 only.

    torch would stretch (n, 1) against (n) to (n, n), and train on nonsense.
    """
    if output.shape == target.shape:
        return target
    if [size for size in output.shape[1:] if size != 1] == [size for size in target.shape[1:] if size != 1] and len(
        output
    ) == len(target):
        return target.reshape(output.shape)
    raise UserError(
        f"loss = {loss}: the model returns the shape {list(output.shape)} and the target has {list(target.shape)}: "
        "expected the same"
    )


def place_of(function: Any) -> str | None:
    """Return the file and line of a function of a user."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{Path(code.co_filename)} line {code.co_firstlineno}" if code is not None else None


def _takes_model(function: Callable) -> bool:
    if isinstance(function, nn.Module):
        return False
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return False
    return names[:1] == ["model"] or names[1:2] == ["batch"]


def _section(given: str | Mapping) -> LossSection:
    from pydantic import ValidationError

    from podium.recipe.messages import explain

    tree = {"name": given} if isinstance(given, str) else dict(given)
    if tree.get("name") not in NAMES:
        raise UserError(
            f"loss = {tree.get('name')!r}: expected one of {', '.join(NAMES)}, or a function"
            + did_you_mean(tree.get("name"), NAMES)
        )
    try:
        return LossSection.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, LossSection, {}, "loss")) from None
