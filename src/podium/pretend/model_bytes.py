"""What the model of a recipe takes on each device of a pod, found without its memory: on torch's fake tensors.

    peak = weights + gradients + optimiser state + sums + max(activations, step)

    sums          of gradients of other replicas on the same instance, and those that are sent to others
    activations   what autograd keeps of a micro-batch, for as many as are in flight, and of the loss of one; with
                  recomputation the inputs of all blocks, and the inside of one
    step          copies in single precision of half-precision weights; what LAMB computes before it is scaled

It is a formula, not a measurement: left out are samples, what operators use while they run, the allocator's blocks, the
libraries, and copies for checkpoints, which are the host's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from podium.contract import Workload
from podium.distributed.pipeline.block_probe import BlockFacts, FixedOutput, SavedBytes, probe_blocks
from podium.distributed.pipeline.partition import Split, layers_of, split_blocks
from podium.distributed.pipeline.schedule import max_in_flight
from podium.kernels import registry
from podium.layers.norm import inside
from podium.optim.optimisers import freeze, grouped_names, num_slots
from podium.recipe.loading import Recipe
from podium.replica_tree import deal, subtrees
from podium.training.memory import Alone
from podium.transforms.precision import apply_precision, cast_outputs

_SINGLE_BYTES = 4


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of one instance of a pod, and the part of an update's multiplications that it has."""

    weights: int
    gradients: int
    optimiser: int
    sums: int
    activations: int
    step: int
    work: float

    @property
    def peak(self) -> int:
        kept = self.weights + self.gradients + self.optimiser + self.sums
        return kept + max(self.activations, self.step)


@dataclass(frozen=True)
class Anatomy:
    """The model of a recipe as its pod would have it."""

    num_params: int
    num_trained: int
    split: Split
    #: by stage: that of the instance which carries most replicas
    devices: list[DeviceBytes]
    in_flight: int


def anatomy(recipe: Recipe, workload: Workload, num_instances: int, own_class: Any = None) -> Anatomy:
    """Build the model without its memory and run a micro-batch through it; raise UserError where it cannot be cut, or
    its parameters cannot be grouped, as the recipe says. `own_class`: the user's optimiser, if it is one."""
    num_stages = recipe.parallel.num_stages
    registry.use("off")  # kernels read memory, of which there is none
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = workload.build_model().train()
        freeze(model, recipe.optim.freeze)
        named = workload.stages(model)
        names, blocks = [name for name, _ in named], [block for _, block in named]
        layers = layers_of(blocks)
        apply_precision(recipe.precision, model)
        with inside(Alone()):
            _, facts = probe_blocks(workload, blocks, recipe.batch.micro_batch, recipe.precision, torch.device("cpu"))
        output = [spec.from_message(spec.empty(recipe.batch.micro_batch, "cpu")) for spec in facts[-1].outputs]
        loss_bytes = _loss_bytes(recipe, workload, output)
        split = split_blocks(names, layers, recipe.parallel.stages, [float(fact.products) for fact in facts])
        in_flight = max_in_flight(recipe.parallel.schedule, num_stages, recipe.batch.num_accumulation)
        groups = _groups(recipe, workload, model)
        sharing = _Sharing(recipe, num_instances // num_stages, num_slots(recipe.optim, own_class))
        devices = []
        for stage in range(num_stages):
            own = split.blocks_of(stage)
            part = model if num_stages == 1 else nn.ModuleList(blocks[block] for block in own)
            activations = in_flight * _activations([facts[block] for block in own], recipe)
            activations += loss_bytes if len(blocks) - 1 in own else 0
            work = sum(facts[block].products for block in own) / max(1, sum(fact.products for fact in facts))
            devices.append(_device_bytes(part, groups, activations, work, sharing))
        sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    num_trained = sum(size for size, trained in sizes if trained)
    return Anatomy(sum(size for size, _ in sizes), num_trained, split, devices, in_flight)


class _Sharing:
    """How replicas and state are divided between the instances of one stage."""

    def __init__(self, recipe: Recipe, num_blocks: int, num_slots: int) -> None:
        num_replicas = recipe.batch.num_replicas
        most = max(deal(num_replicas, num_blocks), key=len)
        sent = len(subtrees(most, num_replicas)) if num_blocks > 1 else 0
        shard = recipe.parallel.shard
        #: sets of gradients beside those of the replica that is running, and what an instance holds of each kind
        self.num_sums = math.ceil(math.log2(len(most))) + (sent if shard != "parameters" else 0)
        self.of_weights = num_blocks if shard == "parameters" else 1
        self.of_state = num_blocks if shard != "none" else 1
        self.num_slots, self.optimiser = num_slots, recipe.optim.name


def _groups(recipe: Recipe, workload: Workload, model: nn.Module) -> list[set[nn.Parameter]]:
    """Return the trained parameters, those together that are stepped together."""
    named = dict(model.named_parameters())
    alike = grouped_names(recipe.optim, model, workload.param_groups(model)).values()
    return [{named[name] for name in names} for names in alike]


def _device_bytes(
    part: nn.Module, groups: list[set[nn.Parameter]], activations: int, work: float, sharing: _Sharing
) -> DeviceBytes:
    params = set(part.parameters())
    trained = [group & params for group in groups]
    gradients = sum(_bytes(group) for group in trained)
    weights = _bytes(params) + _bytes(part.buffers())
    return DeviceBytes(
        weights=weights // sharing.of_weights,
        gradients=gradients // sharing.of_weights,
        optimiser=gradients * sharing.num_slots // sharing.of_state,
        sums=gradients * sharing.num_sums // sharing.of_weights,
        activations=activations,
        step=max((_step_bytes(group, sharing) for group in trained if group), default=0) // sharing.of_state,
        work=work,
    )


def _step_bytes(group: set[nn.Parameter], sharing: _Sharing) -> int:
    """Return what a step of one group needs while it lasts."""
    numbers = sum(param.numel() for param in group)
    copies = 2 + sharing.num_slots if next(iter(group)).dtype.itemsize < _SINGLE_BYTES else 0
    return _SINGLE_BYTES * numbers * (copies + (sharing.optimiser == "lamb"))


def _activations(facts: Sequence[BlockFacts], recipe: Recipe) -> int:
    """Return what is kept of one micro-batch for the backward pass of these blocks."""
    inner = [fact.activation_bytes for fact in facts]
    if not recipe.parallel.recompute:
        return sum(inner)
    passed_on = sum(math.prod(spec.shape) * spec.dtype.itemsize for fact in facts for spec in fact.outputs)
    return recipe.batch.micro_batch * passed_on + max(inner, default=0)


def _loss_bytes(recipe: Recipe, workload: Workload, output: list[Tensor]) -> int:
    """Return what the loss keeps of the model's output, which has no memory; its targets have values."""
    saved = SavedBytes([])
    given = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in output]
    with unset_fake_temporarily(), torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        converted = cast_outputs(recipe.precision, given[0] if len(given) == 1 else tuple(given))
        workload.loss(FixedOutput(converted, training=True), workload.example(recipe.batch.micro_batch))
    return saved.num_bytes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
