"""Studies as arrays of jobs: each element trains one run of the study, and continues it by itself."""

import sys
from pathlib import Path

from podium.errors import UserError, writing
from podium.recipe.reading import read_yaml
from podium.runs.folder import JOB
from podium.study.collect import conductor
from podium.study.definition import StudySection, check_values, study_from_tree
from podium.study.folder import StudyFolder
from podium.submit.target import Request


def study_of(request: Request) -> StudySection:
    """Return the definition that a request names."""
    path = Path(request.what)
    return study_from_tree(read_yaml(path), str(path), path.parent)


def num_runs(request: Request) -> int:
    """Return how many runs the study has, seeds counted."""
    study = study_of(request)
    return study.num_points * study.num_seeds


def check_array(request: Request) -> None:
    """Raise UserError for a study whose later runs depend on how earlier ones came out."""
    study = study_of(request)
    if study.by_generations:
        reason = "halving" if study.halving is not None else "target" if study.target is not None else study.method
        raise UserError(
            f"{request.what}: with {reason}, runs are chosen by the results of others, and an array starts all of "
            "them: submit a grid or random study, or run `podium study` in an allocation"
        )


def begin_study(request: Request, path: Path) -> None:
    """Write the study's folder with the recipes of all its runs; nothing is trained yet."""
    study, folder = study_of(request), StudyFolder(path)
    base = check_values(study)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with folder.locked():
        folder.write_definition(study, base, ["podium", *sys.argv[1:]])
        numbers = conductor(folder).choose_all()
        for number in numbers:
            log = path / JOB / f"{number:04d}"
            with writing(log):
                log.mkdir(parents=True, exist_ok=True)
