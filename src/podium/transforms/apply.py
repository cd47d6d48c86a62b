"""The changes made to a model from outside before it trains, and their order. Called by `training/build.py`.

    1. layout and kernels   modules of exactly a plain class become faster ones, so nothing may have changed theirs yet
    2. precision            batch norms keep statistics in single precision; the model as a whole converts
    3. recompute            blocks, whatever their class is by now, drop their inner activations and recompute them
    4. seeding              blocks draw from seeds of their own; hooks around the results of 1 to 3
    5. the trap             observes layers and changes none

Each step derives from the classes that it finds, or adds hooks that change nothing: none hides what another did. So
recompute and the trap do not change any bits, which `tests/transforms/test_bits.py` shows for every workload.
"""

from collections.abc import Sequence

import torch
from torch import nn

from podium.errors import UserError
from podium.kernels import registry
from podium.kernels.install import Layout, apply_layout
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.nan_trap import apply_trap
from podium.transforms.precision import apply_precision
from podium.transforms.recompute import apply_recompute
from podium.transforms.seeding import seed_blocks


def apply_transforms(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    layout: Layout,
    kernels: registry.Choice = "auto",
    precision: PrecisionSection,
    recompute: bool = False,
    compile: bool = False,
) -> None:
    """Change the newly built `model` in place; `blocks` are its parts as the workload's `stages` gives them."""
    if recompute and compile:
        raise UserError(
            "parallel.recompute goes with engine.compile=false: compiled code decides by itself what to keep"
        )
    registry.use(kernels)
    apply_layout(model, layout, blocks, on_cpu=device.type == "cpu")
    apply_precision(precision, model)
    if recompute:
        apply_recompute(blocks)
    if not compile:  # compiled code draws random numbers in its own way, for the model as a whole
        seed_blocks(blocks, device)
    if precision.trap:
        apply_trap(model, backward=precision.loss_scale != "auto", compiled=compile)
