"""Removing old checkpoints without ever removing the last good ones.

Only checkpoints that verify are counted, so damaged ones and whatever else lies in the folder push no good one out.
Reading every byte at every save would cost more than saving, so each checkpoint is read at most once:

- one that this process has written is good: its checksums were taken from the bytes on their way to the disk;
- any other is read once, in pieces, and only if it is among the newest `keep`, by the thread that writes checkpoints;
- at every look, the manifest and the sizes of all files are compared with what they were: a few system calls.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from podium.checkpoints.reading import FORMAT, PREFIX, checkpoint_paths, remove
from podium.checkpoints.tensor_file import CHECKSUMS

_NAME = re.compile(rf"{PREFIX}\d{{8,}}")
_CHUNK_BYTES = 1 << 22
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 24

#: what is compared at every look: (name, bytes, time of the last change) of every file
Outline = tuple[tuple[str, int, int], ...]


class Pruner:
    """What is known of the checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: by name: the outline that a checkpoint had when it was last verified, and whether it was good
        self._known: dict[str, tuple[Outline, bool]] = {}

    def has_written(self, path: Path) -> None:
        """Note a checkpoint that this process has just written."""
        self._known[path.name] = (_outline(path), True)

    def prune(self, keep: int, best_update: int | None) -> None:
        """Remove checkpoints older than the newest `keep` good ones, but not the best; other entries stay.

        A damaged one stays as long as it is not older than these. Nothing is removed where fewer are good.
        """
        paths = [p for p in checkpoint_paths(self._folder) if _NAME.fullmatch(p.name) and not p.is_symlink()]
        paths.sort(key=lambda path: int(path.name.removeprefix(PREFIX)))
        num_good = 0
        while paths and num_good < keep:
            num_good += self._is_good(paths.pop())
        if num_good < keep:
            return
        for path in paths:
            if best_update is None or int(path.name.removeprefix(PREFIX)) != best_update:
                with suppress(OSError):  # one too many is no reason to end a training
                    remove(path)
                self._known.pop(path.name, None)

    def _is_good(self, path: Path) -> bool:
        outline = _outline(path)
        known, good = self._known.get(path.name, ((), False))
        if not outline or outline != known:
            good = bool(outline) and _verifies(path)
            self._known[path.name] = (outline, good)
        return good


def _outline(path: Path) -> Outline:
    """Return the outline of a checkpoint; nothing where it cannot be looked at or has something else than files."""
    try:
        with os.scandir(path) as entries:
            files = [(entry.name, entry.is_file(follow_symlinks=False), entry.stat()) for entry in entries]
    except OSError:
        return ()
    if not all(is_file for _, is_file, _ in files):
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, _, stat in files))


def _verifies(path: Path) -> bool:
    """Return whether every file that the manifest names has its checksum; sizes first, as they cost nothing."""
    try:
        if (path / _MANIFEST).stat().st_size > _MAX_MANIFEST_BYTES:
            return False
        manifest = json.loads((path / _MANIFEST).read_bytes())
        files = manifest["files"]
        if manifest["format"] not in range(1, FORMAT + 1) or not {"state.json"} < files.keys():
            return False
        if any(os.sep in name or (path / name).stat().st_size != wanted["bytes"] for name, wanted in files.items()):
            return False
        return all(_has_checksum(path / name, wanted) for name, wanted in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _has_checksum(path: Path, wanted: dict[str, str]) -> bool:
    (kind,) = CHECKSUMS.keys() & wanted.keys()
    digest, buffer = CHECKSUMS[kind](), bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return bool(digest.hexdigest() == wanted[kind])
