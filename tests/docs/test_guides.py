"""The commands of the guides run as they stand there, on less data and for fewer updates."""

import re
import shlex
from pathlib import Path

import pytest

from podium.runs.folder import Run
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
    "image-classifier": {
        "workload.data.samples=3000": "workload.data.samples=256",
        "workload.data.test_samples=500": "workload.data.test_samples=32",
        "train.length=4ep": "train.length=2ep",
        "precision.mode=32.32,16.32,16.16": "precision.mode=32.32,16.16",
    },
    "mnist-exercise": {
        "batch.micro=4,8,32": "batch.micro=8,32",
        "workload.data.max_samples=20000": "workload.data.max_samples=160",
    },
    "bert-four-devices": {
        "batch.micro=2": "batch.micro=2 workload.model.size=custom workload.model.layers=12 "
        "workload.model.hidden=64 workload.model.heads=4",
        "train.length=20up": "train.length=2up",
    },
    "unet-large-batches": {
        "workload.model.width=8": "workload.model.width=2",
        "workload.data.samples=512": "workload.data.samples=32",
        "workload.data.valid_samples=64": "workload.data.valid_samples=4",
        "optim.scale=none,sqrt,linear": "optim.scale=none,linear",
        "optim.lr=2e-3,8e-3,3.2e-2": "optim.lr=2e-3,8e-3",
        "train.length=4ep,8ep,16ep": "train.length=4ep,8ep",
        "--seconds=8": "--seconds=0.5",
    },
}
#: runs that a page says end with the same weights
EQUAL = {
    "image-classifier": ["one", "two", "stages"],
    "bert-four-devices": ["four", "one"],
}
pages = pytest.mark.parametrize("page", SHORT)


def page_text(page):
    return (GUIDES / f"{page}.md").read_text(encoding="utf-8")


def commands(page):
    """The commands of a page, word by word."""
    blocks = re.findall(r"```sh\n(.*?)```", page_text(page), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


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
    for name, text in re.findall(r"`([\w.]+)`:\n\n```csv\n(.*?)```", page_text(page), re.DOTALL):
        (tmp_path / name).write_text(text)
    for words in commands(page):
        done = podium_ended(tmp_path, *(part for word in words[1:] for part in SHORT[page].get(word, word).split()))
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    weights = {Run(tmp_path / name).summary()["weights_sha256"] for name in EQUAL.get(page, [])}
    assert len(weights) == (1 if page in EQUAL else 0)
