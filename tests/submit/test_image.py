"""The image: linted, small by what it leaves out, and without root."""

import re
import subprocess
import sys
from pathlib import Path

from podium.submit.kubernetes.section import KubernetesSection

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def test_the_dockerfile_passes_its_linter():
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    broken = subprocess.run([linter, "-"], input="FROM a\nRUN sudo id\n", capture_output=True, text=True)
    assert broken.returncode == 1  # it does find something


def test_the_image_runs_as_the_user_that_pods_have_and_names_no_registry():
    text = DOCKERFILE.read_text()
    section = KubernetesSection()
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == f"{section.user}:{section.group}"
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE) + re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE)
    assert all("/" not in image for image in images)
    for accelerator in ("cpu", "cu130"):
        assert f"ACCELERATOR={accelerator}" in text


def test_only_what_the_image_is_made_of_is_sent_to_its_builder():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ") and "--from" not in line]
    copied = {word for line in lines for word in line.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
