"""Faster forms of plain modules, put on a model from outside. Called by `prepare.py` before the optimiser is made.

Models stay plain: their modules change class in place, to subclasses defined here, so parameters keep their names and
shapes and a checkpoint holds the same whatever the layout. Strides of convolution weights do change.

    n samples, c channels, h × w positions, k the kernel's area
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.engine import transformers, volumes, winograd
from podium.engine.conditions import has_hooks, is_foreign, leave_to_torch
from podium.engine.conv_pool import ConvPool, window_of
from podium.engine.norm_relu import NormRelu, fits
from podium.layers.residual import ResidualBlock
from podium.layers.transformer import FewRows

Layout = Literal["default", "channels_last"]
#: A weight gradient as one matrix product wants the k · c inputs of every position side by side in memory; within these
#: bounds the copy costs less than it saves (30 to 90 channels, k = 4, 76,032 positions, one AVX2 core: 28 ms, not 60).
_LEAST_CHANNELS = 16
_MOST_PATCH_BYTES = 64 << 20
#: The library's own kernels are made for whole vectors of channels, and better then (32 to 32 channels, 3 × 3, 32,768
#: positions, two cores: 7.0 ms, not 13.5); of many channels only where no gradient of the weight is asked for (128 to
#: 128 with stride 2, 6,272 positions: 42 ms, here 22; 512 to 512, 392 positions: 24, here 18).
_VECTOR, _MANY_CHANNELS = 8, 128


def resolve_layout(choice: Literal["auto"] | Layout, device: torch.device) -> Layout:
    """`auto`: what is fastest on the kind of device, whatever the model. It is part of the numerics."""
    if choice != "auto":
        return choice
    return "channels_last" if device.type == "cpu" else "default"


def apply_layout(model: nn.Module, layout: Layout) -> None:
    """Puts the convolutions of `model` and their pools on a memory layout; transformers' layers, which
    have but one, become faster with the same choice. Others stay as they are."""
    if layout == "default":
        return
    for module in model.modules():
        if isinstance(module, FewRows):
            module.only_needed = True
        faster = _FASTER.get(type(module)) or transformers.faster(module)
        if faster is None:
            continue
        module.__class__ = faster
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            module.weight.data = _channels_innermost(module.weight.data)
        elif isinstance(module, nn.Conv3d | nn.ConvTranspose3d) and _is_halving(module):
            module.weight.data = volumes.kernel_outermost(module.weight.data)


def _channels_innermost(weight: Tensor) -> Tensor:
    """(out, in, …) with the same values, the elements of `in` side by side in memory."""
    return weight.movedim(1, -1).contiguous().movedim(-1, 1)


def _channels_last(tensor: Tensor) -> Tensor:
    """(n, c, h, w) with strides that say channels-last.

    torch takes a tensor of one channel or one position for both layouts at once, and goes by its strides.
    """
    _, c, h, w = tensor.shape
    stride = (c * h * w, 1, c * w, c)
    if tensor.stride() == stride:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)


class _Convolution(torch.autograd.Function):
    """torch's convolution of channels-last images, with gradients of weight and bias of our own.

    The library's are slow for few channels on AVX2; as a matrix product they run at its full rate.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.geometry = stride, padding, dilation, groups
        return torch.conv2d(image, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        wants_image, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = _channels_last(grad)
        rows = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])  # (n · h · w, out), no copy
        of_bias = rows.sum(0) if wants_bias else None
        of_weight = None
        if wants_weight and groups == 1 and set(dilation) == {1}:
            of_weight = _weight_gradient(image, weight, rows, grad.shape[2:], stride, padding)
        by_library = [wants_image, wants_weight and of_weight is None, False]
        of_image = None
        if any(by_library):
            of_image, weight_too, _ = torch.ops.aten.convolution_backward(
                grad, image, weight, None, stride, padding, dilation, False, [0, 0], groups, by_library
            )
            of_weight = weight_too if of_weight is None else of_weight
        return of_image, of_weight, of_bias, None, None, None, None


def _weight_gradient(
    image: Tensor, weight: Tensor, rows: Tensor, out_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """As one matrix product, (out, n·h·w) × (n·h·w, k·c); None where the library's own way is better."""
    num_out, c, *kernel = weight.shape
    num_patch = kernel[0] * kernel[1] * c
    if c < _LEAST_CHANNELS or len(rows) * num_patch * rows.element_size() > _MOST_PATCH_BYTES:
        return None
    if any(padding):
        image = _channels_last(F.pad(image, (padding[1], padding[1], padding[0], padding[0])))
    of_sample, _, of_row, of_column = image.stride()
    patches = image.as_strided(
        (len(image), *out_size, kernel[0], kernel[1] * c),
        (of_sample, of_row * stride[0], of_column * stride[1], of_row, 1),
    ).reshape(-1, num_patch)
    return (rows.t() @ patches).view(num_out, *kernel, c).permute(0, 3, 1, 2)


def _convolved(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    image = _channels_last(image)
    if leave_to_torch(image):
        return torch.conv2d(image, weight, bias, stride, padding, dilation, groups)
    result: Tensor
    plain = groups == 1 and set(stride) == set(dilation) == {1}
    if plain and winograd.fits(image, weight, padding):
        result = winograd.Convolution.apply(image, weight, bias, tuple(padding))
    elif _library_is_better(weight, groups):
        result = torch.conv2d(image, weight, bias, stride, padding, dilation, groups)
    else:
        result = _Convolution.apply(image, weight, bias, stride, padding, dilation, groups)
    return result


def _library_is_better(weight: Tensor, groups: int) -> bool:
    num_out, c, *kernel = weight.shape
    if groups > 1 or c < _LEAST_CHANNELS:
        return True
    single = kernel[0] * kernel[1] == 1  # a matrix product without any copy
    return not single and num_out % _VECTOR == 0 and c % _VECTOR == 0 and c < _MANY_CHANNELS


class _Conv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or input.dim() != 4:
            return super().forward(input)
        return _convolved(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Conv1d(nn.Conv1d):
    """As a 2-D one of height 1: twice as fast, for the library has channels-last kernels for these only."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or input.dim() != 3:
            return super().forward(input)
        image, weight = input.unsqueeze(2), self.weight.unsqueeze(2)
        return _convolved(
            image, weight, self.bias, (1, *self.stride), (0, *self.padding), (1, *self.dilation), self.groups
        ).squeeze(2)


class _MaxPool1d(nn.MaxPool1d):
    def forward(self, input: Tensor) -> Any:
        if self.return_indices or input.dim() != 3:
            return super().forward(input)
        (size,), (stride,), (padding,), (dilation,) = map(
            _single, (self.kernel_size, self.stride, self.padding, self.dilation)
        )
        pooled = F.max_pool2d(input.unsqueeze(2), (1, size), (1, stride), (0, padding), (1, dilation), self.ceil_mode)
        return pooled.squeeze(2)


class _Conv3d(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        if not _goes_by_products(self, input) or min(input.shape[2:]) < 2:
            return super().forward(input)
        result: Tensor = volumes.Halving.apply(input, self.weight, self.bias)
        return result


class _ConvTranspose3d(nn.ConvTranspose3d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not _goes_by_products(self, input) or output_size is not None:
            return super().forward(input, output_size)
        size = tuple(2 * axis + more for axis, more in zip(input.shape[2:], self.output_padding, strict=True))
        result: Tensor = volumes.Doubling.apply(input, self.weight, self.bias, size)
        return result


def _is_halving(conv: nn.Conv3d | nn.ConvTranspose3d) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and conv.padding_mode == "zeros"
    return plain and (conv.kernel_size, conv.stride, conv.padding) == (volumes.KERNEL, volumes.STRIDE, volumes.PADDING)


def _goes_by_products(conv: nn.Conv3d | nn.ConvTranspose3d, input: Tensor) -> bool:
    if not _is_halving(conv) or is_foreign(input) or is_foreign(conv.weight):
        return False
    return input.dim() == 5 and input.shape[1] == conv.in_channels and input.numel() > 0


class _Sequential(nn.Sequential):
    """Runs modules that follow one another as one operator, where it can: a convolution, its pool and a ReLU; a batch
    norm and a ReLU."""

    _planned: tuple[nn.Module, ...] = ()
    _steps: "list[_Step]"

    def forward(self, input: Tensor) -> Tensor:
        if leave_to_torch(input):
            return super().forward(input)
        for step in self.steps():
            input = step(input)
        return input

    def steps(self) -> "list[_Step]":
        """The modules in order, or what does for some of them."""
        modules = tuple(self._modules.values())
        if modules != self._planned:
            self._planned, self._steps = modules, _steps(modules)
        return self._steps


class _Block:
    """A convolution, its pool and perhaps a ReLU."""

    def __init__(
        self, conv: "_Conv1d | _Conv2d", pool: nn.Module, relu: nn.ReLU | None, window: tuple[int, ...]
    ) -> None:
        self._conv, self._relu, self._window = conv, relu is not None, window
        self._modules = (conv, pool) if relu is None else (conv, pool, relu)
        self.num_modules = len(self._modules)

    def __call__(self, input: Tensor) -> Tensor:
        conv = self._conv
        sizes = zip(input.shape[2:], conv.kernel_size, self._window, strict=False)
        fits = input.dim() == 2 + len(self._window) and all(size - k + 1 >= p for size, k, p in sizes)
        if not fits or any(has_hooks(module) for module in self._modules):
            for module in self._modules:
                input = module(input)
            return input
        if len(self._window) == 2:
            return self._run(input, conv.weight, self._window)
        return self._run(input.unsqueeze(2), conv.weight.unsqueeze(2), (1, *self._window)).squeeze(2)

    def _run(self, image: Tensor, weight: Tensor, window: tuple[int, ...]) -> Tensor:
        result: Tensor = ConvPool.apply(_channels_last(image), weight, self._conv.bias, window, self._relu)
        return result


class _NormThenRelu:
    """A batch norm and a ReLU."""

    num_modules = 2

    def __init__(self, norm: nn.BatchNorm2d, relu: nn.ReLU) -> None:
        self._norm, self._relu = norm, relu

    def __call__(self, input: Tensor) -> Tensor:
        if has_hooks(self._norm) or has_hooks(self._relu) or not fits(self._norm, input):
            return self._relu(self._norm(input))
        norm = self._norm
        result: Tensor = NormRelu.apply(_channels_last(input), norm.weight, norm.bias, None, norm)
        return result


class _ResidualBlock(ResidualBlock):
    """Runs the last batch norm of the branch, the sum and the ReLU as one operator, where it can."""

    def forward(self, x: Tensor) -> Tensor:
        branch, norm = self.branch, self.branch[-1]
        if leave_to_torch(x) or not isinstance(branch, _Sequential) or has_hooks(branch) or has_hooks(norm):
            return super().forward(x)
        *steps, last = branch.steps()
        if last is not norm or not isinstance(norm, nn.BatchNorm2d):
            return super().forward(x)
        before = x
        for step in steps:
            before = step(before)
        if not fits(norm, before):
            return F.relu(norm(before) + self.shortcut(x), inplace=True)
        added = _channels_last(self.shortcut(x))
        result: Tensor = NormRelu.apply(_channels_last(before), norm.weight, norm.bias, added, norm)
        return result


def _steps(modules: Sequence[nn.Module]) -> "list[_Step]":
    """The modules in order, blocks put together."""
    steps: list[_Step] = []
    at = 0
    while at < len(modules):
        block = _block(modules[at : at + 3]) or _normed(modules[at : at + 2])
        steps.append(block or modules[at])
        at += block.num_modules if block else 1
    return steps


def _normed(modules: Sequence[nn.Module]) -> _NormThenRelu | None:
    if len(modules) == 2 and type(modules[0]) is nn.BatchNorm2d and type(modules[1]) is nn.ReLU:
        return _NormThenRelu(modules[0], modules[1])
    return None


_Step = nn.Module | _Block | _NormThenRelu


def _block(modules: Sequence[nn.Module]) -> _Block | None:
    """Made of the first two or three modules, if they are such a block."""
    if len(modules) < 2:
        return None
    conv, pool, *after = modules
    if isinstance(conv, _Conv1d):
        window = window_of(conv, pool) if isinstance(pool, nn.MaxPool1d) else None
    elif isinstance(conv, _Conv2d):
        window = window_of(conv, pool) if isinstance(pool, nn.MaxPool2d) else None
    else:
        return None
    if window is None:
        return None
    return _Block(conv, pool, after[0] if after and type(after[0]) is nn.ReLU else None, window)


def _single(value: int | tuple[int, ...]) -> tuple[int]:
    return (value,) if isinstance(value, int) else (value[0],)


_FASTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: _Conv1d,
    nn.Conv2d: _Conv2d,
    nn.Conv3d: _Conv3d,
    nn.ConvTranspose3d: _ConvTranspose3d,
    nn.MaxPool1d: _MaxPool1d,
    nn.Sequential: _Sequential,
    ResidualBlock: _ResidualBlock,
}
