"""The U-Net: predicts the fields of the gas from those of dark matter. A plain single-device module.

Shapes of the full model for n crops of 64³; the side halves with every block down and doubles with every block up:

    (n, 4, 64³) -> down 1 (n, 64, 32³) -> 2 (n, 128, 16³) -> 3 (n, 256, 8³) -> 4 (n, 512, 4³) -> 5 (n, 512, 2³)
                -> down 6 (n, 512, 1³)
                -> up 6 (n, 512, 2³) -> up 5 (n, 512, 4³) -> 4 (n, 256, 8³) -> 3 (n, 128, 16³) -> 2 (n, 64, 32³)
                -> up 1 (n, 5, 64³)

A block down is a convolution and LeakyReLU, with slope 0.01 as published; a block up is a transposed convolution and
ReLU, in the last one tanh. The output of a block down, after its activation, goes to the next block and, concatenated
before the channels that come from below, to the block up of its own scale. There is no normalisation and no dropout.
"""

from torch import Tensor, cat, nn

from podium.errors import UserError
from podium.workloads.cosmology.section import CosmologyModel

#: density and three velocities of the dark matter; density, temperature and three velocities of the gas
NUM_INPUTS, NUM_OUTPUTS = 4, 5
_KERNEL, _STRIDE, _PADDING = 4, 2, 1
_INIT_STD = 0.02


class Block(nn.Module):
    """One scale, down or up. Takes and returns a stack of tensors, so that a pipeline can split after any block: at the
    bottom are the outputs of blocks down that blocks up still need, on top is the input of the next block."""


class Down(Block):
    """Halves the side. `keep`: its input is needed by a block up, and stays on the stack."""

    def __init__(self, num_in: int, num_out: int, slope: float, *, keep: bool) -> None:
        super().__init__()
        self.conv = nn.Conv3d(num_in, num_out, _KERNEL, _STRIDE, _PADDING)
        self.activation = nn.LeakyReLU(slope, inplace=True)
        self._keep = keep

    def forward(self, *stack: Tensor) -> tuple[Tensor, ...]:
        result = self.activation(self.conv(stack[-1]))
        return (*stack, result) if self._keep else (*stack[:-1], result)


class Up(Block):
    """Doubles the side. `join`: the output of the block down of its scale is concatenated with its input."""

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
    """Maps (n, 4, crop, crop, crop) to (n, 5, crop, crop, crop), with values between -1 and 1."""

    def __init__(self, section: CosmologyModel) -> None:
        super().__init__()
        channels, last = section.channels, section.num_scales - 1
        self.down = nn.ModuleList(
            Down(channels[scale - 1] if scale else NUM_INPUTS, channels[scale], section.slope, keep=scale > 0)
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
        """Return all blocks in order, numbered by scale from the outermost."""
        down = [(f"down {scale}", block) for scale, block in enumerate(self.down, start=1)]
        up = [(f"up {scale}", block) for scale, block in zip(range(len(self.up), 0, -1), self.up, strict=True)]
        return [*down, *up]


def build_network(section: CosmologyModel, crop: int) -> UNet:
    """Build the model for cubes of `crop` cells a side; its weights come from torch's default generator."""
    least = 2**section.num_scales
    if crop % least:
        raise UserError(
            f"workload.data.crop = {crop}: expected a multiple of {least}"
            + (", or of 32 with workload.model.full_scale = false" if section.full_scale else "")
            + f", as the U-Net halves it {section.num_scales} times"
        )
    return UNet(section)
