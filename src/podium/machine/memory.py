"""Memory of this host and of this process: what there is, what is free, what was the most."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
#: above this, a limit of a control group is none
_NO_LIMIT_BYTES = 1 << 60

_num_instances = 1


def divide_memory(num_instances: int) -> None:
    """Divide the default memory budget by the number of instances that open their samples on this host."""
    global _num_instances
    _num_instances = num_instances


def num_sharing() -> int:
    """Return the number of instances that share the memory of this host, this one included."""
    return _num_instances


def host_bytes() -> tuple[int, int]:
    """Return (all memory that the processes here may have, what of it is available now), control groups included."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _group_limits():
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _group_limits() -> list[tuple[int, int]]:
    """Return (limit, used without what can be given back) of the control groups around this process."""
    limits = []
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, name = line.split(":", 2)
            if not kinds:  # version 2
                root, limit, used, cached = Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"
            elif "memory" in kinds.split(","):
                root = Path("/sys/fs/cgroup/memory")
                limit, used, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            group = root / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    limits += _limit_of(folder, limit, used, cached)
    return limits


def _limit_of(folder: Path, limit: str, used: str, cached: str) -> list[tuple[int, int]]:
    with suppress(OSError, ValueError):  # no such group in this container's view, or "max"
        most = int((folder / limit).read_text(encoding="utf-8"))
        now = int((folder / used).read_text(encoding="utf-8"))
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        given_back = next((int(line.split()[1]) for line in lines if line.startswith(f"{cached} ")), 0)
        if most < _NO_LIMIT_BYTES:
            return [(most, max(0, now - given_back))]
    return []


def resident_bytes() -> int:
    """Return the memory of this process that is in use now."""
    return _status("VmRSS:")


def peak_bytes() -> int:
    """Return the most that this process has used since `reset_peak`."""
    return _status("VmHWM:")


def reset_peak() -> bool:
    """Give unused memory back to the system and forget the peak so far; return whether the system can do that."""
    with suppress(OSError, AttributeError):  # not glibc, or not Linux
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="utf-8")
        return _status("VmHWM:") > 0
    return False


def _status(name: str) -> int:
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0
