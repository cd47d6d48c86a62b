"""Which processor this machine has. Used by `kernels/registry.py` and by the environment that runs record."""

import functools
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """Return the name of the machine's processor."""
    return _field("model name") or platform.processor() or platform.machine()


@functools.cache
def maker() -> str:
    """Return who made it, in its own words (`AuthenticAMD`, `GenuineIntel`); empty where Linux does not say."""
    return _field("vendor_id")


def _field(wanted: str) -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(wanted)), "")
