"""Studies as arrays of jobs: each element trains one run of the study, and continues it by itself."""

import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from podium.errors import UserError, writing
from podium.recipe.loading import Recipe, to_yaml
from podium.recipe.reading import read_yaml
from podium.runs.folder import JOB
from podium.study.collect import conductor, once_free
from podium.study.definition import StudySection, check_values, study_from_tree
from podium.study.folder import StudyFolder
from podium.submit.shell import Shell
from podium.submit.target import Request

#: the definition of a study that was submitted, below its folder; the file of its recipe is beside it
DEFINITION, BASE = f"{JOB}/study.yaml", f"{JOB}/recipe.yaml"


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


def definition_elsewhere(request: Request, recipe_file: str) -> tuple[dict[str, Any], Recipe]:
    """Return the definition for a place that has only the file of its recipe, and that recipe."""
    study = study_of(request)
    base = check_values(study)
    return {**study.tree(), "recipe": recipe_file, "set": {}}, base


def runs_of_study(shell: Shell, folder: str) -> list[str]:
    """Return the states of a study's runs, from its table."""
    return shell.run(["cut", "-d,", "-f2", "--", f"{folder}/table.csv"]).text.split()[1:]


def log_words(folder: str, *options: str) -> Sequence[str]:
    """Return a command that prints the logs of all runs of a study; `options` of tail: to go on with it."""
    script = """\
folder=$1; shift
for run in "$folder"/[0-9]*/; do set -- "$@" "${run}log"; done
exec tail -n +1 -s 0.5 "$@" 2>/dev/null"""
    return ["sh", "-c", script, "sh", f"{folder}/{JOB}", *options]


def sent_files(request: Request) -> dict[str, str]:
    """Return the files from which a study begins at another place (`begin_sent`), by their paths below its folder."""
    definition, base = definition_elsewhere(request, PurePosixPath(BASE).name)
    return {DEFINITION: to_yaml(definition), BASE: to_yaml(base.tree())}


def begin_sent(path: Path) -> StudySection:
    """Write the folder of a study that was sent here, unless another of its jobs has done so; return what it is."""
    file = path / DEFINITION
    study = study_from_tree(read_yaml(file), str(file), file.parent)
    begin_elements(study, path)
    return study


def begin_study(request: Request, path: Path) -> None:
    """Write the study's folder with the recipes of all its runs; nothing is trained yet."""
    study = study_of(request)
    begin_elements(study, path)
    for number in range(study.num_points * study.num_seeds):
        log = path / JOB / f"{number:04d}"
        with writing(log):
            log.mkdir(parents=True, exist_ok=True)


def begin_elements(study: StudySection, path: Path) -> None:
    """Write the folder and the recipes, unless another element of the array has done so."""
    folder, last = StudyFolder(path), study.num_points * study.num_seeds - 1
    base = check_values(study)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with once_free(folder):
        if not folder.recipe_file(last).is_file():
            folder.write_definition(study, base, ["podium", *sys.argv[1:]])
            whole = conductor(folder)
            whole.choose_all()
            whole.collect()  # a table in which all of them wait
