"""Variables of the environment that change the bits of results: which instructions, and so which order of additions,
the libraries below torch choose. Found by training with each of them; docs/exactness.md lists them."""

from collections.abc import Mapping

#: those that changed weights in trials, and their documented other names
NUMERICS_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)


def numerics_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return those that are set, by name."""
    return {name: env[name] for name in NUMERICS_VARIABLES if env.get(name)}
