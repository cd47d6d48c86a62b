"""The `checkpoint` section: when to save and what to keep. Read by `train.py` and `checkpoints/writing.py`."""

from pydantic import PositiveInt

from podium.recipe.durations import Duration
from podium.recipe.section import Section
from podium.recipe.sections.metric import BestSection


class CheckpointSection(Section):
    """When to save and what to keep."""

    every: Duration = Duration(1, "ep")
    #: how many of the newest checkpoints are kept
    keep: PositiveInt = 2
    #: also keep the checkpoint of the best validation (saved when it is found): by its loss, or by another metric
    best: bool | BestSection = True

    @property
    def ranking(self) -> BestSection:
        """Return what the best validation is chosen by."""
        return self.best if isinstance(self.best, BestSection) else BestSection()
