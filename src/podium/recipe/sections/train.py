"""The `train` section: how long to train."""

from podium.recipe.durations import Duration, Seconds
from podium.recipe.section import Section
from podium.recipe.sections.metric import StopSection


class TrainSection(Section):
    """How long to train."""

    length: Duration
    #: stop early where a metric of the validation no longer improves
    stop: StopSection | None = None
    #: wall-clock time after which the run saves a checkpoint and exits with 75, to be resumed
    time_limit: Seconds | None = None
