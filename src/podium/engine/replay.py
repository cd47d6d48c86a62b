"""The passes of a small model, recorded once and then replayed: the same kernels on the same memory, without Python's
modules, autograd and the dispatch of every view between them. Used by `replicas.py`.

    the first passes run as they are
    one is recorded: every operator below autograd, every routine of machine code, every seeding of a block
    some of the next updates are replayed and run as they are; where one bit differs, replaying is given up
    from then on they are replayed

A recorded call writes to the memory it wrote to when it was recorded, so views need no call, and only the samples are
copied. Bits are those of the passes themselves, as the kernels are. On a CPU torch has nothing like it: CUDA graphs
are for GPUs, and `torch.compile` makes kernels of its own, with other bits.

What depends on more than the values of tensors cannot be replayed: the workload has to say that its loss is `fixed`,
hooks and observers stop it, and an operator that reads a value, or whose result has a shape that depends on values, is
refused when it is recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from podium.contract import Loss, Workload
from podium.kernels.eligibility import hook_lists, is_watched
from podium.machine import foreach
from podium.machine.recording import OperatorMode, recording

Call = Callable[[], object]
_aten = torch.ops.aten
#: passes that run as they are first: a block's first pass shows whether it draws random numbers
_NUM_BEFORE = 3
_NUM_COMPARED = 3
#: of everything that a recorded pass keeps; above it, dispatch is a small part of the work
MOST_BYTES = 64 << 20
_FILLS = {_aten.zeros_like: 0, _aten.new_zeros: 0, _aten.zeros: 0, _aten.ones_like: 1, _aten.new_ones: 1, _aten.ones: 1}
_EMPTY = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_REFUSED = {_aten.lift_fresh, _aten.set_, _aten.resize_}
#: operators that put values into their result before they reduce them there
_RESIZES = {_aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss, _aten.binary_cross_entropy, _aten.soft_margin_loss}
_DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Tape(OperatorMode):
    """The calls of one forward and backward pass, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        #: what keeps the pass from being replayed
        self.refused: str | None = None
        self._storages: dict[int, int] = {}

    def note(self, make: Callable[..., Call], arguments: Sequence[Any]) -> None:
        self.calls.append(make(*self._held(arguments)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.refused is None:
            outputs = list(_tensors(result))
            self._take(func, args, kwargs, outputs)
        return result

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        packet = func.overloadpacket
        inputs = [*_tensors(args), *_tensors(kwargs)]
        before = {_storage(tensor) for tensor in inputs}
        shared = [_storage(tensor) in before for tensor in outputs]
        if packet in _REFUSED or any(tag in func.tags for tag in _DYNAMIC) or any(map(_is_foreign, inputs + outputs)):
            self.refused = str(func)
        elif func._schema.is_mutable:
            self.calls.append(partial(func, *self._held(args), **self._held(kwargs)))
        elif all(shared) or packet in _EMPTY:  # views; and memory that is there from now on
            self._held(outputs)
        elif any(shared):
            self.refused = str(func)
        else:
            self.calls.append(_again(func, self._held(args), self._held(kwargs), self._held(outputs)))

    def _held(self, values: Any) -> Any:
        """Return the same values, with tensors that share the memory of those given and keep it."""
        if isinstance(values, Tensor):
            return self._hold(values)
        if isinstance(values, dict):
            return {name: self._held(value) for name, value in values.items()}
        return type(values)(map(self._held, values)) if isinstance(values, list | tuple) else values

    def _hold(self, tensor: Tensor) -> Tensor:
        self._storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
        if sum(self._storages.values()) > MOST_BYTES:
            self.refused = "too large"
        return tensor.detach()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _is_foreign(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.layout != torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> Call:
    """Return the call of a functional operator that writes to `outputs`."""
    packet = func.overloadpacket
    if packet in _FILLS:
        return partial(outputs[0].fill_, _FILLS[packet])
    if packet is _aten.clone:
        return partial(outputs[0].copy_, args[0])
    names = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if torch.Tag.generated in other.tags or packet in _RESIZES:  # these resize what they are given, with warnings
            continue
        given = [argument for argument in other._schema.arguments if not argument.is_out]
        outs = [argument.name for argument in other._schema.arguments if argument.is_out]
        if len(outs) == len(outputs) and [(argument.name, str(argument.type)) for argument in given] == names:
            return partial(other, *args, **kwargs, **dict(zip(outs, outputs, strict=True)))

    def call() -> None:
        results = list(_tensors(func(*args, **kwargs)))
        if len(results) != len(outputs):
            raise RuntimeError(f"{func} returned something else")
        for output, value in zip(outputs, results, strict=True):
            output.copy_(value)

    return call


class Recorded:
    """One pass, ready to be replayed."""

    def __init__(self, samples: Mapping[str, Tensor], params: Sequence[nn.Parameter]) -> None:
        """Prepare to record a pass over samples like these, which leaves gradients in `params`."""
        self.samples = {name: rows.clone() for name, rows in samples.items()}
        self._params, self._grads = params, list[Tensor | None]()
        self._tape, self._num_forward = Tape(), 0
        self._loss: Loss | None = None

    def record_forward(self, run: Callable[[Mapping[str, Tensor]], Loss]) -> Loss:
        with recording(self._tape), self._tape:
            loss = run(self.samples)
        self._num_forward = len(self._tape.calls)
        metrics = {name: (total.detach(), count) for name, (total, count) in loss.metrics.items()}
        self._loss = Loss(loss.sum.detach(), loss.count, metrics)
        return loss

    def record_backward(self, run: Callable[[], None]) -> None:
        with recording(self._tape), self._tape:
            run()
        self._grads = [None if param.grad is None else param.grad.detach() for param in self._params]

    @property
    def is_whole(self) -> bool:
        """Whether all that was recorded can be replayed."""
        return self._tape.refused is None

    def fits(self, samples: Mapping[str, Tensor]) -> bool:
        return samples.keys() == self.samples.keys() and all(
            rows.shape == self.samples[name].shape and rows.dtype == self.samples[name].dtype
            for name, rows in samples.items()
        )

    def forward(self, samples: Mapping[str, Tensor]) -> Loss:
        assert self._loss is not None
        with torch.no_grad():
            for name, rows in samples.items():
                self.samples[name].copy_(rows)
            for call in self._tape.calls[: self._num_forward]:
                call()
        return self._loss

    def backward(self) -> None:
        with torch.no_grad():
            for call in self._tape.calls[self._num_forward :]:
                call()
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad

    def results(self) -> tuple[list[Tensor], list[int]]:
        """Return copies of the loss, metrics and gradients of the last pass that was replayed, and the counts."""
        assert self._loss is not None
        tensors, counts = _values(self._loss)
        return [tensor.clone() for tensor in (*tensors, *(g for g in self._grads if g is not None))], counts


def _values(loss: Loss) -> tuple[list[Tensor], list[int]]:
    """Return the sums of a loss and its metrics, and their counts."""
    every = [(loss.sum, loss.count), *loss.metrics.values()]
    return [total.detach() for total, _ in every], [count for _, count in every]


class Replay:
    """Runs the passes of a model's replicas: as they are, or replayed."""

    def __init__(self, model: nn.Module, workload: Workload, params: Sequence[nn.Parameter]) -> None:
        self._model, self._workload, self._params = model, workload, list(params)
        self._tensors, self._hooks = [*model.parameters(), *model.buffers()], hook_lists(model)
        self._num_passes, self._num_equal = 0, 0
        self._recorded: Recorded | None = None
        self._is_given_up = not getattr(workload, "fixed", False)
        #: what must be as it was when the pass was recorded
        self._setting: tuple[int, ...] = ()
        self._replayed: tuple[list[Tensor], list[int]] = [], []
        self._state = "as it is"
        #: the update that runs, and the one in which the pass was recorded
        self._update = self._recorded_in = -1

    def begin(self, update: int) -> None:
        """Begin an update: the weights are others than before."""
        self._update = update

    @property
    def overwrites(self) -> bool:
        """Whether later passes may overwrite the memory of this one's gradients."""
        return self._recorded is not None

    def forward(self, model: nn.Module, samples: Mapping[str, Tensor], enter: Callable[[], None]) -> Loss:
        """Run a forward pass; `enter` seeds torch for it."""
        self._state, self._num_passes = self._next(model, samples), self._num_passes + 1
        if self._state == "replayed":
            assert self._recorded is not None
            enter()
            return self._recorded.forward(samples)
        if self._state == "recorded":
            enter()
            self._recorded, self._recorded_in = Recorded(samples, self._params), self._update
            return self._recorded.record_forward(partial(self._workload.loss, model))
        if self._state == "compared":
            self._replayed = self._replay(samples, enter)
        enter()
        return self._workload.loss(model, samples)

    def backward(self, loss: Loss) -> None:
        """Run the backward pass of the last forward pass."""
        recorded = self._recorded
        if recorded is None or self._state == "as it is":
            loss.sum.backward()
        elif self._state == "replayed":
            recorded.backward()
        elif self._state == "recorded":
            recorded.record_backward(loss.sum.backward)
            self._setting = self._newest_setting()
            if not recorded.is_whole:
                self._give_up()
        else:
            with recording(None):
                loss.sum.backward()
            self._compare(loss)

    def _next(self, model: nn.Module, samples: Mapping[str, Tensor]) -> str:
        if self._is_given_up or model is not self._model or self._num_passes < _NUM_BEFORE:
            return "as it is"
        if any(param.grad is not None for param in self._params):
            return "as it is"  # gradients are added up over micro-batches
        if self._recorded is None:
            return "as it is" if is_watched(model) else "recorded"
        if self._setting != self._newest_setting() or not self._recorded.fits(samples):
            return "as it is"
        if self._update == self._recorded_in:  # what the pass kept of the weights would not show yet
            return "as it is"
        return "compared" if self._num_equal < _NUM_COMPARED else "replayed"

    def _replay(self, samples: Mapping[str, Tensor], enter: Callable[[], None]) -> tuple[list[Tensor], list[int]]:
        """Return what a replayed pass makes, and leave everything as it was."""
        assert self._recorded is not None
        buffers = list(self._model.buffers())
        before = [buffer.clone() for buffer in buffers]
        enter()
        found: tuple[list[Tensor], list[int]] = [], []
        with suppress(RuntimeError):  # an operator that does not write to memory that is there
            self._recorded.forward(samples)
            self._recorded.backward()
            tensors, counts = self._recorded.results()
            found = [*tensors, *(buffer.clone() for buffer in buffers)], counts
        if buffers:
            foreach.copy_(buffers, before)
        for param in self._params:
            param.grad = None
        return found

    def _newest_setting(self) -> tuple[int, ...]:
        places = (tensor.data_ptr() for tensor in self._tensors)
        return (torch.get_num_threads(), self._model.training, *map(len, self._hooks), *places)

    def _compare(self, loss: Loss) -> None:
        grads = [param.grad for param in self._params if param.grad is not None]
        tensors, counts = _values(loss)
        ours, (theirs, their_counts) = [*tensors, *grads, *self._model.buffers()], self._replayed
        self._replayed = [], []
        if counts == their_counts and len(ours) == len(theirs) and all(map(_same_bits, ours, theirs)):
            self._num_equal += 1
        else:
            self._give_up()

    def _give_up(self) -> None:
        self._is_given_up, self._recorded, self._state = True, None, "as it is"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    same_shape = left.dtype == right.dtype and left.shape == right.shape
    return same_shape and _bytes(left).equal(_bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
