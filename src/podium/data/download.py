"""Downloads of public data sets: `podium data fetch NAME`.

A file is downloaded as `.part`, continued where an earlier attempt stopped, compared with its published sha256 and only
then renamed. Mirrors are tried in turn; all hold the same bytes, so one may finish what another began. The standard
library's urllib suffices here and follows proxy settings, so no HTTP package is required.
"""

import hashlib
import http.client
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podium import __version__
from podium.errors import UserError
from podium.machine.cache_folder import cache_folder

#: progress(file name, bytes so far, bytes in all where the server says)
Progress = Callable[[str, int, int | None], None]

TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 18
_SCHEMES = ("http", "https")
# A connection that breaks after delivering something is resumed this often before the next mirror is tried.
_MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set, the same on every mirror."""

    name: str
    sha256: str
    #: where the size is known; a mirror that sends more is left at once
    max_bytes: int = 1 << 34


@dataclass(frozen=True)
class DataSet:
    """The files of a data set and the addresses of the folders that hold them."""

    files: tuple[RemoteFile, ...]
    mirrors: tuple[str, ...]
    #: files to extract from the archives among them, with their sizes
    members: Mapping[str, int] = field(default_factory=dict)


DATA_SETS = {
    "mnist": DataSet(
        files=(
            RemoteFile(
                "train-images-idx3-ubyte.gz",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                9_912_422,
            ),
            RemoteFile(
                "train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881
            ),
            RemoteFile(
                "t10k-images-idx3-ubyte.gz",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                1_648_877,
            ),
            RemoteFile(
                "t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542
            ),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            "http://yann.lecun.com/exdb/mnist",
        ),
    ),
    "fashion-mnist": DataSet(
        files=(
            RemoteFile(
                "train-images-idx3-ubyte.gz",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                26_421_880,
            ),
            RemoteFile(
                "train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515
            ),
            RemoteFile(
                "t10k-images-idx3-ubyte.gz",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                4_422_102,
            ),
            RemoteFile(
                "t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148
            ),
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        ),
    ),
}

_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz",)
DATA_SETS["cifar10"] = DataSet(
    files=(
        RemoteFile(
            "cifar-10-binary.tar.gz", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", 200_000_000
        ),
    ),
    mirrors=_CIFAR_MIRRORS,
    members={**{f"data_batch_{i}.bin": 30_730_000 for i in range(1, 6)}, "test_batch.bin": 30_730_000},
)
DATA_SETS["cifar100"] = DataSet(
    files=(
        RemoteFile(
            "cifar-100-binary.tar.gz", "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec", 200_000_000
        ),
    ),
    mirrors=_CIFAR_MIRRORS,
    members={"train.bin": 153_700_000, "test.bin": 30_740_000},
)


class _MirrorError(Exception):
    """This mirror did not deliver; the text says why, for the user."""


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows servers to other web servers, and nowhere else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in _SCHEMES:
            raise urllib.error.URLError(f"it leads to {newurl[:100]}, which is not on the web")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens addresses on the web and of files: the library's own would also follow FTP and `data:`."""
    opener = urllib.request.OpenerDirector()
    kinds = (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.FileHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
        _WebOnly,
    )
    for kind in kinds:
        opener.add_handler(kind())
    return opener


def fetch(
    name: str,
    folder: Path | None = None,
    mirrors: list[str] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Return the files of data set `name` in `folder` (by default in the cache), downloading those that are missing.

    A file that differs from the published one is replaced. `mirrors` replaces the built-in addresses. Mirrors in
    `$PODIUM_MIRROR` (comma-separated) come before all others; they may hold the files directly or in a folder named
    after the data set.
    """
    if name not in DATA_SETS:
        near = get_close_matches(name, DATA_SETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(DATA_SETS)}"
        raise UserError(f"There is no data set {name!r} to fetch: {hint}")
    data_set = DATA_SETS[name]
    folder = folder or cache_folder("data", name)
    own = _own_mirrors()
    addresses = [address for entry in own for address in (entry, f"{entry}/{name}")]
    addresses += [entry.rstrip("/") for entry in (data_set.mirrors if mirrors is None else mirrors)]
    report = progress or (lambda _name, _done, _total: None)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for file in data_set.files:
            path = folder / file.name
            if path.is_file() and _sha256(path) == file.sha256:
                report(file.name, path.stat().st_size, path.stat().st_size)
            else:
                good = _fetch_file(name, file, path, addresses, report)
                # A mirror that served this file most likely serves the next: do not wait for dead ones twice.
                addresses.remove(good)
                addresses.insert(0, good)
            paths.append(path)
        return [*paths, *_unpacked(paths, data_set.members)]
    except OSError as error:
        raise UserError(f"Cannot write {name} into {folder}: {error.strerror or error}") from None


def _own_mirrors() -> list[str]:
    """Return the addresses in `$PODIUM_MIRROR`; raise UserError if one is no address."""
    own = [entry.strip().rstrip("/") for entry in os.environ.get("PODIUM_MIRROR", "").split(",") if entry.strip()]
    for entry in own:
        try:
            parts = urlsplit(entry)
            on_web = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
            good = (on_web or (parts.scheme == "file" and bool(parts.path))) and entry.isprintable()
        except ValueError:  # a port that is no number, half of an IPv6 address
            good = False
        if not good or " " in entry:
            raise UserError(
                f"PODIUM_MIRROR = {entry[:200]}: expected addresses separated by commas, each as in "
                "https://example.org/data or file:///data"
            )
    return own


def _unpacked(archives: list[Path], members: Mapping[str, int]) -> list[Path]:
    """Extract files from tar archives, by their names alone: the folders inside do not matter."""
    folder = archives[0].parent
    missing = {name for name, size in members.items() if not _has_size(folder / name, size)}
    for archive in archives if missing else []:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in missing and member.size == members[name]:
                    content = tar.extractfile(member)
                    assert content is not None
                    part = folder / f"{name}.part"
                    with part.open("wb") as target:
                        shutil.copyfileobj(content, target)
                    part.replace(folder / name)
                    missing.remove(name)
    if missing:
        raise UserError(f"{archives[0]} does not hold {', '.join(sorted(missing))}")
    return [folder / name for name in members]


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fetch_file(name: str, file: RemoteFile, path: Path, addresses: list[str], report: Progress) -> str:
    """Download one file; return the address that delivered it."""
    failures: dict[str, str] = {}
    for address in addresses:
        try:
            _fetch_from(f"{address}/{file.name}", file, path, report)
            return address
        except _MirrorError as failure:
            failures[urlsplit(address).netloc or address] = str(failure)
    tried = ", ".join(f"{host} ({reason})" for host, reason in failures.items()) or "any mirror"
    raise UserError(
        f"Could not fetch {file.name} of {name} from {tried}: put the files {_listed(DATA_SETS[name])} into "
        f"{path.parent} by hand, point `workload.data.path` at a folder that holds them, or set `PODIUM_MIRROR` to the "
        f"address of a server that does"
    )


def _fetch_from(url: str, file: RemoteFile, path: Path, report: Progress) -> None:
    """Download one file from one mirror, continuing an earlier part; raise _MirrorError if that fails."""
    part = path.with_name(path.name + ".part")
    attempt = 0
    while True:
        attempt += 1
        if part.exists() and not part.is_file():
            raise UserError(f"{part} is not a file: remove it")
        offset = part.stat().st_size if part.exists() else 0
        total = _stream(url, part, offset, report, file.max_bytes)
        num_bytes = part.stat().st_size
        if total is not None and num_bytes < total:
            if num_bytes > offset and attempt < _MAX_ATTEMPTS:
                continue
            # What arrived is kept: the next mirror, or the next call, continues from there.
            raise _MirrorError(f"broke off after {num_bytes:,} of {total:,} bytes")
        if _sha256(part) == file.sha256:
            part.replace(path)
            return
        part.unlink()
        # A wrong beginning from an earlier attempt may be the cause: give this mirror one clean start.
        if offset == 0 or attempt >= _MAX_ATTEMPTS:
            raise _MirrorError("its file does not have the published sha256")


def _stream(url: str, part: Path, offset: int, report: Progress, max_bytes: int) -> int | None:
    """Append to `part` what follows `offset`, or start over if the server cannot continue; return the whole size."""
    headers = {"User-Agent": f"podium/{__version__}"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        request = urllib.request.Request(url, headers=headers)
        response = _opener().open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
            # Nothing follows: the part is complete, or wrong, as its checksum will show.
            return None
        raise _MirrorError(f"HTTP {error.code} {str(error.reason)[:100]}".strip()) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _MirrorError(_reason(error)) from None

    with response:
        start = _range_start(response)
        if start not in (None, offset):
            raise _MirrorError("answered with a range that was not requested")
        done = start or 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and re.fullmatch(r"[0-9]{1,18}", length) else None
        if total is not None and total > max_bytes:
            raise _MirrorError(f"its file has {total:,} bytes, more than the {max_bytes:,} of the published one")
        name = part.name.removesuffix(".part")
        with part.open("ab" if done else "wb") as target:
            report(name, done, total)
            while chunk := _read_chunk(response):
                target.write(chunk)
                done += len(chunk)
                report(name, done, total)
                if done > max_bytes:
                    break
        if done > max_bytes:
            part.unlink()
            raise _MirrorError(f"it sent more than the {max_bytes:,} bytes of the published file")
    return total


def _read_chunk(response: http.client.HTTPResponse) -> bytes:
    """Return the next bytes; none at the end, and none when the connection breaks (which the size shows)."""
    try:
        return response.read(_CHUNK_BYTES)
    except http.client.IncompleteRead as error:
        return error.partial
    except (OSError, http.client.HTTPException):
        return b""


def _range_start(response: http.client.HTTPResponse) -> int | None:
    """Return where a partial answer begins; None for a whole one (servers may ignore Range)."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return None
    match = re.match(r"bytes ([0-9]{1,18})-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _reason(error: Exception) -> str:
    """Return why a connection failed, in few words; urllib wraps the cause."""
    cause = getattr(error, "reason", None) or error
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    return str(getattr(cause, "strerror", None) or cause)[:200]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(data_set: DataSet) -> str:
    *most, last = (file.name for file in data_set.files)
    return f"{', '.join(most)} and {last}" if most else last
