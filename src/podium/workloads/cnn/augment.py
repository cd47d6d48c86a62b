"""What happens to a micro-batch of images on the device before the model sees it. Owns `augment` and `input`.

Everything is drawn from torch's default generator, which the engine seeds by the place of the micro-batch in the
training (update, replica, index): each replica has its own draws, and the number of instances changes none.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, model_validator
from torch import Tensor

from podium.layers import pixels
from podium.schema import Section

#: values that stay in a core's cache
_CACHED = 1 << 17


class AugmentSection(Section):
    """How training images are varied; validation sees them as they are."""

    #: black border from which images are cut out again at a random place; null: 4 for images as small as CIFAR's
    pad_crop: NonNegativeInt | None = None
    #: mirror images, every second one on average
    flip: bool = True
    #: mix pairs of images and labels by a share drawn from Beta(mixup, mixup); 0: not at all
    mixup: Annotated[float, Field(ge=0)] = 0.0
    #: replace a rectangle by that of another image, of an area drawn from Beta(cutmix, cutmix); 0: not at all.
    #: With mixup too, every micro-batch takes one of them, by a throw of a coin
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    #: share of the label spread evenly over all classes
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class InputSection(Section):
    """In which form images travel to the device."""

    #: as bytes, a quarter of the traffic; else as floats
    eight_bit: bool = True
    #: where mean and spread are taken out; bytes leave that to the device
    normalise: Literal["host", "device"] = "device"

    @model_validator(mode="after")
    def _bytes_are_raw(self) -> Self:
        if self.eight_bit and self.normalise == "host":
            raise ValueError("normalised images are no bytes: give input.eight_bit=false with input.normalise=host")
        return self


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a data set's channels, where 1 is the brightest."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(scale, shift): normalised = byte · scale + shift"""
        mean, std = np.array(self.mean), np.array(self.std)
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def normalised_rows(spread: Spread, rows: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """What `Images.normalise` does, on the host."""
    scale, shift = spread.factors()
    np.multiply(rows, scale, out=out)
    out += shift


@dataclass(frozen=True)
class Mixed:
    """Images for the model (n, 3, height, width), their labels, and those of what was mixed in.

    `share` of each sample (n,) belongs to `label`, the rest to `other`; None where nothing was mixed.
    """

    image: Tensor
    label: Tensor
    other: Tensor | None = None
    share: Tensor | None = None


class Images:
    """Makes model inputs of what the feed delivers: (n, height, width, 3), normalised on the host or not."""

    def __init__(self, augment: AugmentSection, spread: Spread, pad_crop: int, *, normalised: bool = False) -> None:
        self._augment, self._pad, self._is_normalised = augment, pad_crop, normalised
        scale, shift = spread.factors()
        self._scale, self._shift = torch.from_numpy(scale), torch.from_numpy(shift)

    def plain(self, rows: Tensor) -> Tensor:
        """As they are, normalised."""
        return self._normalised(rows).permute(0, 3, 1, 2)

    def varied(self, rows: Tensor, label: Tensor) -> Mixed:
        """Cut out, mirrored and mixed, as the recipe says."""
        if self._pad:
            rows = self._pad_crop(rows)
        if self._augment.flip:
            # About half of them, by throws of a coin.
            chosen = torch.rand(len(rows), 1, device=rows.device) < 0.5
            if not self._is_normalised and pixels.fits(rows):
                image = pixels.mirrored_and_normalised(rows, chosen, self._scale, self._shift).permute(0, 3, 1, 2)
            else:
                image = self.plain(_mirrored(rows, chosen))
        else:
            image = self.plain(rows)
        if not (self._augment.mixup or self._augment.cutmix):
            return Mixed(image, label)
        both = self._augment.mixup > 0 and self._augment.cutmix > 0
        # Drawn on the host: which of the two it is says which operations follow.
        cut = bool(torch.rand(()) < 0.5) if both else self._augment.cutmix > 0
        pairs = torch.randperm(len(label), device=label.device)
        image, share = self._cut_mixed(image, pairs) if cut else self._mixed(image, pairs)
        return Mixed(image, label, label[pairs], share)

    def _normalised(self, rows: Tensor) -> Tensor:
        if self._is_normalised:
            return rows
        if pixels.fits(rows):
            return pixels.mirrored_and_normalised(rows, None, self._scale, self._shift)
        if self._scale.device != rows.device:
            self._scale, self._shift = self._scale.to(rows.device), self._shift.to(rows.device)
        num, height, width, channels = rows.shape
        # Line by line: torch takes long over dimensions of three numbers. Rounded twice, as on the host.
        lines = rows.reshape(num, height, width * channels)
        scale, shift = self._scale.repeat(width), self._shift.repeat(width)
        image = torch.empty(lines.shape, device=rows.device)
        few = _few(rows)
        for part, out in zip(lines.split(few), image.split(few), strict=True):
            out.copy_(part).mul_(scale).add_(shift)
        return image.view(rows.shape)

    def _pad_crop(self, rows: Tensor) -> Tensor:
        num, height, width, channels = rows.shape
        pad = self._pad
        tall, wide = height + 2 * pad, width + 2 * pad
        if not self._is_normalised:
            padded = F.pad(rows.reshape(num, height, -1), (pad * channels, pad * channels, pad, pad))
        else:  # black as it looks once normalised
            padded = self._shift.to(rows.device).expand(num, tall, wide, channels).clone()
            padded[:, pad:-pad, pad:-pad] = rows
        top, left = torch.randint(2 * pad + 1, (2, num), device=rows.device)
        # All windows as one view, by their first pixel, of which every image chooses one: copied line by line.
        num_windows = (num - 1) * tall * wide + 2 * pad * wide + 2 * pad + 1
        windows = padded.as_strided((num_windows, height, width * channels), (channels, wide * channels, 1))
        first = torch.arange(num, device=rows.device) * (tall * wide) + top * wide + left
        return windows.index_select(0, first).view(rows.shape)

    def _mixed(self, image: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        share = _beta(self._augment.mixup, len(image), image.device)
        return torch.lerp(image[pairs], image, share[:, None, None, None]), share

    def _cut_mixed(self, image: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        num, _, height, width = image.shape
        side = (1 - _beta(self._augment.cutmix, num, image.device)).sqrt()
        centre = torch.rand(2, num, device=image.device)
        rows = _inside(centre[0], side, height)
        columns = _inside(centre[1], side, width)
        window = rows[:, :, None] & columns[:, None, :]
        share = 1 - window.sum(dim=(1, 2)) / (height * width)
        return torch.where(window[:, None], image[pairs], image), share


def _mirrored(rows: Tensor, chosen: Tensor) -> Tensor:
    """The chosen ones (n, 1)."""
    rows = rows.contiguous()
    images, few = torch.empty_like(rows), _few(rows)
    for part, choice, out in zip(rows.split(few), chosen.split(few), images.split(few), strict=True):
        torch.where(choice, _words(part.flip(2)), _words(part), out=_words(out))
    return images


def _few(rows: Tensor) -> int:
    """Images to take at a time: on a CPU those that stay in the cache from one operation to the next."""
    return max(1, _CACHED // rows[0].numel()) if rows.device.type == "cpu" else len(rows)


def _words(rows: Tensor) -> Tensor:
    """(n, …) as few numbers as hold the same bytes, a view: torch chooses between numbers one by one."""
    flat = rows.view(len(rows), -1)
    return flat.view(torch.int64) if flat.shape[1] * flat.element_size() % 8 == 0 else flat


def _beta(parameter: float, num: int, device: torch.device) -> Tensor:
    both = torch.full((num,), parameter, device=device)
    return torch.distributions.Beta(both, both, validate_args=False).sample()


def _inside(centre: Tensor, side: Tensor, length: int) -> Tensor:
    """(n, length): which pixels lie in a window of `side` (as a share of the length) about `centre`."""
    first = ((centre - side / 2) * length).round()[:, None]
    last = ((centre + side / 2) * length).round()[:, None]
    pixel = torch.arange(length, device=centre.device)[None]
    return (pixel >= first) & (pixel < last)


def mixed_cross_entropy(output: Tensor, mixed: Mixed, label_smoothing: float) -> Tensor:
    """Sum over the micro-batch, in single precision whatever the model computes in."""
    output = output.float()
    if mixed.other is None or mixed.share is None:
        return F.cross_entropy(output, mixed.label, reduction="sum", label_smoothing=label_smoothing)
    losses = [
        F.cross_entropy(output, label, reduction="none", label_smoothing=label_smoothing)
        for label in (mixed.label, mixed.other)
    ]
    return torch.lerp(losses[1], losses[0], mixed.share).sum()
