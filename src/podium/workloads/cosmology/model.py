"""The U-Net: from the fields of dark matter to those of the gas. A plain single-device module. Owns `workload.model`.

Shapes of the full model for crops of 64³, n samples; a side halves with every block down and doubles with every one up:

    (n, 4, 64³) -> down 1 (n, 64, 32³) -> 2 (n, 128, 16³) -> 3 (n, 256, 8³) -> 4 (n, 512, 4³) -> 5 (n, 512, 2³)
                -> down 6 (n, 512, 1³)
                -> up 6 (n, 512, 2³) -> up 5 (n, 512, 4³) -> 4 (n, 256, 8³) -> 3 (n, 128, 16³) -> 2 (n, 64, 32³)
                -> up 1 (n, 5, 64³)

Where activations stand: a block down is convolution, LeakyReLU with slope 0.2; a block up is transposed convolution,
ReLU, and the last one tanh. What a block down gives, after its activation, goes to the next one and, joined before the
channels of what comes from below, into the block up of its own scale. There is no normalisation and no dropout.
"""

from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, cat, nn

from podium.errors import UserError
from podium.schema import Section

#: density and three velocities of the dark matter; density, temperature and three velocities of the gas
NUM_INPUTS, NUM_OUTPUTS = 4, 5
#: channels of each block down, in widths
_MULTIPLES = (1, 2, 4, 8, 8, 8)
_KERNEL, _STRIDE, _PADDING = 4, 2, 1
_SLOPE = 0.2
_INIT_STD = 0.02


class CosmologyModel(Section):
    """`workload.model` of cosmology. The defaults are the published model."""

    #: channels of the first block; the others have 2, 4, 8, 8 and 8 times as many
    width: PositiveInt = 64
    #: six scales; false: five, without the innermost one
    full_scale: bool = True
    #: the loss is the L1 of the scaled fields, and so many times the L1 of the density taken back to real units
    lambda_rho: NonNegativeFloat = 0.0

    @property
    def num_scales(self) -> int:
        return len(_MULTIPLES) if self.full_scale else len(_MULTIPLES) - 1

    @property
    def channels(self) -> tuple[int, ...]:
        """Of what every block down gives, from the outermost."""
        return tuple(self.width * multiple for multiple in _MULTIPLES[: self.num_scales])


class Block(nn.Module):
    """One scale, down or up. Takes and gives a stack of tensors, so that a pipeline can cut after any of them: below
    are the outputs of blocks down that a block up still waits for, on top is what the next block works on."""


class Down(Block):
    """Halves the side. `keep`: what it works on is an output that a block up needs, and stays on the stack."""

    def __init__(self, num_in: int, num_out: int, *, keep: bool) -> None:
        super().__init__()
        self.conv = nn.Conv3d(num_in, num_out, _KERNEL, _STRIDE, _PADDING)
        self.activation = nn.LeakyReLU(_SLOPE, inplace=True)
        self._keep = keep

    def forward(self, *stack: Tensor) -> tuple[Tensor, ...]:
        result = self.activation(self.conv(stack[-1]))
        return (*stack, result) if self._keep else (*stack[:-1], result)


class Up(Block):
    """Doubles the side. `join`: the output of the block down of its scale is joined to what comes from below."""

    def __init__(self, num_in: int, num_out: int, activation: nn.Module, *, join: bool) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(num_in, num_out, _KERNEL, _STRIDE, _PADDING)
        self.activation = activation
        self._join = join

    def forward(self, *stack: Tensor) -> tuple[Tensor, ...]:
        if self._join:
            *below, skip, x = stack
            x = cat((skip, x), dim=1)
        else:
            *below, x = stack
        return (*below, self.activation(self.conv(x)))


class UNet(nn.Module):
    """(n, 4, crop, crop, crop) to (n, 5, crop, crop, crop), each value between -1 and 1."""

    def __init__(self, section: CosmologyModel) -> None:
        super().__init__()
        channels, last = section.channels, section.num_scales - 1
        self.down = nn.ModuleList(
            Down(channels[scale - 1] if scale else NUM_INPUTS, channels[scale], keep=scale > 0)
            for scale in range(section.num_scales)
        )
        self.up = nn.ModuleList(
            Up(
                channels[scale] if scale == last else 2 * channels[scale],
                channels[scale - 1] if scale else NUM_OUTPUTS,
                nn.ReLU(inplace=True) if scale else nn.Tanh(),
                join=scale < last,
            )
            for scale in reversed(range(section.num_scales))
        )
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                assert module.bias is not None
                nn.init.normal_(module.weight, std=_INIT_STD)
                nn.init.zeros_(module.bias)

    def forward(self, nbody: Tensor) -> Tensor:
        stack: tuple[Tensor, ...] = (nbody,)
        for block in (*self.down, *self.up):
            stack = block(*stack)
        (hydro,) = stack
        return hydro

    def stages(self) -> list[tuple[str, nn.Module]]:
        """All blocks in order, numbered by their scale from the outermost."""
        down = [(f"down {scale}", block) for scale, block in enumerate(self.down, start=1)]
        up = [(f"up {scale}", block) for scale, block in zip(range(len(self.up), 0, -1), self.up, strict=True)]
        return [*down, *up]


def build_network(section: CosmologyModel, crop: int) -> UNet:
    """The model for cubes of `crop` cells a side, its weights drawn from torch's default generator."""
    least = 2**section.num_scales
    if crop % least:
        raise UserError(
            f"`workload.data.crop` is {crop}, but the {section.num_scales} scales of the U-Net halve it "
            f"{section.num_scales} times: take a multiple of {least}"
            + (", or of 32 with `workload.model.full_scale` = false." if section.full_scale else ".")
        )
    return UNet(section)
