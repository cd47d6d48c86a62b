"""One update of Podium's engine per recipe and optimiser, on the fake CUDA device.

    python -m tests.support.fake_cuda.updates LIBRARY FOLDER     started by `fake_cuda.updates`

What is on the host is real here and what is on the device is fake: samples, weights, gradients and state of optimisers.
"""

import ctypes
import sys

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch, which asks for the hooks of CUDA when it is imported

import json  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import arg_tree_leaves  # noqa: E402

from podium.machine import device as devices  # noqa: E402
from podium.recipe.loading import load_recipe  # noqa: E402
from podium.training import build  # noqa: E402
from podium.training.build import Training, build_training  # noqa: E402
from podium.training.feeding import build_engine, samples_of_updates  # noqa: E402

_COPIES = ("_to_copy", "copy_")
#: take all their tensors on the device: the others may also take single numbers of the host
_STRICT = ("_fused_", "_foreach_norm")


class Mixed(RuntimeError):
    """Tensors of two devices in one operator, which has no form for that."""


class Waited(RuntimeError):
    """An operator whose result the host has to know before it can go on."""


class FakeDevice(FakeTensorMode):
    """Fake tensors on the device beside real ones on the host. Notes where the host would wait for the device, and
    refuses what torch's fake tensors let pass: tensors of the host with more than a number, but in copies."""

    #: torch must not open the device, which has no memory
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._inside = False
        self.waits: dict[str, int] = {}
        self.operators: dict[str, int] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = arg_tree_leaves(*args, **kwargs)
        if not any(map(_of_device, leaves)):
            return func(*args, **kwargs)
        if not self._inside:
            self._look(str(func.overloadpacket).rpartition(".")[2], args, kwargs, leaves)
        outermost, self._inside = not self._inside, True
        try:
            return super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Waited(f"the host waits for {error} in {_place()}") from error
        finally:
            self._inside = not outermost

    def _look(self, name: str, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        """Check an operator that is called from outside, not by another one."""
        self.operators[name] = self.operators.get(name, 0) + 1
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hosts = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if name in _COPIES:
            into = args[0] if name == "copy_" else kwargs.get("device") or args[0].device
            if torch.device(getattr(into, "device", into)).type == "cpu":
                self._waited("copy to the host")
            elif hosts and not kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]):
                self._waited("copy from the host")
        elif any(tensor.dim() or name.startswith(_STRICT) for tensor in hosts):
            raise Mixed(f"tensors of two devices meet in {name}: {[(t.device.type, list(t.shape)) for t in tensors]}")

    def _waited(self, what: str) -> None:
        key = f"{what} in {_place()}"
        self.waits[key] = self.waits.get(key, 0) + 1


def _of_device(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")


_PACKAGE = f"{Path(devices.__file__).parents[1]}/"


def _place() -> str:
    frame = sys._getframe()
    while frame := frame.f_back:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):  # not by the word alone: checkouts are called podium, too
            return f"{name.removeprefix(_PACKAGE)} {frame.f_code.co_name}"
    return "elsewhere"


def pretend_that_cuda_is_there() -> None:
    """Answer for the parts of torch.cuda that this torch was built without, as a device of recent years does."""
    about = SimpleNamespace(name="Fake", major=9, minor=0, multi_processor_count=100, total_memory=1 << 36)
    answers: dict[str, Callable] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "manual_seed": lambda seed: None,
        "get_device_properties": lambda device=None: about,
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # What torch's fake tensors lack: these write into what they are given, and return nothing.
    torch.library.impl("aten::_fused_sgd_", "Meta", lambda *args, **keys: None)


#: what a loss must not do, to see that it is found
SPOILT: dict[str, Callable[[Tensor], Any]] = {
    "reads a number": lambda total: total.item(),
    "counts": lambda total: total.reshape(1).nonzero(),
    "copies": lambda total: total.cpu(),
    "sends": lambda total: torch.tensor([1.0, 2.0]).to(total.device),
    "mixes": lambda total: total * torch.ones(3),
    "nothing": lambda total: total * torch.tensor(2.0),
}


@contextmanager
def fake_from_the_move_on(mode: FakeDevice) -> Iterator[None]:
    """Enter `mode` when the new model is moved to the device: it is built on the host, with numbers."""
    move = devices.move_module

    def moved(module: torch.nn.Module, device: torch.device) -> None:
        mode.__enter__()
        move(module, device)

    build.move_module = moved
    try:
        yield
    finally:
        build.move_module = move
        mode.__exit__(None, None, None)


def update_with(training: Training, optimiser: str, mode: FakeDevice, number: int) -> dict[str, Any]:
    """Make update `number` of a training with another optimiser than it was built with."""
    mode.waits.clear()
    mode.operators.clear()
    try:
        section = training.recipe.optim.model_copy(update={"name": optimiser})
        groups = training.task.workload.param_groups(training.state.model)
        training.state.optimiser = training.parallelism.build_optimiser(section, groups)
        engine = build_engine(training)
        with samples_of_updates(training, number, number + 1) as samples:
            engine.update(number, next(samples), lr=0.01)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "waits": dict(mode.waits)}
    weights = [param for param in training.state.model.parameters() if not _of_device(param)]
    assert not weights, "weights that are not on the device"
    images = [param for param in training.state.model.parameters() if param.dim() == 4]
    last = any(not image.is_contiguous() for image in images)
    return {"waits": dict(mode.waits), "operators": sum(mode.operators.values()), "channels_last": last}


def spoilt(training: Training, what: str, mode: FakeDevice, number: int) -> dict[str, Any]:
    """Make an update with a loss that does what it must not."""
    workload = training.task.workload
    whole = type(workload).loss

    def loss(model: Any, batch: Any) -> Any:
        found = whole(workload, model, batch)
        SPOILT[what](found.sum)
        return found

    workload.loss = loss
    try:
        return update_with(training, training.recipe.optim.name, mode, number)
    finally:
        del workload.loss


def main() -> None:
    folder = Path(sys.argv[2])
    asked = json.loads((folder / "updates.json").read_text())
    pretend_that_cuda_is_there()
    answers = {}
    for name, overrides in asked["recipes"].items():
        mode = FakeDevice()
        with fake_from_the_move_on(mode):
            training = build_training(load_recipe(overrides[0], overrides[1:]))
            for number, optimiser in enumerate(asked["optimisers"]):
                answers[f"{name}/{optimiser}"] = update_with(training, optimiser, mode, number)
            for number, what in enumerate(asked["spoilt"].get(name, []), len(asked["optimisers"])):
                answers[f"{name}/{what}"] = spoilt(training, what, mode, number)
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
