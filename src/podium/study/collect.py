"""Takes runs of a study that were trained elsewhere, each by a job of its own, into its records and its table."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from podium.errors import UserError
from podium.recipe.loading import recipe_from_tree
from podium.study.conduct import Conductor
from podium.study.display import StudyDisplay
from podium.study.executor import LocalProcesses
from podium.study.folder import StudyFolder, open_study

#: how long to wait for another job that does the same
_WAIT_S = 60.0


def collect(path: Path) -> None:
    """Take in what has ended. Of several jobs that end at once, one does it after the other."""
    folder = open_study(path)
    with once_free(folder):
        conductor(folder).collect()


@contextmanager
def once_free(folder: StudyFolder) -> Iterator[None]:
    """Lock a study, for some time after others that do so too."""
    deadline = time.monotonic() + _WAIT_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder.locked())
                break
            except UserError:
                if time.monotonic() > deadline or not folder.is_locked():
                    raise
                time.sleep(0.2)
        yield


def conductor(folder: StudyFolder) -> Conductor:
    """Return one that starts nothing by itself."""
    base = recipe_from_tree(folder.base(), str(folder.base_file))
    nobody = LocalProcesses(1, (), watch_memory=False)
    return Conductor(folder, folder.definition(), base, nobody, StudyDisplay(), retries=0)
