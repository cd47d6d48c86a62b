"""A study for other programs: an Optuna journal, which `optuna.load_study` and optuna-dashboard read; CSV; JSON."""

import json
import tempfile
from pathlib import Path

from podium.errors import UserError, writing
from podium.runs.folder import replace_file
from podium.study.definition import StudySection
from podium.study.folder import StudyFolder, table_text
from podium.study.records import Records

FORMATS = {".log": "an Optuna journal", ".csv": "the table", ".json": "all records"}


def export_study(folder: StudyFolder, target: Path) -> str:
    """Write the study to a new file whose name says the form; return what it is."""
    if target.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items())
        raise UserError(f"--to {target}: expected a name that ends in {known}")
    if target.exists():
        raise UserError(f"{target} already exists: choose another name")
    study, records = folder.definition(), folder.records()
    if target.suffix == ".log":
        _write_journal(study, records, folder.path.resolve().name, target)
    elif target.suffix == ".csv":
        replace_file(target, table_text(study, records).encode())
    else:
        tree = {"study": study.tree(), "runs": [record.model_dump() for record in records.values()]}
        replace_file(target, (json.dumps(tree, indent=1) + "\n").encode())
    return FORMATS[target.suffix]


def _write_journal(study: StudySection, records: Records, name: str, target: Path) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from podium.study.suggest import optuna_study

    with writing(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as aside:
        written = Path(aside) / target.name
        optuna_study(study, records, name, JournalStorage(JournalFileBackend(str(written))))
        written.replace(target)
