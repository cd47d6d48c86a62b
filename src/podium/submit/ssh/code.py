"""The code of a user's own workload, to be sent along with its recipe."""

from pathlib import PurePosixPath
from typing import Any

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_limited
from podium.recipe.loading import Recipe
from podium.runs.folder import JOB
from podium.workloads.registry import code_files, is_own_file, renamed_file

_MAX_BYTES, _MAX_FILES = 4 << 20, 500


def code_to_send(recipe: Recipe, folder: PurePosixPath) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the files of the recipe's workload by their path below the run's `folder`, and the recipe's tree in which
    they are named there."""
    tree = recipe.tree()
    if not is_own_file(recipe.workload.name):
        return {}, tree
    known = code_files(recipe.workload.name)
    if len(known.sha256) > _MAX_FILES:
        raise UserError(f"{recipe.workload.name} consists of {len(known.sha256)} files: copy them yourself")
    files = {}
    for name in known.sha256:
        try:
            files[f"{JOB}/code/{name}"] = read_limited(known.root / name, _MAX_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = system_reason(error) if isinstance(error, OSError) else "it is not text in UTF-8"
            raise UserError(f"{known.root / name} cannot be sent: {reason}") from None
    tree["workload"]["name"] = _name_there(recipe.workload.name, known.root, folder)
    return files, tree


def _name_there(name: str, root: Any, folder: PurePosixPath) -> str:
    path = name.rpartition(".py")[0] + ".py"
    below = PurePosixPath(path).relative_to(PurePosixPath(root))
    return renamed_file(name, folder / JOB / "code" / below)  # type: ignore[arg-type]
