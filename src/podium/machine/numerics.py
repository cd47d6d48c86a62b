"""Variables of the environment that choose instructions for the libraries below torch, and so the bits of results.

ATEN_CPU_CAPABILITY, MKL_CBWR and ONEDNN_MAX_CPU_ISA changed the weights of bert and cnn on an AMD processor. The others
did not there; their documentation says that they do on other processors.
"""

from collections.abc import Mapping

#: DNNL_ is the older name of ONEDNN_
NUMERICS_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)


def numerics_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return those that are set, by name."""
    return {name: env[name] for name in NUMERICS_VARIABLES if env.get(name)}
