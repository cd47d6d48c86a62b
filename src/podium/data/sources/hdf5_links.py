"""Where the numbers of an HDF5 dataset are: in its own file, or nothing is read.

HDF5 files may lead to others: by external links, also behind soft ones, by storage in other files, and by virtual
datasets made of parts of others. Any of these may name any file that the user can read, or a named pipe that nobody
writes to. All of this is found out from the file's structure before HDF5 follows it.
"""

from pathlib import Path

import h5py

from podium.errors import UserError

_MAX_LINKS = 16


def follow_links(path: Path, file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return the dataset of that name, None if there is none; raise UserError if the way to it leaves the file."""
    parts, group = _parts(name), file["/"]
    for _ in range(_MAX_LINKS):
        soft = None
        for index, part in enumerate(parts):
            link = group.get(part, getlink=True)
            if link is None or not isinstance(link, h5py.HardLink | h5py.SoftLink):
                if link is None:
                    return None
                raise _elsewhere(path, name, "is a link to another file")
            if isinstance(link, h5py.SoftLink):
                soft = link.path
                if soft.startswith("/"):
                    group = file["/"]
                parts = [*_parts(soft), *parts[index + 1 :]]
                break
            found = group[part]
            if index == len(parts) - 1:
                return found if isinstance(found, h5py.Dataset) else None
            if not isinstance(found, h5py.Group):
                return None
            group = found
        if soft is None:
            return None
    raise UserError(f"{path}: {name} is behind more than {_MAX_LINKS} links")


def check_own_numbers(path: Path, file: h5py.File, dataset: h5py.Dataset, depth: int = 0) -> None:
    """Raise UserError unless all numbers of a dataset are in its own file."""
    name, layout = dataset.name, dataset.id.get_create_plist()
    if layout.get_external_count():
        raise _elsewhere(path, name, "has its numbers in another file")
    if layout.get_layout() != h5py.h5d.VIRTUAL:
        return
    if depth >= _MAX_LINKS:
        raise UserError(f"{path}: {name} is made of virtual datasets more than {_MAX_LINKS} levels deep")
    sources = set()
    for index in range(layout.get_virtual_count()):
        # "." is this file; %b stands for any number of files or datasets
        if layout.get_virtual_filename(index) != "." or "%" in layout.get_virtual_dsetname(index):
            raise _elsewhere(path, name, "is made of parts of other files")
        sources.add(layout.get_virtual_dsetname(index))
    for source in sources:
        found = follow_links(path, file, source)
        if found is None:  # HDF5 would fill the gap and say nothing
            raise UserError(f"{path}: {name} is made of {source}, which is not there")
        check_own_numbers(path, file, found, depth + 1)


def describe_dataset(dataset: h5py.Dataset) -> list[str]:
    """Return shape, type and layout of a dataset for people, without looking into other files."""
    plan = dataset.id.get_create_plist()
    if plan.get_external_count():
        return ["", str(dataset.dtype), "in another file"]
    if plan.get_layout() == h5py.h5d.VIRTUAL:
        return ["", str(dataset.dtype), "virtual"]
    if dataset.shape is None:
        return ["nothing", str(dataset.dtype), ""]
    layout = f"chunks {' × '.join(map(str, dataset.chunks))}" if dataset.chunks else "contiguous"
    return [" × ".join(map(str, dataset.shape)), str(dataset.dtype), layout]


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _elsewhere(path: Path, name: str, reason: str) -> UserError:
    return UserError(
        f"{path}: {name} {reason}, and only numbers in the file itself are read: copy them into it, with `h5repack` or "
        "h5py"
    )
