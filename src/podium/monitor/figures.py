"""The figures of a host in words: what is measured with its unit, what is unknown with the reason."""

from collections.abc import Callable, Mapping

_Format = Callable[[float], str]


def bytes_text(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB" if abs(value) < 999.5 else f"{value / 1000:.3g} TB"


def _rate(value: float) -> str:
    return f"{bytes_text(value)}/s"


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _energy(value: float) -> str:
    return f"{value:,.0f} J" if value < 36e3 else f"{value / 3.6e6:.3g} kWh"


def _power(value: float) -> str:
    return f"{value:.3g} W"


#: name in records and files -> name for people, and its form
SHOWN: dict[str, tuple[str, _Format]] = {
    "cpu_percent": ("processor", _percent),
    "memory_bytes": ("memory", bytes_text),
    "disk_read_bytes_per_s": ("disk read", _rate),
    "disk_write_bytes_per_s": ("disk written", _rate),
    "network_received_bytes_per_s": ("network in", _rate),
    "network_sent_bytes_per_s": ("network out", _rate),
    "power_w": ("power", _power),
    "energy_j": ("energy", _energy),
    "accelerator_percent": ("accelerator", _percent),
    "accelerator_memory_bytes": ("accelerator memory", bytes_text),
    "accelerator_power_w": ("accelerator power", _power),
    "accelerator_energy_j": ("accelerator energy", _energy),
}


def measured(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (name, value) of the figures that were measured, for people."""
    return [(name, form(values[key])) for key, (name, form) in SHOWN.items() if key in values]


def missing(values: Mapping[str, float], unknown: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (names, reason) of those that are unknown, those of the same reason together."""
    found: dict[str, list[str]] = {}
    for key, (name, _) in SHOWN.items():
        if key in unknown and key not in values:
            found.setdefault(unknown[key], []).append(name)
    for names in found.values():
        if len(names) > 1 and all(name.startswith("accelerator") for name in names):
            names[:] = ["accelerator"]  # one word says it
    return [(", ".join(names), reason) for reason, names in found.items()]
