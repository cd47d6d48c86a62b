"""A convolution, the max-pool after it and a ReLU as one operator, made of matrix products. Used by `operators.py`.

Beside fewer steps for autograd, it saves work: positions that the pool never looks at are not computed, and what the
forward pass has laid out for its products serves the backward pass again.

    image (n, c, h, w), kernel a × b, o outputs; oh × ow positions are pooled
    Positions are kept in the order (row, sample, column), so that a kernel's row i reads the same rows of `inputs`
    as its row 0, further down: `inputs` holds b · c numbers for each position instead of a · b · c.
"""

from typing import Any

import torch
from torch import Tensor, nn

_pool = torch.ops.aten.max_pool2d_with_indices.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default
_relu_backward = torch.ops.aten.threshold_backward.grad_input
#: with so few, all a · b · c inputs are laid out, one after the other, with ones for the bias below them
FEW_CHANNELS = 8


class ConvPool(torch.autograd.Function):
    """relu(max_pool(conv(image))), stride 1 and no padding, the pool's windows side by side."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[int, int], relu: bool
    ) -> Tensor:
        """The image is channels-last, or has few channels and any layout, and then wants no gradient."""
        n, c, h, w = image.shape
        o, _, a, b = weight.shape
        ph, pw = (h - a + 1) // window[0], (w - b + 1) // window[1]
        oh, ow = ph * window[0], pw * window[1]
        of_sample, of_channel, of_row, of_column = image.stride()
        num_positions = oh * n * ow
        taps = weight.permute(0, 2, 3, 1)
        if c <= FEW_CHANNELS:
            inputs = image.new_empty(a * b * c + 1, num_positions)
            inputs[:-1].view(a, b, c, oh, n, ow).copy_(
                image.as_strided(
                    (a, b, c, oh, n, ow),
                    (of_row, of_column, of_channel, of_row, of_sample, of_column),
                    image.storage_offset(),
                )
            )
            inputs[-1].fill_(1.0)
            result = _product(bias, inputs[:-1].t(), taps.reshape(o, -1).t())
        else:
            inputs = image.as_strided(
                (oh + a - 1, n, ow, b * c), (of_row, of_sample, of_column, 1), image.storage_offset()
            ).reshape(-1, b * c)
            rows = taps.reshape(o, a, b * c)
            result = _product(bias, inputs[:num_positions], rows[:, 0].t())
            for i in range(1, a):
                result.addmm_(inputs[i * n * ow :][:num_positions], rows[:, i].t())
        # For the pool, one image that is n times as wide. Strides tell torch which layout it is in.
        wide = result.as_strided((1, o, oh, n * ow), (result.numel(), 1, n * ow * o, o))
        pooled, indices = _pool(wide, window, window)
        if relu:
            pooled.relu_()
        ctx.save_for_backward(image, weight, inputs, wide, pooled, indices)
        ctx.window, ctx.relu, ctx.has_bias = window, relu, bias is not None
        return pooled.as_strided((n, o, ph, pw), _by_sample(o, n, pw))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, weight, inputs, wide, pooled, indices = ctx.saved_tensors
        n, c = image.shape[:2]
        o, _, a, b = weight.shape
        ph, pw = grad.shape[2:]
        oh, ow = ph * ctx.window[0], pw * ctx.window[1]
        num_positions = oh * n * ow

        of_pooled = torch.empty_like(pooled)
        by_sample = of_pooled.as_strided(grad.shape, _by_sample(o, n, pw))
        if ctx.relu:
            _relu_backward(grad, pooled.as_strided(grad.shape, by_sample.stride()), 0.0, grad_input=by_sample)
        else:
            by_sample.copy_(grad)
        of_wide = _pool_backward(of_pooled, wide, ctx.window, ctx.window, (0, 0), (1, 1), False, indices)
        of_result = of_wide.as_strided((num_positions, o), (o, 1))

        of_bias: Tensor | None
        if c <= FEW_CHANNELS:
            of_both = torch.mm(inputs, of_result)
            # laid out as the weight is, or the optimiser would have to do it
            of_weight = torch.empty_like(weight)
            of_weight.permute(0, 2, 3, 1).copy_(of_both[:-1].view(a, b, c, o).permute(3, 0, 1, 2))
            of_bias = of_both[-1]
        else:
            of_rows = weight.new_empty(o, a, b * c)
            for i in range(a):
                torch.mm(of_result.t(), inputs[i * n * ow :][:num_positions], out=of_rows[:, i])
            of_weight = of_rows.view(o, a, b, c).permute(0, 3, 1, 2)
            of_bias = of_result.sum(0)
        of_image = _image_gradient(image, weight, of_result, oh, ow) if ctx.needs_input_grad[0] else None
        return of_image, of_weight, of_bias if ctx.has_bias else None, None, None


def _image_gradient(image: Tensor, weight: Tensor, of_result: Tensor, oh: int, ow: int) -> Tensor:
    """Back the way of `inputs`: kernel rows by products, its columns by shifted additions."""
    n, c = image.shape[:2]
    o, _, a, b = weight.shape
    num_positions = oh * n * ow
    rows = weight.permute(0, 2, 3, 1).reshape(o, a, b * c)
    of_inputs = of_result.new_empty((oh + a - 1) * n * ow, b * c)
    torch.mm(of_result, rows[:, 0], out=of_inputs[:num_positions])
    of_inputs[num_positions:].zero_()
    for i in range(1, a):
        of_inputs[i * n * ow :][:num_positions].addmm_(of_result, rows[:, i])
    columns = of_inputs.view(oh + a - 1, n, ow, b, c)
    of_image = torch.zeros_like(image)
    target = of_image.permute(2, 0, 3, 1)[: oh + a - 1]
    for j in range(b):
        target[:, :, j : j + ow].add_(columns[:, :, :, j])
    return of_image


def _product(bias: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _by_sample(num_out: int, n: int, pw: int) -> tuple[int, int, int, int]:
    """Strides of (n, o, ph, pw) in memory that is in the order (ph, n, pw, o)."""
    return pw * num_out, 1, n * pw * num_out, num_out


def window_of(conv: nn.Conv2d, pool: nn.MaxPool2d) -> tuple[int, int] | None:
    """The pool's window where `ConvPool` can do what the two modules do; else None."""
    window, stride, padding, dilation = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    plain_pool = window == stride and (padding, dilation) == ((0, 0), (1, 1))
    plain_pool = plain_pool and not pool.ceil_mode and not pool.return_indices
    plain_conv = (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), (0, 0), (1, 1), 1)
    return (window[0], window[1]) if plain_pool and plain_conv else None
