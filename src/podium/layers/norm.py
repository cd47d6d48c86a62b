"""Normalisation layers, as set by the `norm` section of a model; workloads call `build_norm`.

Batch norm over a *span* normalises with the statistics of several consecutive replicas, as if their micro-batches
were one batch. The layer computes the sums of its own replica; the code that runs the replicas of a span side by side
(`distributed/lockstep.py`) provides a `Span`, whose `exchange` adds those sums in the order of the replica tree.

Per channel, over the N values of a span (x̂ = (x - mean) / √(var + eps), y = weight x̂ + bias):

    dx = weight / √(var + eps) · (dy - Σdy / N - x̂ Σ(dy x̂) / N),  dweight = Σ(dy x̂), dbias = Σdy of its own replica
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm  # base class of torch's variants and ours

from podium.errors import UserError
from podium.layers.section import NormSection

_BATCH_NORM: dict[int, type[AnyBatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Span(Protocol):
    """The replicas that share statistics, as seen by one of them."""

    def exchange(self, tensor: Tensor, num_replicas: int) -> Tensor:
        """Sum `tensor` over the aligned block of `num_replicas` replicas around this one, in tree order.

        Every replica of the block must call it with the same shape. The result is shared and must not be modified.
        """
        ...


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current_span() -> Span | None:
    """Return the span to which layers called here belong, or None."""
    return _current.get()


@contextmanager
def inside(span: Span) -> Iterator[None]:
    """Make layers called by this thread inside the `with` block belong to a replica of `span`."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def build_norm(
    section: NormSection, num_features: int, dims: Literal[1, 2, 3], eps: float = 1e-5, momentum: float = 0.1
) -> nn.Module:
    """Build the layer for features of shape (n, num_features) or (n, num_features, `dims` more sizes).

    `momentum` is the weight of the newest statistics in the running ones, unless the section has a decay.
    """
    if section.kind == "none":
        return nn.Identity()
    if section.kind == "group":
        if num_features % section.groups:
            raise UserError(
                f"workload.model.norm.groups = {section.groups}: expected a divisor of the {num_features} channels"
            )
        return nn.GroupNorm(section.groups, num_features, eps)
    if section.decay is not None:
        momentum = round(1 - section.decay, 12)  # 0.1 where the decay is 0.9, not 0.09999999999999998
    if section.span == 1:
        return _BATCH_NORM[dims](num_features, eps, momentum)
    return SpanBatchNorm(num_features, section.span, eps, momentum)


class SpanBatchNorm(AnyBatchNorm):
    """Batch norm with the statistics of `span` replicas; parameters, buffers and evaluation are as in plain batch norm.

    Channels are dimension 1; any number of dimensions may follow. Running statistics are updated from the statistics
    of the span, so all its replicas keep the same ones.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, span: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.span = span

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, span={self.span}"

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2, f"batch norm wants (n, channels, …), got {tuple(input.shape)}"

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            kind = self.running_mean.dtype  # half-precision weights keep their statistics in single precision
            weight, bias = self.weight.to(kind), self.bias.to(kind)
            return F.batch_norm(input, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
        span = current_span()
        assert span is not None, (
            f"batch norm over a span of {self.span} replicas trains only inside the engine's lockstep: "
            "a replica alone does not know the statistics of the others"
        )
        statistics = _span_statistics(input.detach(), span, self.span)
        with torch.no_grad():
            self._track(*statistics)
        return _Normalise.apply(input, self.weight, self.bias, *statistics, self.eps, span, self.span)

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics by `momentum` towards the span's, with the unbiased variance."""
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        unbiased = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


def _span_statistics(x: Tensor, span: Span, num_replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and (biased) variance per channel and the number of values over the span, in float64.

    Each replica's variance is computed about its own mean, in the fast kernel. Only the few resulting numbers are
    combined as sums of squares, in float64, where cancellation does no harm.
    """
    num_channels = x.shape[1]
    unused = torch.zeros(num_channels, dtype=_sum_type(x), device=x.device)  # its type is that of the sums
    local_mean, local_var = torch.batch_norm_update_stats(x, unused, unused.clone(), 0.0)
    mean, var, count = local_mean.double(), local_var.double(), x.numel() // num_channels
    sums = torch.cat([mean * count, (var + mean * mean) * count, mean.new_full((1,), count)])
    sums = span.exchange(sums, num_replicas)
    total, squares, total_count = sums[:num_channels], sums[num_channels:-1], sums[-1]
    mean = total / total_count
    return mean, (squares / total_count - mean * mean).clamp_(min=0.0), total_count


class _Normalise(torch.autograd.Function):
    """y = weight x̂ + bias with given statistics; the exchange in backward accounts for their dependence on x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        span: Span,
        num_replicas: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.span, ctx.num_replicas = eps, span, num_replicas
        scale = weight.double() * torch.rsqrt(var + eps)
        return _affine(x, scale, bias.double() - mean * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        sum_type = _sum_type(x)
        # The kernel of evaluation mode: its "dweight" and "dbias" are this replica's Σ(dy x̂) and Σdy.
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, x, torch.ones_like(mean, dtype=sum_type), mean.to(sum_type), var.to(sum_type),
            None, None, False, ctx.eps, [False, True, True],
        )  # fmt: skip
        local = torch.cat([dweight.double(), dbias.double()])
        sum_dy_xhat, sum_dy = ctx.span.exchange(local, ctx.num_replicas).chunk(2)
        dx = None
        if ctx.needs_input_grad[0]:
            inv_std = torch.rsqrt(var + ctx.eps)
            scale = weight.double() * inv_std
            of_x = -scale * inv_std * sum_dy_xhat / count
            shift = -scale * sum_dy / count - mean * of_x
            shape = (1, -1, *(1,) * (x.dim() - 2))
            dx = _affine(dy, scale, shift).addcmul_(x, of_x.to(x.dtype).view(shape))
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), *(None,) * 6


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x · scale + shift per channel in one pass: batch norm's evaluation kernel, which takes half-precision x
    with single-precision numbers per channel."""
    scale, shift = scale.to(_sum_type(x)), shift.to(_sum_type(x))
    return F.batch_norm(x, torch.zeros_like(scale), torch.ones_like(scale), scale, shift, False, 0.0, 0.0)


def _sum_type(x: Tensor) -> torch.dtype:
    """Return the type in which sums over a half-precision tensor are kept."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
