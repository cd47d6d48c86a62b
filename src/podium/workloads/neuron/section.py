"""The recipe sections of neuron: `workload.model`, `workload.data`. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from podium.layers.section import NormSection
from podium.recipe.section import Section


class NeuronModel(Section):
    """`workload.model` of neuron. The defaults give the full published model."""

    #: cnn: convolutions; lstm: the last hidden state of an LSTM; both into the same linear layers
    kind: Literal["cnn", "lstm"] = "cnn"
    #: cnn: how (bins, probes) become (probes, bins). transpose: a channel for each probe; reshape: the numbers are read
    #: on in their order, as in the published trainer
    frames: Literal["transpose", "reshape"] = "transpose"
    #: cnn: filters, kernel size and max-pool of the convolution in each block
    filters: tuple[PositiveInt, ...] = (30, 90, 180)
    kernels: tuple[PositiveInt, ...] = (4, 4, 4)
    pools: tuple[PositiveInt, ...] = (4, 4, 4)
    #: lstm: size of the hidden state, number of stacked layers
    lstm_hidden: PositiveInt = 120
    lstm_layers: PositiveInt = 1
    #: lstm: consecutive time bins read in one step; 1 is the published form, with 1,600 steps
    lstm_patch: PositiveInt = 16
    #: of the features that enter the linear layers
    norm: NormSection = NormSection()
    #: widths of the linear layers before the last one
    linear: tuple[PositiveInt, ...] = (512, 512, 512, 256, 128)
    #: share of each linear layer's outputs zeroed in training
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    #: scale voltages to mean 0 and standard deviation 1, probe by probe: for files that hold plain mV
    standardise: bool = False

    @model_validator(mode="after")
    def _as_many_of_each(self) -> Self:
        if not self.filters or not len(self.filters) == len(self.kernels) == len(self.pools):
            raise ValueError(
                "workload.model.filters, kernels and pools: expected one entry for each block, got "
                f"{len(self.filters)}, {len(self.kernels)} and {len(self.pools)}"
            )
        return self


SIMULATED_PROBE = "excite_4prB8kHz"


class NeuronData(Section):
    """`workload.data` of neuron."""

    #: files: the published layout in `path`; simulated: made once, kept in the cache; generated: random numbers
    source: Literal["files", "simulated", "generated"] = "simulated"
    #: folder of the meta and HDF5 files
    path: Path | None = None
    #: which cell's file in that folder (witness2c, …); may be left out when there is only one
    cell: str | None = None
    #: which meta file: meta.cellSpike_<probe>.yaml
    probe: str = SIMULATED_PROBE
    #: training cells to simulate or generate; valid and test are additional, a tenth each
    samples: PositiveInt = 10_000
    #: seed of simulated and generated samples
    seed: NonNegativeInt = 1
    #: use only this many training samples, the first ones; valid and test shrink in proportion
    max_samples: PositiveInt | None = None
    #: fewer probes: how many of the first ones, or a list of their numbers from 0
    probes: Annotated[int, Field(ge=1)] | tuple[NonNegativeInt, ...] | None = None
    #: samples beyond this are read from the file as needed; by default half of the memory available at the start
    memory_budget_gb: NonNegativeFloat | None = None

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited files, which do not apply to simulated cells."""
        return ("path", "cell") if written.get("source") == "simulated" else ()

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        # Otherwise training on samples other than those in the named folder would go unnoticed.
        if self.source == "simulated" and (self.path is not None or self.cell is not None):
            raise ValueError(
                "workload.data.path and cell do not apply to workload.data.source = simulated: set the source to "
                "files, or both to null"
            )
        if isinstance(self.probes, tuple) and (not self.probes or len(set(self.probes)) < len(self.probes)):
            raise ValueError(f"workload.data.probes = {list(self.probes)}: expected at least one probe, and none twice")
        return self

    def stand_in(self) -> dict[str, Any]:
        """Return the keys of random voltages."""
        return {"source": "generated", "path": None, "cell": None}


class NeuronMake(Section):
    """The keys of `podium data make neuron`: the cells to simulate, the folder for the files, and so on."""

    samples: PositiveInt
    out: Path
    seed: NonNegativeInt = 1
    cell: str = "simulated"
    dtype: Literal["float16", "float32"] = "float16"
    valid: PositiveInt | None = None
    test: PositiveInt | None = None


ModelSection, DataSection = NeuronModel, NeuronData
