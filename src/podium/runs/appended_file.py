"""A file that grows at its end, for records that a kill must not lose."""

from pathlib import Path

from podium.errors import writing
from podium.machine.bounded_files import append_regular


class AppendedFile:
    """A file that grows at its end. What was written is with the system when `append` returns: a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = append_regular(path)

    def append(self, data: bytes) -> None:
        with writing(self._path):
            while data:  # a disk that fills up takes a part first and refuses the rest
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()
