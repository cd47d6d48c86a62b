"""The table of our own operators, and which of them are in use: `transforms/apply.py` passes on `engine.kernels`.

Kernels are guests: each replaces something plain that does the same work, and its file is imported when it is first
needed. If that fails, or if the recipe excludes the kernel, the plain form does the work. So every file named in the
table can be removed, with its row, and everything else still works.

    layer       modules of a plain class get a faster one, or several modules run as one; applied to models by
                `install.py`, only with `engine.layout: channels_last`. Each call decides by `fits` whether the kernel
                applies and pays off
    function    fills a slot of a plain function
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podium.machine import processor

#: a recipe's choice: all that apply and pay off, none, or only these
Choice = Literal["auto", "off"] | Sequence[str]


@dataclass(frozen=True)
class Kernel:
    """One of our own operators, and what is promised of it."""

    name: str
    #: the plain form, as torch names it
    replaces: str
    #: its module, with `fits` (whether it applies and pays off) and the function that installs it
    module: str
    #: largest error against float64, as a share of the largest value; torch's errors are about 1e-6 too
    tolerance: float
    #: whether it gives exactly the plain form's bits
    bit_exact: bool = False
    #: files of its own besides the module
    parts: tuple[str, ...] = ()
    #: packages that it requires
    needs: tuple[str, ...] = ("llvmlite", "podium.kernels.jit.llvm")
    #: the slot it fills: "module:name"
    slot: str | None = None
    #: the only instruction sets (as torch names them) and makers of processors with which it pays; `auto` leaves the
    #: work to torch on others. Empty: all
    pays_with: frozenset[str] = frozenset()
    pays_on: frozenset[str] = frozenset()

    @property
    def files(self) -> tuple[str, ...]:
        """Return the modules that implement it; nothing else needs them."""
        return (self.module, *self.parts) if self.module else ()

    def is_here(self) -> bool:
        """Return whether its modules and requirements are installed, without importing any of them."""
        return all(_has(name) for name in (*self.files, *self.needs))


_CONV, _WORDS = "podium.kernels.conv.", "podium.kernels.transformer."
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "conv_pool",
            "Conv1d or Conv2d, MaxPool and ReLU, one after the other",
            _CONV + "conv_pool",
            4e-6,
            parts=(_CONV + "conv_pool_loops", _CONV + "conv_pool_grad_dense"),
        ),
        Kernel(
            "winograd",
            "Conv2d 3 × 3 with stride 1",
            _CONV + "winograd",
            4e-6,
            parts=tuple(
                _CONV + f"winograd_{part}" for part in ("products", "routines", "tiles", "transforms", "weights")
            ),
        ),
        Kernel(
            "conv3d_stride2",
            "Conv3d and ConvTranspose3d 4 × 4 × 4 with stride 2",
            _CONV + "conv3d_stride2",
            4e-6,
            parts=(_CONV + "conv3d_patches", _CONV + "conv3d_tiles"),
        ),
        Kernel(
            "conv3d_weight_copy",
            "Tensor.copy_ of large weights of Conv3d, for checkpoints",
            _CONV + "conv3d_weight_copy",
            0.0,
            bit_exact=True,
            needs=("numba",),
        ),
        Kernel(
            "batch_norm",
            "BatchNorm2d in training, with ReLU and the sum of a residual block after it",
            "podium.kernels.norm.batch_norm",
            2e-6,
            parts=("podium.kernels.norm.batch_norm_loops",),
        ),
        Kernel("attention", "scaled_dot_product_attention with dropout and masks", _WORDS + "attention", 4e-6),
        Kernel("dropout_gelu", "Dropout, and GELU by a hyperbolic tangent", _WORDS + "dropout_gelu", 2e-6),
        Kernel(
            "vocabulary",
            "Embedding, and Linear with an output for every word",
            _WORDS + "vocabulary",
            4e-6,
            needs=(),
        ),
        Kernel(
            "products",
            "Linear, by MKL",
            "podium.kernels.products",
            4e-6,
            parts=("podium.kernels.jit.matrices",),
            slot="podium.layers.transformer:LINEAR",
            pays_with=frozenset({"AVX512"}),
            pays_on=frozenset({"AuthenticAMD"}),
        ),
        Kernel("few_rows", "all rows of BERT's last encoder, where few are looked at", "", 4e-6, needs=()),
        Kernel(
            "cross_entropy",
            "cross_entropy over many classes, summed",
            _WORDS + "cross_entropy",
            2e-6,
            slot="podium.layers.loss:CROSS_ENTROPY",
        ),
        Kernel(
            "mirror_normalise",
            "mirroring and normalising images of bytes",
            "podium.kernels.image.mirror_normalise",
            0.0,
            bit_exact=True,
            slot="podium.layers.images:MIRROR_NORMALISE",
        ),
        Kernel(
            "jpeg_window",
            "libjpeg-turbo, where only a window of a photograph is needed",
            "podium.data.images.jpeg.window",
            0.0,
            bit_exact=True,
            parts=tuple(f"podium.data.images.jpeg.{part}" for part in ("header", "entropy", "colour")),
            needs=("numba",),
        ),
    )
}
#: None: those that pay off on this machine
_chosen: frozenset[str] | None = None


def use(choice: Choice) -> None:
    """Use the kernels of `choice`, and no others, in this process from now on."""
    global _chosen
    _chosen = _names(choice)
    assert chosen() <= KERNELS.keys(), "the recipe knows the names"
    find.cache_clear()
    for kernel in KERNELS.values():
        if kernel.slot is not None:
            module, _, name = kernel.slot.partition(":")
            guest = find(kernel.name)
            getattr(importlib.import_module(module), name).guest = None if guest is None else guest.offer
    # The image reader calls the decoder directly and knows nothing of kernels. It is on unless switched off here.
    if "podium.data.images.crops" in sys.modules or "jpeg_window" not in chosen():
        importlib.import_module("podium.data.images.crops").set_window_decoder("jpeg_window" in chosen())


def chosen() -> frozenset[str]:
    """Return the kernels that may be used: those of the recipe, or with `auto` all that can pay off on this machine."""
    return _fast_here() if _chosen is None else _chosen


def _names(choice: Choice) -> frozenset[str] | None:
    names = {"auto": None, "off": frozenset[str]()}
    return names[choice] if isinstance(choice, str) else frozenset(choice)


@functools.cache
def _fast_here() -> frozenset[str]:
    import torch  # loaded here: the table can be read without it

    instructions, maker = torch.backends.cpu.get_cpu_capability(), processor.maker()
    return frozenset(
        name
        for name, kernel in KERNELS.items()
        if (not kernel.pays_with or instructions in kernel.pays_with)
        and (not kernel.pays_on or maker in kernel.pays_on)
    )


@functools.cache
def find(name: str) -> Any:
    """Return a kernel's module, or None if it is not in use: the plain form then does the work."""
    kernel = KERNELS.get(name)
    if kernel is None or name not in chosen():
        return None
    try:
        return importlib.import_module(kernel.module) if kernel.module else types.SimpleNamespace()
    except ImportError:
        return None


def in_use() -> list[str]:
    """Return the names of the kernels in use that are installed."""
    return _installed(chosen())


def missing(choice: Choice) -> list[str]:
    """Return the names of the kernels that a recipe's choice does not use here."""
    names = _names(choice)
    return sorted(KERNELS.keys() - _installed(_fast_here() if names is None else names))


def _installed(names: frozenset[str]) -> list[str]:
    return sorted(name for name in names if name in KERNELS and KERNELS[name].is_here())


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
