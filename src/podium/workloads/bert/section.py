"""The recipe sections of bert: `workload.model`, `workload.data`. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from podium.recipe.section import Section
from podium.workloads.bert.huggingface_config import model_of
from podium.workloads.huggingface_config import FolderModel

#: layers, hidden, heads of the published sizes
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
_INNER = 4


class BertModel(Section):
    """`workload.model` of bert."""

    #: base and large as published; custom: set by `layers`, `hidden` and `heads`
    size: Literal["base", "large", "custom"] = "base"
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    #: width inside the feed-forward layers; null: 4 times hidden
    inner: PositiveInt | None = None
    #: number of tokens; null: that of the data
    vocabulary: PositiveInt | None = None
    #: longest sequence
    max_positions: PositiveInt = 512
    #: kinds of parts in a sequence
    segments: PositiveInt = 2
    #: added to variances in layer norms
    norm_eps: PositiveFloat = 1e-12
    #: share of values zeroed in training, after embeddings and within blocks
    dropout: float = Field(0.1, ge=0, lt=1)
    #: share of attention weights zeroed in training
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    #: standard deviation of the initial weights; narrow models learn sooner with a larger one
    init_std: PositiveFloat = 0.02
    #: the word embedding is also the last layer of the head that predicts words
    tied: bool = True
    #: in feed-forward layers and the head: GELU by the error function (as published) or a hyperbolic tangent, or ReLU
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited numbers that do not apply to a published size."""
        return ("layers", "hidden", "heads") if written.get("size") in SIZES else ()

    @classmethod
    def of_huggingface(cls, config: Mapping[str, Any]) -> FolderModel:
        """Return what the `config.json` of a folder of weights says about the model."""
        return model_of(config)

    @model_validator(mode="after")
    def _sized(self) -> Self:
        given = {name: getattr(self, name) for name in ("layers", "hidden", "heads")}
        if self.size == "custom":
            if missing := [name for name, value in given.items() if value is None]:
                raise ValueError(
                    f"workload.model.size = custom needs {' and '.join(f'workload.model.{key}' for key in missing)}"
                )
        else:
            for (name, value), published in zip(given.items(), SIZES[self.size], strict=True):
                if value not in (None, published):
                    raise ValueError(
                        f"workload.model.{name} = {value}: expected {published} with workload.model.size = "
                        f"{self.size}; custom takes any number"
                    )
        if self.shape[1] % self.shape[2]:
            raise ValueError(
                f"workload.model.hidden = {self.shape[1]}: expected a multiple of workload.model.heads = "
                f"{self.shape[2]}"
            )
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (layers, hidden, heads)."""
        if self.size != "custom":
            return SIZES[self.size]
        assert self.layers
        assert self.hidden
        assert self.heads
        return self.layers, self.hidden, self.heads

    @property
    def num_inner(self) -> int:
        return self.inner or _INNER * self.shape[1]

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of a narrow model with as many layers."""
        small = {"size": "custom", "layers": self.shape[0], "hidden": 16, "heads": 2, "inner": 32}
        return small | ({"vocabulary": 200} if generated else {})


class BertData(Section):
    """`workload.data` of bert."""

    #: text: a folder of `podium data make text`; tfrecord: the published files; generated: random tokens
    source: Literal["text", "tfrecord", "generated"] = "text"
    #: the folder; text without one: Python's standard library, converted once and kept in the cache
    path: Path | None = None
    #: text without a path: size of the vocabulary that is trained for it
    vocabulary: PositiveInt = 8192
    #: tokens in a row
    length: int = Field(128, ge=8, le=65_535)
    #: several sequences in a row, none of which attends to the others
    packed: bool = False
    #: packed: maximum number of sequences in a row
    max_sequences: int = Field(3, ge=1, le=64)
    #: share of the tokens to predict
    mask_share: float = Field(0.15, gt=0, le=0.5)
    #: maximum number of them in a sequence that fills its row; null: 20 at length 128, 76 at 512, else by the share
    masked_slots: PositiveInt | None = None
    #: share of sequences that have a random shorter length
    short_share: float = Field(0.1, ge=0, le=1)
    #: what is drawn again every epoch: masks, or pairs of sentences as well
    redraw: Literal["masks", "pairs", "none"] = "masks"
    #: seed of pairs, masks and random tokens
    seed: NonNegativeInt = 0
    #: generated: training rows; valid and test are additional, a twentieth each
    samples: PositiveInt = 100_000
    #: maximum number of rows of each split
    max_samples: PositiveInt | None = None

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited keys that do not apply to another source."""
        return {"generated": ("path",), "tfrecord": ("packed",)}.get(str(written.get("source")), ())

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if self.source == "tfrecord" and self.packed:
            raise ValueError("workload.data.packed = true: expected false with workload.data.source = tfrecord")
        if self.source == "generated" and self.path is not None:
            raise ValueError("workload.data.path does not apply to workload.data.source = generated: set it to null")
        return self

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of short rows, where no file says how long they are."""
        return {"length": min(self.length, 32), "masked_slots": None} if generated else {}

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random tokens."""
        return {"source": "generated", "path": None, "samples": max(self.samples, 1_000_000)}


ModelSection, DataSection = BertModel, BertData
