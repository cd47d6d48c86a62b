"""`podium data make cosmology`: what it takes, and what a person sees while boxes are made."""

from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from podium.data.shown import bar, say
from podium.schema import Section

_LARGE = 256


class CosmologyMake(Section):
    """What `podium data make cosmology` takes: the size of the training box, and the folder for the files."""

    #: cells a side of the training box
    size: PositiveInt
    out: Path
    seed: NonNegativeInt = 1
    #: cells a side of the boxes for validation and test; by default half of `size`, at least 32
    valid_size: PositiveInt | None = None
    #: side of the training box in comoving Mpc/h; by default such that cells are as large as the published ones
    box_mpc: PositiveFloat | None = None


def make(section: CosmologyMake) -> None:
    """Simulates the boxes of a data set."""
    options = section.model_dump(exclude={"size", "out"})
    simulate_shown(section.out, section.size, **options)


def simulate_shown(folder: Path, size: int, **options: Any) -> None:
    """Simulates a data set into `folder`, with a bar in a terminal; says what large boxes need, how fast it was."""
    from podium.workloads.cosmology import simulate  # compiles when first used: not wanted for files

    say(f"Simulating a box of {size}³ cells for training, and more for validation and test")
    if size >= _LARGE:
        need, file = simulate.needed_bytes(size) / 1e9, simulate.file_bytes(size) / 1e9
        say(f"The box for training needs {need:,.1f} GB of memory while it is made, and {file:,.1f} GB on disk")
    with bar("simulating", counted=False) as progress:
        made = simulate.make_dataset(folder, size, progress=lambda done: progress(done, 1.0), **options)
    say(f"Simulated {made.num_cells:,} cells in {made.seconds:.1f} s: {made.cells_per_second:,.0f} cells/s")
