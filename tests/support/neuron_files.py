"""Files of the neuron workload in the published layout, with few cells."""

from pathlib import Path

import h5py
import numpy as np
from ruamel.yaml import YAML

SIZES = {"train": 50, "val": 20, "test": 10}
NAMES = [f"par{i}" for i in range(15)]
PROBE = "excite_4prB8kHz"
TEMPLATE = "*_excite.cellSpike_4prB8kHz.data.h5"


def write_meta(folder: Path, **changes):
    info = {"h5nameTemplate": TEMPLATE, "numFeature": 4, "parName": NAMES, **changes}
    info = {key: value for key, value in info.items() if value is not None}
    with (folder / f"meta.cellSpike_{PROBE}.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump({"dataInfo": info}, file)


def write_published(folder: Path, cell="bbp153", dtype="float16", bins=1600, num_parameters=15):
    """A data set in the published layout, and its numbers."""
    rng = np.random.default_rng(len(cell))
    arrays = {}
    for domain, size in SIZES.items():
        unit = rng.uniform(-1, 1, (size, num_parameters)).astype(np.float32)
        arrays[f"{domain}_frames"] = (rng.normal(-65, 20, (size, bins, 4))).astype(dtype)
        arrays[f"{domain}_unitStar_par"] = unit
        arrays[f"{domain}_phys_par"] = 10**unit
    with h5py.File(folder / TEMPLATE.replace("*", cell), "w") as file:
        for name, array in arrays.items():
            file[name] = array
    write_meta(folder)
    return arrays
