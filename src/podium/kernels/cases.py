"""Test cases for the kernels in the table: plain modules and their inputs. Used by `tests/kernels/test_registry.py` and
`python -m bench.kernels`, which run all of them; training never imports this.

Two kernels have no cases here: `jpeg_window` is compared with libjpeg-turbo in `tests/data/test_jpeg_window.py` and
`bench.input`, and `few_rows` concerns a whole model, see `tests/kernels/test_transformer.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from podium.kernels import registry
from podium.layers.images import mirrored_and_normalised
from podium.layers.loss import cross_entropy_sum
from podium.layers.residual import ResidualBlock
from podium.layers.transformer import SelfAttention, Words


@dataclass(frozen=True)
class Case:
    """A plain module, whose weights are drawn when it is built, and its inputs."""

    kernel: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    #: whether the kernel must do the work; otherwise it must leave it to torch
    taken: bool = True
    #: whether the size is one met in training; the benchmark measures these
    real: bool = False

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"


def _randn(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(shape),)


def _of(kernel: str, *, taken: bool, **cases: tuple[Callable[[], nn.Module], tuple[int, ...]]) -> list[Case]:
    """Build cases whose only input is a tensor of random numbers of the given shape."""
    return [
        Case(kernel, name.replace("_", " "), build, _randn(*shape), taken) for name, (build, shape) in cases.items()
    ]


def _real(kernel: str, name: str, build: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(kernel, name, build, _randn(*shape), real=True)


def _block(conv: nn.Module, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv, *others)


def _conv_pool() -> list[Case]:
    relu, pool = nn.ReLU, nn.MaxPool2d
    taken = _of(
        "conv_pool",
        taken=True,
        one_channel=(lambda: _block(nn.Conv2d(1, 8, 3), pool(2), relu()), (5, 1, 12, 9)),
        few_channels=(lambda: _block(nn.Conv2d(3, 8, (3, 5)), pool((2, 3)), relu()), (2, 3, 9, 14)),
        more_channels=(lambda: _block(nn.Conv2d(20, 8, 3), pool(2), relu()), (4, 20, 9, 7)),
        odd_numbers=(lambda: _block(nn.Conv2d(9, 5, (2, 1)), pool((3, 2))), (3, 9, 11, 8)),
        more_outputs_than_a_vector=(lambda: _block(nn.Conv2d(2, 19, 3), pool(2), relu()), (3, 2, 8, 8)),
        more_taps_than_registers=(lambda: _block(nn.Conv2d(24, 4, 5), pool(2), relu()), (2, 24, 9, 10)),
        large_windows=(lambda: _block(nn.Conv2d(2, 4, 3), pool(8), relu()), (2, 2, 18, 19)),
        no_bias=(lambda: _block(nn.Conv2d(12, 6, 3, bias=False), pool(2), relu()), (3, 12, 8, 8)),
        no_ReLU=(lambda: _block(nn.Conv2d(1, 6, 3, bias=False), pool(3)), (3, 1, 11, 8)),
        one_sample=(lambda: _block(nn.Conv2d(1, 6, 3), pool(2), relu()), (1, 1, 8, 8)),
        one_dimension=(lambda: _block(nn.Conv1d(4, 30, 4), nn.MaxPool1d(4), relu()), (3, 4, 50)),
        two_blocks=(
            lambda: _block(
                *(nn.Conv1d(4, 30, 4), nn.MaxPool1d(4), relu(), nn.Conv1d(30, 7, 5, bias=False), nn.MaxPool1d(2))
            ),
            (3, 4, 90),
        ),
    )
    refused = _of(
        "conv_pool",
        taken=False,
        another_in_between=(lambda: _block(nn.Conv2d(2, 4, 3), relu(), pool(2)), (2, 2, 8, 8)),
        strided=(lambda: _block(nn.Conv2d(2, 4, 3, stride=2), pool(2), relu()), (2, 2, 11, 11)),
        padded=(lambda: _block(nn.Conv2d(16, 4, 3, padding=1), pool(2), relu()), (2, 16, 8, 8)),
        overlapping_windows=(lambda: _block(nn.Conv2d(2, 4, 3), pool(3, stride=2), relu()), (2, 2, 11, 11)),
        rounded_up=(lambda: _block(nn.Conv2d(2, 4, 3), pool(2, ceil_mode=True), relu()), (2, 2, 7, 7)),
        no_pool_to_speak_of=(lambda: _block(nn.Conv2d(2, 4, 3), pool(1), relu()), (2, 2, 7, 7)),
        huge_windows=(lambda: _block(nn.Conv2d(2, 4, 3), pool(9), relu()), (2, 2, 20, 20)),
        heavy_weights=(lambda: _block(nn.Conv2d(300, 200, 3), pool(2), relu()), (1, 300, 4, 4)),
    )
    return [
        *taken,
        *refused,
        _real("conv_pool", "mnist's first block", lambda: _block(nn.Conv2d(1, 32, 3), pool(2), relu()), 64, 1, 28, 28),
        _real(
            "conv_pool",
            "neuron's second block",
            lambda: _block(nn.Conv1d(30, 90, 4), nn.MaxPool1d(4), relu()),
            *(192, 30, 399),
        ),
    ]


def _conv(*args: int | tuple[int, int], **keys: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(*args, **keys))  # type: ignore[arg-type]


def _winograd() -> list[Case]:
    from podium.kernels.jit.llvm import WIDTH  # loaded here: the table of cases can be read without it

    three, five = 3 * WIDTH, 5 * WIDTH  # vectors: the last one has no other beside it
    taken = _of(
        "winograd",
        taken=True,
        whole_tiles=(_conv(16, 16, 3, padding=1), (2, 16, 32, 32)),
        tiles_that_stick_out=(_conv(16, three, 3, padding=1), (3, 16, 9, 7)),
        no_zeros_around=(_conv(32, 64, 3, bias=False), (2, 32, 13, 13)),
        uneven=(_conv(five, 16, 3, padding=(0, 1)), (5, five, 3, 4)),
        one_output=(_conv(16, 16, 3), (4, 16, 3, 3)),
        many_zeros_around=(_conv(16, 32, 3, padding=2), (2, 16, 6, 5)),
        small=(_conv(16, 16, 3, padding=1), (2, 16, 1, 2)),
    )
    refused = _of(
        "winograd",
        taken=False,
        strided=(_conv(32, 32, 3, padding=1, stride=2), (2, 32, 9, 9)),
        dilated=(_conv(32, 32, 3, padding=2, dilation=2), (2, 32, 9, 9)),
        too_many_zeros_around=(_conv(32, 32, 3, padding=3), (2, 32, 9, 9)),
        grouped=(_conv(32, 32, 3, padding=1, groups=2), (2, 32, 9, 9)),
        another_kernel=(_conv(32, 32, 2), (2, 32, 9, 9)),
        odd_channels=(_conv(32, 12, 3), (2, 32, 9, 9)),
        few_channels=(_conv(8, 32, 3), (2, 8, 9, 9)),
        many_channels=(_conv(512, 512, 3), (1, 512, 5, 5)),
        padded_by_name=(_conv(16, 16, 3, padding="same"), (2, 16, 6, 6)),
        mirrored_at_the_edge=(_conv(16, 16, 3, padding=1, padding_mode="reflect"), (2, 16, 6, 6)),
    )
    real = _real("winograd", "ResNet-20's second stage", _conv(32, 32, 3, padding=1, bias=False), 128, 32, 16, 16)
    return [*taken, *refused, real]


def _halves(c: int, o: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv3d(c, o, 4, 2, 1))


def _doubles(o: int, c: int, more: tuple[int, int, int] = (0, 0, 0)) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.ConvTranspose3d(o, c, 4, 2, 1, output_padding=more))


def _conv3d() -> list[Case]:
    taken = _of(
        "conv3d_stride2",
        taken=True,
        halving_to_one_position=(_halves(16, 24), (2, 16, 2, 2, 2)),
        halving_few_channels=(_halves(4, 16), (2, 4, 8, 6, 4)),
        halving_odd_sides=(_halves(5, 6), (2, 5, 9, 8, 7)),
        halving_by_tiles=(_halves(32, 32), (1, 32, 16, 16, 16)),
        halving_by_odd_tiles=(_halves(48, 32), (1, 48, 16, 17, 18)),
        doubling_one_position=(_doubles(24, 16), (2, 24, 1, 1, 1)),
        doubling_few_channels=(_doubles(16, 4), (2, 16, 4, 3, 2)),
        doubling_to_odd_sides=(_doubles(6, 5, (1, 0, 1)), (2, 6, 4, 4, 3)),
        doubling_by_tiles=(_doubles(32, 32), (1, 32, 8, 8, 8)),
        doubling_by_odd_tiles=(_doubles(32, 48, (0, 1, 0)), (1, 32, 8, 8, 9)),
    )

    def other(**keys: object) -> Callable[[], nn.Module]:
        given = {"kernel_size": 4, "stride": 2, "padding": 1, **keys}
        return lambda: nn.Sequential(nn.Conv3d(4, 4, **given))  # type: ignore[arg-type]

    volume = (2, 4, 8, 8, 8)
    refused = _of(
        "conv3d_stride2",
        taken=False,
        another_kernel=(other(kernel_size=3), volume),
        grouped=(other(groups=2), volume),
        round_the_edge=(other(padding_mode="circular"), volume),
        dilated=(other(dilation=2), volume),
        another_stride=(lambda: nn.Sequential(nn.ConvTranspose3d(4, 4, 4, 4, 1)), volume),
    )
    return [
        *taken,
        *refused,
        _real("conv3d_stride2", "halving, 64 to 128 channels", _halves(64, 128), 2, 64, 32, 32, 32),
        _real("conv3d_stride2", "doubling, 128 to 64 channels", _doubles(128, 64), 2, 128, 16, 16, 16),
    ]


class _Copy(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        weight, into = weight.detach(), torch.empty(weight.shape, dtype=weight.dtype)
        kernel = registry.find("conv3d_weight_copy")
        if kernel is None:
            return into.copy_(weight)
        kernel.copy_kernel(weight, into)
        return into


def _weight_copy() -> list[Case]:
    def weight(o: int, c: int) -> Callable[[], tuple[Tensor]]:
        return lambda: (torch.randn(4, 4, 4, c, o).permute(4, 3, 0, 1, 2),)

    small = Case("conv3d_weight_copy", "odd numbers", _Copy, weight(150, 5))
    return [small, Case("conv3d_weight_copy", "512 × 256 channels", _Copy, weight(512, 256), real=True)]


def _batch_norm() -> list[Case]:
    from podium.kernels.jit.llvm import WIDTH  # loaded here: the table of cases can be read without it

    def norm(c: int, **keys: object) -> nn.BatchNorm2d:
        layer = nn.BatchNorm2d(c, **keys)  # type: ignore[arg-type]
        if layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.normal_(layer.bias)
        return layer

    def normed(c: int, **keys: object) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(norm(c, **keys))

    def with_relu(c: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(norm(c), nn.ReLU(inplace=True))

    def residual(c: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(ResidualBlock(nn.Sequential(nn.Identity(), norm(c)), nn.Identity()))

    three = 3 * WIDTH
    taken = _of(
        "batch_norm",
        taken=True,
        one_vector_of_channels=(normed(WIDTH), (12, WIDTH, 40, 41)),
        odd_rows=(normed(three, momentum=0.3, eps=1e-3), (8, three, 37, 20)),
        one_position=(normed(256), (520, 256, 1, 1)),
        many_channels=(normed(2048), (2, 2048, 5, 7)),
        ReLU=(with_relu(three), (8, three, 37, 20)),
        ReLU_and_many_channels=(with_relu(1024), (3, 1024, 7, 7)),
        residual=(residual(WIDTH), (28, WIDTH, 31, 20)),
    )
    refused = _of(
        "batch_norm",
        taken=False,
        odd_channels=(normed(12), (64, 12, 16, 16)),
        no_statistics=(normed(32, track_running_stats=False), (64, 32, 16, 16)),
        no_parameters=(normed(32, affine=False), (64, 32, 16, 16)),
        mean_of_all_batches=(normed(32, momentum=None), (64, 32, 16, 16)),
        no_momentum_and_ReLU=(
            lambda: nn.Sequential(norm(32, momentum=None), nn.ReLU(inplace=True)),
            (64, 32, 16, 16),
        ),
        small=(with_relu(16), (2, 16, 16, 16)),
        one_dimension=(lambda: nn.Sequential(nn.BatchNorm1d(32)), (64, 32, 256)),
    )
    real = [
        _real("batch_norm", "ResNet-20's first stage, with its sum", residual(16), 128, 16, 32, 32),
        _real("batch_norm", "ResNet-50's first stage, with ReLU", with_relu(64), 8, 64, 56, 56),
    ]

    def far_from_zero(case: Case) -> Case:
        """Shift the inputs away from zero: a large mean must not cost precision."""
        return replace(case, inputs=lambda: (case.inputs()[0] * 2 + 5,))

    def as_convolved(case: Case) -> Case:
        """Give inputs the layout in which convolutions leave them."""
        return replace(case, inputs=lambda: (case.inputs()[0].contiguous(memory_format=torch.channels_last),))

    return [*map(far_from_zero, (*taken, *refused)), *map(as_convolved, real)]


class _Masked(nn.Module):
    """Attention over rows that hold several sequences each."""

    def __init__(self, hidden: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, causal=causal)

    def forward(self, x: Tensor) -> Tensor:
        sequence = torch.arange(x.shape[1], device=x.device).div(x.shape[1] // 3 + 1, rounding_mode="floor")
        mask = (sequence[:, None] == sequence[None, :])[None, None]
        attended: Tensor = self.attention(x, mask)
        return attended


def _attention() -> list[Case]:
    def plain(hidden: int, heads: int, causal: bool = False) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(SelfAttention(hidden, heads, causal=causal))

    taken = _of(
        "attention",
        taken=True,
        causal=(plain(96, 3, True), (11, 64, 96)),
        odd_heads=(plain(96, 2), (29, 96, 96)),
        masked=(lambda: _Masked(96, 3), (11, 64, 96)),
        causal_and_masked=(lambda: _Masked(64, 4, causal=True), (8, 64, 64)),
    )
    refused = _of(
        "attention",
        taken=False,
        odd_length=(plain(64, 4), (16, 60, 64)),
        odd_size_of_heads=(plain(60, 3), (16, 64, 60)),
        few_scores=(plain(64, 4), (1, 32, 64)),
        other_scale=(lambda: nn.Sequential(SelfAttention(96, 3, scale=0.5)), (11, 64, 96)),
    )
    return [*taken, *refused, _real("attention", "GPT-2's, 256 tokens", plain(768, 12, True), 4, 256, 768)]


def _gelu() -> list[Case]:
    def gelu(approximate: str = "tanh") -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.GELU(approximate))

    taken = _of("dropout_gelu", taken=True, GELU=(gelu(), (41, 416)))
    refused = _of(
        "dropout_gelu",
        taken=False,
        GELU_by_the_error_function=(gelu("none"), (41, 416)),
        odd_number=(gelu(), (41, 401)),
        few=(gelu(), (10, 16)),
        dropout_of_nothing=(lambda: nn.Sequential(nn.Dropout(0.0)), (41, 416)),
    )
    return [*taken, *refused, _real("dropout_gelu", "GPT-2's GELU", gelu(), 4, 256, 3072)]


class _Tied(nn.Module):
    """A model whose word embedding and output layer share one table."""

    def __init__(self, num_words: int, hidden: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(num_words, hidden), Words()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.last(self.table(tokens), self.table.weight)
        return logits


def _vocabulary() -> list[Case]:
    def tokens(*shape: int) -> Callable[[], tuple[Tensor]]:
        return lambda: (torch.randint(0, 4000, shape, dtype=torch.int32),)

    def linear(words: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(256, words))

    return [
        Case("vocabulary", "tied", lambda: _Tied(4099, 256), tokens(2, 30)),
        *_of("vocabulary", taken=True, last_layer=(linear(4100), (3, 7, 256))),
        *_of("vocabulary", taken=False, few_words=(linear(4000), (3, 7, 256))),
        Case("vocabulary", "BERT's table, tied", lambda: _Tied(30522, 768), tokens(8, 20), real=True),
    ]


def _products() -> list[Case]:
    def linear(inputs: int, outputs: int, bias: bool = True) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(inputs, outputs, bias))

    taken = _of(
        "products",
        taken=True,
        whole_tiles=(linear(96, 96), (72, 96)),
        more_axes=(linear(96, 128), (2, 5, 11, 96)),
        odd_numbers=(linear(301, 173, False), (67, 301)),
        few_rows=(linear(513, 260), (5, 513)),
        few_outputs=(linear(700, 9), (101, 700)),
    )
    refused = _of(
        "products",
        taken=False,
        little_work=(linear(64, 64), (64, 64)),
        hardly_an_output=(linear(4096, 2), (128, 4096)),
        one_axis=(linear(1024, 1024), (1024,)),
    )
    return [*taken, *refused, _real("products", "BERT's feed-forward layer", linear(768, 3072), 8, 128, 768)]


class _Loss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_sum(logits * 1, target, -1, keeps=False)


def _cross_entropy() -> list[Case]:
    def given(rows: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
        def draw() -> tuple[Tensor, Tensor]:
            target = torch.randint(0, classes, (rows,))
            target[:2] = torch.tensor([-1, classes - 1])
            return torch.randn(rows, classes) * 5 + 20, target

        return draw

    return [
        Case("cross_entropy", "whole vectors", _Loss, given(1024, 64)),
        Case("cross_entropy", "odd classes", _Loss, given(77, 1003)),
        Case("cross_entropy", "few classes", _Loss, given(2000, 40), taken=False),
        Case("cross_entropy", "few values", _Loss, given(37, 100), taken=False),
        Case("cross_entropy", "GPT-2's, 256 tokens", _Loss, given(256, 50257), real=True),
    ]


class _Images(nn.Module):
    def forward(self, rows: Tensor, chosen: Tensor | None = None) -> Tensor:
        scale, shift = torch.tensor([0.017, 0.018, 0.0174]), torch.tensor([-2.1, -2.0, -1.8])
        return mirrored_and_normalised(rows, chosen, scale, shift)


def _mirror() -> list[Case]:
    def given(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (torch.randint(0, 256, shape, dtype=torch.uint8), torch.rand(shape[0], 1) < 0.5)

    return [
        Case("mirror_normalise", "small images", _Images, given(5, 32, 32, 3)),
        Case("mirror_normalise", "odd lines", _Images, given(3, 7, 224, 3)),
        Case("mirror_normalise", "none mirrored", _Images, lambda: given(2, 3, 16, 3)()[:1]),
        Case("mirror_normalise", "one strip", _Images, given(2, 1, 16, 3)),
        Case("mirror_normalise", "odd columns", _Images, given(2, 4, 9, 3), taken=False),
        Case("mirror_normalise", "ImageNet's size", _Images, given(32, 224, 224, 3), real=True),
    ]


def all_cases() -> list[Case]:
    """Return the cases of all kernels; nothing is drawn yet."""
    makers = (_conv_pool, _winograd, _conv3d, _weight_copy, _batch_norm, _attention, _gelu)
    return [case for make in (*makers, _vocabulary, _products, _cross_entropy, _mirror) for case in make()]
