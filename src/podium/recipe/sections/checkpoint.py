"""The `checkpoint` section: when to save and what to keep. Read by `train.py` and `checkpoints/writing.py`."""

from pydantic import PositiveInt

from podium.recipe.durations import Duration
from podium.recipe.section import Section


class CheckpointSection(Section):
    """When to save and what to keep."""

    every: Duration = Duration(1, "ep")
    #: how many of the newest checkpoints are kept
    keep: PositiveInt = 2
    #: also keep the checkpoint with the best validation loss (saved when it is found)
    best: bool = True
