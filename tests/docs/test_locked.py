"""What `make LOCKED=1` installs is what pyproject.toml asks for, and every file of it has its checksum."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(*names: str) -> dict[str, str]:
    """The lines of every package in these files."""
    blocks: dict[str, str] = {}
    for name in names:
        for block in re.split(r"^(?=\w)", (ROOT / name).read_text(), flags=re.M)[1:]:
            blocks[canonicalize_name(block.partition("==")[0])] = block
    return blocks


def versions(blocks: dict[str, str]) -> dict[str, Version]:
    return {name: Version(re.split(r"[ \\]", block.partition("==")[2])[0]) for name, block in blocks.items()}


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        (PROJECT["dependencies"], ["locked.txt"]),
        (PROJECT["optional-dependencies"]["test"], ["locked.txt", "locked-test.txt"]),
    ],
    ids=["podium", "tests"],
)
def test_everything_that_is_asked_for_is_locked_in_a_version_that_is_allowed(asked, files):
    found = versions(locked(*files))
    for line in asked:
        requirement = Requirement(line)
        assert found[canonicalize_name(requirement.name)] in requirement.specifier, line


@pytest.mark.parametrize("file", ["locked.txt", "locked-test.txt", "locked-cuda.txt"])
def test_every_package_has_the_checksums_of_its_files_and_no_address(file):
    for name, block in locked(file).items():
        first, *hashes = block.replace(" \\\n", "\n").splitlines()
        assert re.fullmatch(r"[\w.-]+==[\w.!]+( ; .+)?", first), name
        assert hashes, name
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), name


def test_locked_versions_are_those_that_were_tested():
    tested = dict(
        line.split("==") for line in (ROOT / "constraints-tested.txt").read_text().splitlines() if line[0] != "#"
    )
    tested = {canonicalize_name(name): Version(version) for name, version in tested.items()}
    found = versions(locked("locked.txt", "locked-test.txt"))
    assert all(tested[name] == version for name, version in found.items() if name in tested)
    assert {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]} <= tested.keys()
    constraints = (ROOT / "constraints.txt").read_text().split()
    assert f"torch=={found['torch']}" in constraints
