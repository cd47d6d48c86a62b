"""The `valid` section: when and how to validate. `training/evaluate.py` does it."""

from pydantic import NonNegativeInt, PositiveInt

from podium.recipe.durations import Duration
from podium.recipe.section import Section


class ValidSection(Section):
    """When and how to validate."""

    #: also after the last update; 0 means only then
    every: Duration = Duration(1, "ep")
    #: samples in one forward pass
    micro: PositiveInt = 256
    #: use only this many samples, evenly spread over the split
    max_samples: PositiveInt | None = None
    #: recompute the statistics of batch norm over this many micro-batches of the training set first; 0: validate with
    #: the running ones
    recalibrate: NonNegativeInt = 0
