"""`podium data make cosmology`: simulates boxes and shows the progress."""

from pathlib import Path
from typing import Any

from podium.ui.console import say
from podium.ui.progress_bar import progress_bar
from podium.workloads.cosmology.section import CosmologyMake

_LARGE = 256
#: side of the published crops, and the least side of a box that they can be cut from in several places
_CROP = 64
_ROOM = _CROP + 2  # the simulator makes boxes of even sides


def make(section: CosmologyMake) -> None:
    """Simulate the boxes of a data set."""
    options = section.model_dump(exclude={"size", "out", "valid_size"})
    simulate_shown(section.out, section.size, valid_size=section.valid_size or valid_size(section.size), **options)


def valid_size(size: int) -> int:
    """Return the side of the boxes for validation and test: half of the training box, but never too small for the
    published reader, whose crops of 64³ do not wrap, where the training box is not too small either."""
    half = max(32, size // 2 // 2 * 2)
    return max(half, _ROOM) if size > _CROP else half


def simulate_shown(folder: Path, size: int, **options: Any) -> None:
    """Simulate a data set into `folder` with a progress bar; print what large boxes need and the speed reached."""
    from podium.workloads.cosmology.simulator import simulate  # compiles on first use, which files do not need

    say(f"Simulating a box of {size}³ cells for training, and more for validation and test")
    if size >= _LARGE:
        need, file = simulate.needed_bytes(size) / 1e9, simulate.file_bytes(size) / 1e9
        say(f"The box for training needs {need:,.1f} GB of memory while it is made, and {file:,.1f} GB on disk")
    with progress_bar("simulating", counted=False) as progress:
        made = simulate.make_dataset(folder, size, progress=lambda done: progress(done, 1.0), **options)
    say(f"Simulated {made.num_cells:,} cells in {made.seconds:.1f} s: {made.cells_per_second:,.0f} cells/s")
