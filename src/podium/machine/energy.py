"""The energy that processors have used, by the counters that the system offers (RAPL, `/sys/class/powercap`).

The counters are of the whole host, whoever computes on it. Nothing is estimated: where they are missing, or may not be
read by this user, the answer is a reason instead of a number.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from podium.machine.bounded_files import read_limited

POWERCAP = Path("/sys/class/powercap")
#: the zones of a processor package, and inside them those of its memory; other zones repeat a part of these
_PACKAGE, _PART = re.compile(r"intel-rapl:\d+"), re.compile(r"intel-rapl:\d+:\d+")
_FILE_BYTES = 4096
#: counters begin again at their largest value; one that was not read for so long may have done so twice
_LONGEST_GAP_S = 200.0


@dataclass
class _Counter:
    folder: Path
    last_uj: int
    #: the largest value, after which it begins again at 0
    range_uj: int | None


class ProcessorEnergy:
    """Joules of all processor packages and their memory since this object was made."""

    def __init__(self, root: Path = POWERCAP, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_s, self._joules = clock, clock(), 0.0
        #: why nothing is known, empty while it is
        self.unknown = ""
        self._counters: list[_Counter] = []
        try:
            self._counters = [
                _Counter(folder, _integer(folder / "energy_uj"), _range(folder)) for folder in _zones(root)
            ]
        except PermissionError:
            self.unknown = f"the energy counters in {root} may not be read by this user"
        except (OSError, ValueError):
            self.unknown = f"the energy counters in {root} cannot be read"
        if not self._counters and not self.unknown:
            self.unknown = f"this machine offers no energy counters in {root}"

    def joules(self) -> float | None:
        """Return the energy so far, None where it is unknown."""
        now = self._clock()
        if not self.unknown and now - self._last_s > _LONGEST_GAP_S:
            self.unknown = f"the energy counters were not read for {now - self._last_s:.0f} s, and may have begun again"
        self._last_s = now
        for counter in self._counters if not self.unknown else ():
            try:
                self._joules += _advance(counter) / 1e6
            except (OSError, ValueError) as error:
                self.unknown = f"an energy counter can no longer be read ({type(error).__name__})"
        return None if self.unknown else self._joules


def _zones(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    names = sorted(folder.name for folder in root.iterdir())
    packages = [name for name in names if _PACKAGE.fullmatch(name) and _name(root / name).startswith("package")]
    memory = [
        name
        for name in names
        if _PART.fullmatch(name) and name.rpartition(":")[0] in packages and _name(root / name) == "dram"
    ]
    return [root / name for name in (*packages, *memory)]


def _advance(counter: _Counter) -> int:
    now = _integer(counter.folder / "energy_uj")
    more = now - counter.last_uj
    if more < 0:
        if counter.range_uj is None:
            raise ValueError("it went back, and its range is unknown")
        more += counter.range_uj
    counter.last_uj = now
    return more


def _name(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return _text(folder / "name")
    return ""


def _range(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        return _integer(folder / "max_energy_range_uj")
    return None


def _integer(path: Path) -> int:
    return int(_text(path))


def _text(path: Path) -> str:
    return read_limited(path, _FILE_BYTES).decode().strip()
