"""Bytes become floats as torch's own operators would make them."""

import pytest
import torch

from podium.layers.pixels import fits, mirrored_and_normalised

SCALE, SHIFT = torch.tensor([0.017, 0.018, 0.0174]), torch.tensor([-2.1, -2.0, -1.8])


@pytest.mark.parametrize("shape", [(5, 32, 32, 3), (3, 7, 224, 3), (2, 1, 8, 3), (1, 3, 16, 3)])
@pytest.mark.parametrize("mirrors", [True, False])
def test_bits_are_those_of_single_operators(shape, mirrors):
    torch.manual_seed(0)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8)
    chosen = torch.arange(len(rows)) % 2 == 0
    turned = torch.where(chosen[:, None, None, None], rows.flip(2), rows) if mirrors else rows
    found = mirrored_and_normalised(rows, chosen if mirrors else None, SCALE, SHIFT)
    assert fits(rows)
    assert torch.equal(found, turned.float() * SCALE + SHIFT)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 4, 8, 3), torch.zeros(2, 4, 8, 1, dtype=torch.uint8), torch.zeros(2, 4, 9, 3, dtype=torch.uint8)],
)
def test_other_images_are_left_to_torch(rows):
    assert not fits(rows)
