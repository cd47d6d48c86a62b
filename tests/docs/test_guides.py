"""The commands of the guides run as they stand there, on less data and for fewer updates."""

import re
import shlex
from pathlib import Path

import pytest

from podium.runs.folder import Run
from podium.study.folder import StudyFolder
from tests.support.processes import podium_ended

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
#: keys that are made shorter: the value that a page has → the one of the test; all of them must be on the page
SHORT = {
    "neuron-scan": {
        "workload.data.samples=8000": "workload.data.samples=512",
        "optim.lr=2.5e-4,5e-4,1e-3,2e-3": "optim.lr=1e-3,2e-3",
        "batch.replicas=1,2,4": "batch.replicas=1,2",
        "train.length=6ep": "train.length=1ep",
        "train.length=9ep": "train.length=2ep",
    },
}
pages = pytest.mark.parametrize("page", SHORT)


def commands(page):
    """The commands of a page, word by word."""
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def test_every_guide_is_in_the_index_and_is_tested():
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in GUIDES.glob("*.md")} - {"README"}
    assert names == set(SHORT) == {name for name in names if f"({name}.md)" in index}


@pages
def test_what_is_shortened_is_on_the_page(page):
    words = [word for command in commands(page) for word in command]
    assert all(command[0] == "podium" for command in commands(page))
    assert [word for word in SHORT[page] if word not in words] == []


@pytest.mark.slow
@pages
def test_the_commands_of_a_guide_run_one_after_another(page, tmp_path):
    said = {}
    for words in commands(page):
        short = [part for word in words[1:] for part in SHORT[page].get(word, word).split()]
        done = podium_ended(tmp_path, *short)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        said[" ".join(words)] = done.stdout + done.stderr
    assert said
