"""Byte images on their way to a model: mirrored and normalised.

rows (n, height, width, 3), chosen (n, 1): the images to mirror
"""

import torch
from torch import Tensor

from podium.layers.slot import Slot

#: number of values that stay in a core's cache
_CACHED = 1 << 17
#: takes (rows, chosen or None, scale, shift)
MIRROR_NORMALISE = Slot()


def mirrored_and_normalised(rows: Tensor, chosen: Tensor | None, scale: Tensor, shift: Tensor) -> Tensor:
    """Return byte · scale + shift by channel (3,), rounded twice, with the chosen images mirrored."""
    found = MIRROR_NORMALISE(rows, chosen, scale, shift)
    if found is not None:
        return found
    if chosen is not None:
        rows = mirrored(rows, chosen)
    num, height, width, channels = rows.shape
    # Line by line: torch is slow for dimensions of size three. Rounded twice, as on the host.
    lines = rows.reshape(num, height, width * channels)
    scale, shift = scale.repeat(width), shift.repeat(width)
    image = torch.empty(lines.shape, device=rows.device)
    few = _few(rows)
    for part, out in zip(lines.split(few), image.split(few), strict=True):
        out.copy_(part).mul_(scale).add_(shift)
    return image.view(rows.shape)


def mirrored(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return the images (bytes or floats) with the chosen ones mirrored."""
    rows = rows.contiguous()
    images, few = torch.empty_like(rows), _few(rows)
    for part, choice, out in zip(rows.split(few), chosen.split(few), images.split(few), strict=True):
        torch.where(choice, _words(part.flip(2)), _words(part), out=_words(out))
    return images


def _few(rows: Tensor) -> int:
    """Return how many images to process at a time: on a CPU as many as stay in the cache between operations."""
    return max(1, _CACHED // rows[0].numel()) if rows.device.type == "cpu" else len(rows)


def _words(rows: Tensor) -> Tensor:
    """View (n, …) as the smallest number of elements that hold the same bytes: torch selects element by element."""
    flat = rows.view(len(rows), -1)
    return flat.view(torch.int64) if flat.shape[1] * flat.element_size() % 8 == 0 else flat
