"""How Winograd's convolutions are divided into tiles, and these into blocks. Used by `winograd.py` and
`winograd_routines.py`."""

from dataclasses import dataclass
from functools import cached_property

#: Tiles of a block, rounded up to whole rows; where there are few, as many as make enough blocks for all threads, but
#: not too few. Between 14 and 56, times differ by a few percent.
_TILES, _LEAST_TILES, _LEAST_BLOCKS = 24, 8, 8
#: The same where the transformed kernel does not stay in a core's cache and is read again for each block: 0.9 of the
#: time on two threads with 256 channels.
_TILES_OF_LARGE_KERNELS = 48
#: With more channels, transformed kernels for tiles of 4 × 4 are too large for the caches: with 256 channels they took
#: as long as tiles of 2 × 2, 3.7 ms for 8 samples of 14², and errors come to 4e-6.
_MOST_CHANNELS_OF_LARGE = 128


@dataclass(frozen=True)
class Geometry:
    """Sizes of one convolution: image (h, w, c), output (H, W, o), and zeros around the image on each side."""

    image: tuple[int, int, int]
    output: tuple[int, int, int]
    padding: tuple[int, int]

    def tiles(self, side: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of side × side outputs in one sample."""
        return -(-self.output[0] // side), -(-self.output[1] // side)


@dataclass(frozen=True)
class Tiling:
    """A convolution divided into tiles of side × side outputs, and into blocks of whole rows of them."""

    geometry: Geometry
    side: int
    #: rows of tiles in a block, from one sample or several
    rows: int

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Return the rows and columns of tiles in one sample."""
        return self.geometry.tiles(self.side)

    @cached_property
    def num_tiles(self) -> int:
        """Return the number of tiles of one block."""
        return self.rows * self.tiles[1]

    @cached_property
    def num_products(self) -> int:
        return (self.side + 2) ** 2

    def num_blocks(self, num_samples: int) -> int:
        return -(-num_samples * self.tiles[0] // self.rows)


def tiling_of(geometry: Geometry, num_samples: int) -> Tiling:
    """Return the tiles with the fewest products, in blocks as even as possible."""

    def num_products(side: int) -> int:
        high, wide = geometry.tiles(side)
        return high * wide * (side + 2) ** 2

    small_kernel = max(geometry.image[2], geometry.output[2]) <= _MOST_CHANNELS_OF_LARGE
    side = min((2, 4) if small_kernel else (2,), key=num_products)
    high, wide = geometry.tiles(side)
    rows = num_samples * high
    most = _TILES if small_kernel else _TILES_OF_LARGE_KERNELS
    wanted = max(min(most, rows * wide // _LEAST_BLOCKS), _LEAST_TILES)
    num_blocks = -(-rows // -(-wanted // wide))
    return Tiling(geometry, side, -(-rows // num_blocks))
