"""The recipe sections of gpt2: `workload.model`, `workload.data`. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from podium.recipe.section import Section
from podium.workloads.gpt2.huggingface_config import model_of
from podium.workloads.huggingface_config import FolderModel

Size = Literal["small", "medium", "large", "xl", "custom"]
#: size -> layers, hidden size, heads
_SIZES: dict[str, tuple[int, int, int]] = {
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}
Share = Annotated[float, Field(ge=0, lt=1)]


class Gpt2Model(Section):
    """`workload.model` of gpt2."""

    #: published sizes; custom: set by the three numbers below
    size: Size = "small"
    #: custom: blocks, width, attention heads
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    #: maximum number of tokens the model can look back on, including the newest; training windows have this length
    context: PositiveInt = 1024
    #: number of tokens; null: that of the data (50,257 for generated tokens)
    vocabulary: PositiveInt | None = None
    #: rows of the embedding are padded to a multiple of this; the added ones are never predicted
    pad_vocabulary_to: PositiveInt = 1
    #: share of values zeroed in training: in embeddings, attention weights and the outputs of layers
    dropout: Share = 0.1
    #: the head shares the weights of the embedding
    tied: bool = True
    #: width inside the feed-forward layers; null: 4 times the model's
    inner: PositiveInt | None = None
    #: in feed-forward layers: GELU by a hyperbolic tangent (as published) or the error function, or ReLU
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    #: added to variances in layer norms
    norm_eps: PositiveFloat = 1e-5
    #: products of queries and keys are divided by the root of a head's size
    scale_attention: bool = True
    #: and by the number of their block, counted from 1
    scale_by_layer: bool = False

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited numbers that do not apply to a published size."""
        return ("layers", "hidden", "heads") if written.get("size") in _SIZES else ()

    @classmethod
    def of_huggingface(cls, config: Mapping[str, Any]) -> FolderModel:
        """Return what the `config.json` of a folder of weights says about the model."""
        return model_of(config)

    @model_validator(mode="before")
    @classmethod
    def _numbers_mean_custom(cls, values: Any) -> Any:
        """Set the size to custom if only the numbers are given."""
        if isinstance(values, dict) and "size" not in values and any(values.get(k) for k in ("layers", "hidden")):
            return {**values, "size": "custom"}
        return values

    @model_validator(mode="after")
    def _complete(self) -> "Gpt2Model":
        numbers = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        given = [name for name, value in numbers.items() if value is not None]
        missing = [name for name, value in numbers.items() if value is None]
        if self.size == "custom" and missing:
            raise ValueError(
                f"workload.model.size = custom needs {' and '.join(f'workload.model.{key}' for key in missing)}"
            )
        if self.size != "custom" and given:
            raise ValueError(
                f"workload.model.{given[0]} does not apply to workload.model.size = {self.size}: custom takes it"
            )
        if self.hidden is not None and self.heads is not None and self.hidden % self.heads:
            raise ValueError(
                f"workload.model.hidden = {self.hidden}: expected a multiple of workload.model.heads = {self.heads}"
            )
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (layers, hidden size, heads)."""
        if self.size != "custom":
            return _SIZES[self.size]
        assert self.layers is not None
        assert self.hidden is not None
        assert self.heads is not None
        return self.layers, self.hidden, self.heads

    @property
    def num_inner(self) -> int:
        return self.inner or 4 * self.shape[1]

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of a narrow model with as many blocks."""
        small = {"size": "custom", "layers": self.shape[0], "hidden": 16, "heads": 2, "inner": 32}
        return small | {"context": min(self.context, 32)} | ({"vocabulary": 200} if generated else {})


class SampleSection(Section):
    """How `podium predict` samples text from the model."""

    #: text to continue; empty: the beginning of a document
    prompt: str = ""
    #: number of texts, and tokens in each
    texts: PositiveInt = 3
    tokens: PositiveInt = 256
    #: below 1: more conservative than the model, above 1: more varied; 0: always the most likely token
    temperature: Annotated[float, Field(ge=0)] = 0.8
    #: sample only from this many of the most likely tokens; null: all
    top_k: PositiveInt | None = 50
    seed: NonNegativeInt = 0


class Gpt2Data(Section):
    """`workload.data` of gpt2."""

    #: text: a file of it, or a folder of `podium data make text`; files: of tokens, flat or indexed; generated: random
    #: tokens, for speed
    source: Literal["text", "files", "generated"] = "text"
    #: text: its file or folder, null: Python's standard library; files: a .bin, or a folder with train.bin, …
    path: Path | None = None
    #: text that is not tokens yet: how it is tokenized, and the maximum size of the vocabulary
    tokenizer: Literal["bpe", "char"] = "bpe"
    vocabulary: PositiveInt | None = None
    #: type of the tokens in flat files
    dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    #: one file for all splits: the last two parts of this size are for validation and test
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    #: tokens predicted in a window; null: the model's context
    length: PositiveInt | None = None
    #: training: tokens from the start of one window to the start of the next; null: the length
    stride: PositiveInt | None = None
    #: the same for validation and test; null: the length, so that every token but the first is predicted once
    valid_stride: PositiveInt | None = None
    #: maximum number of windows of each split: the first for training, else evenly spread ones
    max_samples: PositiveInt | None = None
    #: generated: number of windows for training and for test, and their seed
    samples: PositiveInt = 10_000
    test_samples: PositiveInt = 1_000
    sample_seed: NonNegativeInt = 0
    sample: SampleSection = SampleSection()

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited prompt, with what belongs to it, where a text takes the standard library's place."""
        return ("sample",) if written.get("path") is not None and inherited.get("path") is None else ()

    def made_small(self, *, generated: bool) -> dict[str, Any]:
        """Return the keys of windows that are as long as the small model's context."""
        return {"length": None, "stride": None, "valid_stride": None}

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random tokens."""
        return {"source": "generated", "path": None, "samples": max(self.samples, 1_000_000)}


ModelSection, DataSection = Gpt2Model, Gpt2Data
