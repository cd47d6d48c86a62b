"""How far a run is, from its folder at another place: `summary.json`, and the last record, which is newer."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from podium.machine.bounded_files import parse_mapping
from podium.submit.shell import Shell

_SUMMARY_BYTES, _RECORD_BYTES = 1 << 20, 1 << 16


def summary_of(shell: Shell, folder: PurePosixPath) -> Mapping[str, Any]:
    """Return a run's summary with the update of its last record; of a folder without a run, nothing."""
    summary = _mapping(shell.read(folder / "summary.json", _SUMMARY_BYTES) or b"")
    said = shell.run(["tail", "-n", "2", "--", str(folder / "metrics.jsonl")]).text[-_RECORD_BYTES:]
    # The last line may be half written.
    updates = [_mapping(line.encode()).get("update") for line in said.splitlines()]
    known = [update for update in (*updates, summary.get("updates")) if isinstance(update, int)]
    return {**summary, **({"updates": max(known)} if summary and known else {})}


def _mapping(data: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        return parse_mapping(data)
    return {}
