"""Preparation and augmentation of a micro-batch of images on the device.

Everything is drawn from torch's default generator, which the engine seeds by the position of the micro-batch in the
training (update, replica, index): draws differ between replicas and do not depend on the number of instances.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from podium.layers.images import mirrored, mirrored_and_normalised
from podium.workloads.cnn.section import AugmentSection


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a data set's channels, with 1 as full brightness."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (scale, shift) with normalised = byte · scale + shift."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def normalised_rows(spread: Spread, rows: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Normalise images on the host, as `Images` does on the device."""
    scale, shift = spread.factors()
    np.multiply(rows, scale, out=out)
    out += shift


@dataclass(frozen=True)
class Mixed:
    """Images for the model (n, 3, height, width), their labels, and those of the images mixed in.

    `share` of each sample (n,) belongs to `label`, the rest to `other`; both are None if nothing was mixed.
    """

    image: Tensor
    label: Tensor
    other: Tensor | None = None
    share: Tensor | None = None


class Images:
    """Turns what the feed delivers, (n, height, width, 3), normalised on the host or not, into model inputs."""

    def __init__(self, augment: AugmentSection, spread: Spread, pad_crop: int, *, normalised: bool = False) -> None:
        self._augment, self._pad, self._is_normalised = augment, pad_crop, normalised
        scale, shift = spread.factors()
        self._scale, self._shift = torch.from_numpy(scale), torch.from_numpy(shift)

    def plain(self, rows: Tensor) -> Tensor:
        """Return the images normalised, without augmentation."""
        return self._normalised(rows).permute(0, 3, 1, 2)

    def varied(self, rows: Tensor, label: Tensor) -> Mixed:
        """Return the images cropped, mirrored and mixed, as the recipe says."""
        if self._pad:
            rows = self._pad_crop(rows)
        if self._augment.flip:
            # Each with probability 1/2.
            chosen = torch.rand(len(rows), 1, device=rows.device) < 0.5
            image = self._normalised(rows, chosen).permute(0, 3, 1, 2)
        else:
            image = self.plain(rows)
        if not (self._augment.mixup or self._augment.cutmix):
            return Mixed(image, label)
        both = self._augment.mixup > 0 and self._augment.cutmix > 0
        # Drawn on the host, as the choice determines which operations follow.
        cut = bool(torch.rand(()) < 0.5) if both else self._augment.cutmix > 0
        pairs = torch.randperm(len(label), device=label.device)
        image, share = self._cut_mixed(image, pairs) if cut else self._mixed(image, pairs)
        return Mixed(image, label, label[pairs], share)

    def _normalised(self, rows: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the images normalised, with the chosen ones (n, 1) mirrored."""
        if self._is_normalised:
            return rows if chosen is None else mirrored(rows, chosen)
        if self._scale.device != rows.device:
            self._scale, self._shift = self._scale.to(rows.device), self._shift.to(rows.device)
        return mirrored_and_normalised(rows, chosen, self._scale, self._shift)

    def _pad_crop(self, rows: Tensor) -> Tensor:
        num, height, width, channels = rows.shape
        pad = self._pad
        tall, wide = height + 2 * pad, width + 2 * pad
        if not self._is_normalised:
            padded = F.pad(rows.reshape(num, height, -1), (pad * channels, pad * channels, pad, pad))
        else:  # black after normalisation
            padded = self._shift.to(rows.device).expand(num, tall, wide, channels).clone()
            padded[:, pad:-pad, pad:-pad] = rows
        top, left = torch.randint(2 * pad + 1, (2, num), device=rows.device)
        # One view of all windows by their first pixel, from which each image takes one: copied line by line.
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


def _beta(parameter: float, num: int, device: torch.device) -> Tensor:
    both = torch.full((num,), parameter, device=device)
    return torch.distributions.Beta(both, both, validate_args=False).sample()


def _inside(centre: Tensor, side: Tensor, length: int) -> Tensor:
    """Return (n, length): whether each pixel lies in a window of `side` (a share of the length) around `centre`."""
    first = ((centre - side / 2) * length).round()[:, None]
    last = ((centre + side / 2) * length).round()[:, None]
    pixel = torch.arange(length, device=centre.device)[None]
    return (pixel >= first) & (pixel < last)


def mixed_cross_entropy(output: Tensor, mixed: Mixed, label_smoothing: float) -> Tensor:
    """Return the sum over the micro-batch, always in single precision."""
    output = output.float()
    if mixed.other is None or mixed.share is None:
        return F.cross_entropy(output, mixed.label, reduction="sum", label_smoothing=label_smoothing)
    losses = [
        F.cross_entropy(output, label, reduction="none", label_smoothing=label_smoothing)
        for label in (mixed.label, mixed.other)
    ]
    return torch.lerp(losses[1], losses[0], mixed.share).sum()
