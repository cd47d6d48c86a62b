"""Files that grow while they are read: metric records and logs, a bounded part of them at a time."""

import os
from contextlib import suppress
from pathlib import Path

from podium.machine.bounded_files import open_regular
from podium.runs.facts import Record, parse_record
from podium.ui.visible import visible

#: what is read of a file that is longer when it is first seen, and what is read at once
_FIRST_BYTES, _CHUNK_BYTES = 64 << 20, 8 << 20
_LOG_BYTES, _LOG_LINE = 64 << 10, 1000
_MAX_CURVES, _MAX_POINTS = 128, 3000


class RecordTail:
    """The records of `metrics.jsonl`, as curves over updates; each call of `read` takes what has been added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = (0, 0)
        self._place, self._part = 0, b""
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self._every: dict[str, int] = {}
        self._skipped: dict[str, int] = {}
        self.last: Record = {}

    def read(self) -> None:
        with suppress(OSError), open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            # A resumed run replaces the file by one without the records of updates that it makes again.
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._place:
                self._begin((status.st_dev, status.st_ino), max(0, status.st_size - _FIRST_BYTES))
            file.seek(self._place)
            data = file.read(_CHUNK_BYTES)
            self._place += len(data)
            *lines, self._part = (self._part + data).split(b"\n")
            self._part = self._part[-(1 << 20) :]
            for line in lines:
                record = parse_record(line)
                if record is not None:
                    self._add(record)

    def _begin(self, file: tuple[int, int], place: int) -> None:
        self._file, self._place, self._part = file, place, b""
        self.curves, self._every, self._skipped, self.last = {}, {}, {}, {}

    def _add(self, record: Record) -> None:
        self.last = {**self.last, **record}
        for name, value in record.items():
            if "/" not in name or name.startswith(("time/", "topology/")) or len(name) > 100:
                continue
            if name not in self.curves and len(self.curves) >= _MAX_CURVES:
                continue
            points = self.curves.setdefault(name, [])
            skipped = self._skipped.get(name, 0) + 1
            if skipped < self._every.get(name, 1):
                self._skipped[name] = skipped
                continue
            self._skipped[name] = 0
            points.append((float(record["update"]), float(value)))
            if len(points) > _MAX_POINTS:
                del points[1::2]
                self._every[name] = 2 * self._every.get(name, 1)


def log_tail(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, without anything that could steer a terminal."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
        return [visible(line[:_LOG_LINE]) for line in lines if line.strip()][-count:]
    return []
