"""Lanes: one training each, in two forms: for Podium as a recipe, for the others as plain PyTorch from the same parts.

The others get the workload's own module with Podium's initial weights, and its samples as float tensors in memory, in
the order in which Podium takes them. So all contenders must reach the same loss, and that is checked.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from podium.contract import Workload
from podium.data.sample_plan import train_blocks
from podium.data.source import empty_buffers
from podium.recipe.loading import Recipe, load_recipe
from podium.transforms.seeding import seed_torch
from podium.workloads.registry import workload_class

#: a plain loop's tutorial has no schedule, and torch's optimisers decay every parameter
_AS_OTHERS_DO = ("schedule.name=constant", "schedule.warmup=0", "optim.decay_all=true")
#: layer -> (channels, sizes…) of the features that reach it from a convolution
Flattened = dict[str, tuple[int, ...]]
#: the loss is compared over the samples of this many updates
_NUM_COMPARED = 4


@dataclass(frozen=True)
class Lane:
    """What all contenders train.

    The learning rate is low enough for rounding not to grow over the updates after which losses are compared: the plain
    loop with weights 1e-6 larger must end within 1e-4, and one that skips an update further away than 1e-3. The speed
    does not depend on it.
    """

    name: str
    title: str
    recipe: str
    #: overrides of the recipe; `{folder}` in them is where `make_data` writes
    overrides: tuple[str, ...]
    #: overrides that switch off randomness in training, so that losses can be compared
    not_random: tuple[str, ...]
    #: (model, then the fields of a batch by name or in order) -> mean loss over the batch, as a tutorial writes it
    mean_loss: Callable[..., Tensor]
    #: builds torch's own optimiser of the model's parameters, with the values of the recipe
    optimiser: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    #: called once per race if the recipe does not make its data itself
    make_data: Callable[[Path], None] = lambda folder: None
    #: samples as the feed delivers them -> as a tutorial has them in memory
    as_tensors: Callable[[Recipe, dict[str, NDArray]], dict[str, NDArray]] = lambda recipe, buffers: buffers
    #: fields by name -> as Hugging Face's model of the same kind names them; None: it has no such model
    for_transformers: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    #: losses are compared after this many updates
    num_compared: int = 100
    #: the fewest updates of a stretch, for every contender: where updates take seconds, the few that fit the usual
    #: stretch show little
    least_updates: int = 1
    #: whether two halves of a micro-batch train as the whole does: not where batch norm looks at all of it
    may_be_divided: bool = False
    #: the model's name in flax_side/models.py; empty: it is not written in Flax
    flax_model: str = ""
    #: where Flax, with channels last, flattens features in another order
    flattened: Flattened = field(default_factory=dict)

    @property
    def num_not_timed(self) -> int:
        """Return how many of the updates after which losses are compared are warm-up: some compile in the third, too.

        Even, as Podium's records come twice in the warm-up.
        """
        return max(4, 2 * (self.num_compared // 5))

    def all_overrides(self, folder: Path, not_random: bool) -> list[str]:
        texts = (*_AS_OTHERS_DO, *self.overrides, *(self.not_random if not_random else ()))
        return [text.replace("{folder}", str(folder)) for text in texts]

    def load(self, folder: Path, not_random: bool = False) -> Recipe:
        return load_recipe(self.recipe, self.all_overrides(folder, not_random))


class Order(Sampler[int]):
    """Sample numbers in a given order."""

    def __init__(self, samples: list[int]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)


@dataclass
class Task:
    """A lane as plain PyTorch sees it."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    mean_loss: Callable[..., Tensor]
    #: tuples of the fields, in the order of `fields`
    dataset: TensorDataset
    fields: tuple[str, ...]
    order: Order
    #: samples of one update
    batch_size: int

    def loader(self, num_workers: int = 0) -> DataLoader[Any]:
        """Return a loader of all the task's samples in one pass, so that loader workers do not restart every epoch."""
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=self.order, num_workers=num_workers)

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss over the samples of the first updates, in evaluation mode."""
        model.eval()
        numbers = torch.tensor(list(self.order)[: _NUM_COMPARED * self.batch_size])
        with torch.inference_mode():
            batches = (self.dataset[chosen] for chosen in numbers.split(self.batch_size))
            return float(torch.stack([self.mean_loss(model, *batch).double() for batch in batches]).mean())


def build_workload(recipe: Recipe) -> Workload:
    workload: Workload = workload_class(recipe.workload.name)(recipe.workload.model, recipe.workload.data)
    return workload


def build_model(recipe: Recipe, workload: Workload) -> nn.Module:
    """Build the workload's module with the weights that a run of Podium starts from.

    Not by `podium.training.build`: what Podium sets up for its own speed (such as threads) must not affect the others.
    """
    seed_torch(torch.device("cpu"), "weights", recipe.seed)
    return workload.build_model().train()


def build_task(lane: Lane, recipe: Recipe, num_updates: int) -> Task:
    """Build the task, with everything in memory for this many updates."""
    assert recipe.batch.num_accumulation == 1, "the contenders know nothing of accumulation yet"
    workload = build_workload(recipe)
    source = workload.source("train")
    buffers = empty_buffers(source.fields, len(source))
    for rows in np.array_split(np.arange(len(source)), max(1, len(source) // 1024)):
        source.gather(rows, {name: buffer[rows[0] : rows[-1] + 1] for name, buffer in buffers.items()})
    buffers = lane.as_tensors(recipe, buffers)
    blocks = train_blocks(
        seed=recipe.seed,
        num_samples=len(source),
        batch=recipe.batch,
        replicas=range(recipe.batch.num_replicas),
        first_update=0,
        last_update=num_updates,
        updates_per_block=len(source) // recipe.batch.global_batch,
    )
    model = build_model(recipe, workload)
    return Task(
        model,
        lane.optimiser(model.parameters()),
        lane.mean_loss,
        TensorDataset(*(torch.from_numpy(buffer) for buffer in buffers.values())),
        tuple(buffers),
        Order(np.concatenate([wanted.samples for wanted in blocks]).tolist()),
        recipe.batch.global_batch,
    )
