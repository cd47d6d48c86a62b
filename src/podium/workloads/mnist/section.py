"""The recipe sections of mnist: `workload.model`, `workload.data`. Does not import torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from podium.recipe.section import Section


class MnistModel(Section):
    """`workload.model` of mnist."""

    #: filters of the two convolutions
    filters: tuple[PositiveInt, PositiveInt] = (32, 64)
    #: width of the hidden linear layer
    hidden: PositiveInt = 128
    #: share of hidden values zeroed in training
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    #: labels are bytes
    num_classes: Annotated[int, Field(ge=2, le=256)] = 10
    #: softmax: probabilities go into the cross-entropy (which applies a softmax of its own), as in the published model
    output: Literal["logits", "softmax"] = "logits"


class MnistData(Section):
    """`workload.data` of mnist."""

    source: Literal["files", "generated"] = "files"
    #: folder with the four IDX files; by default where `podium data fetch mnist` puts them
    path: Path | None = None
    #: training samples held out for validation, the last ones; null: a tenth of them (generated: as many as for test,
    #: drawn in addition); 0: the test set validates, as in the published training
    valid_samples: NonNegativeInt | None = None
    #: maximum number of samples of each split
    max_samples: PositiveInt | None = None
    #: names for pictures and tables; by default the labels, or the published names in a folder named after fashion
    class_names: tuple[str, ...] | None = None
    #: generated: number of samples for training and for test, and their seed
    generated_train: PositiveInt = 60_000
    generated_test: PositiveInt = 10_000
    generated_seed: Annotated[int, Field(ge=0)] = 0

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random images."""
        return {"source": "generated", "path": None}


ModelSection, DataSection = MnistModel, MnistData
