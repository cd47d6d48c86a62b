"""The wheel holds everything that a training needs, and works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build it from a copy, since building leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src" / "podium", folder / "src" / "podium", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", folder], check=True, capture_output=True)
    (built,) = (folder / "dist").glob("podium-*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    every = (path for path in (ROOT / "src" / "podium").rglob("*") if path.is_file())
    files = (path for path in every if "__pycache__" not in path.parts)
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert len(licences) == 1


def test_the_wheel_trains_in_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    # What Podium needs is taken from the environment of this test; Podium itself is not on this path, as it is found
    # through a file that is not read from there.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert Path(run(python, "-c", "import podium; print(podium.__file__)").strip()).is_relative_to(environment)
    podium = environment / "bin" / "podium"
    tiny = ["workload.data.generated_train=64", "workload.data.generated_test=16", "workload.model.hidden=8"]
    run(podium, "train", "mnist", "workload.data.source=generated", "train.length=2up", *tiny, "--out", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert "neuron/quick" in run(podium, "recipes")
