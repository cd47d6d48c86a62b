"""The `average` section: averages of weights during training. `optim/averaging.py` computes them."""

from typing import Annotated, Literal

from pydantic import Field

from podium.recipe.durations import Duration
from podium.recipe.section import Section

Method = Literal["mean", "exponential"]


class AverageSection(Section):
    """`average`: weights averaged during training, validated and saved together with the weights themselves.

    `average: mean` alone sets the method.
    """

    #: mean: of all samples of the weights; exponential: average <- decay · average + (1 - decay) · weights
    method: Literal["none"] | Method = "none"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.97
    #: how often the weights are sampled
    every: Duration = Duration(1, "ep")
    #: when averaging starts
    start: Duration = Duration(0, "up")
