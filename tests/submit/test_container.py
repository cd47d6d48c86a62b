"""The words that run Podium in a container: each as it is meant, and values of variables in none of them."""

import os
import subprocess
from pathlib import Path

import pytest

from podium.submit.container import podium_words
from podium.submit.site import ContainerSection, Site

HOSTILE = 'a b $(touch pwned) `touch pwned` "x" *'


def run_with(runtime: str, folder: Path, **site: object) -> list[str]:
    """What the runtime is called with, by a shell that finds one which prints its words."""
    container = ContainerSection(
        runtime=runtime, image=HOSTILE, mounts=("/data:/data:ro", HOSTILE), options=("--x=$y",)
    )
    words = podium_words(Site(container=container, secrets=("WANDB_API_KEY",), **site), ["/runs/it's"], here=True)
    tool = folder / runtime
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o700)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "WANDB_API_KEY": "a-key"}
    done = subprocess.run(
        [*words, "train", "two words"], env=env, cwd=folder, capture_output=True, text=True, check=True
    )
    assert not (folder / "pwned").exists()
    assert "a-key" not in done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize("runtime", ["apptainer", "shifter", "docker"])
def test_words_reach_the_runtime_as_they_are(runtime, tmp_path):
    words = run_with(runtime, tmp_path)
    assert words[-3:] == ["podium", "train", "two words"]
    assert any(word.endswith(HOSTILE) and word != HOSTILE for word in words)  # a folder
    assert any("/runs/it's" in word for word in words)
    assert any(word in (HOSTILE, f"--image={HOSTILE}") for word in words)
    assert "--x=$y" in words


def test_docker_runs_as_who_submits_hears_signals_and_gets_variables_by_name(tmp_path):
    words = run_with("docker", tmp_path)
    assert words[:2] == ["run", f"--user={os.getuid()}:{os.getgid()}"]
    assert {"--init", "--interactive", "--env=WANDB_API_KEY", "--env=PODIUM_SECRET", "--env=SLURM_PROCID"} <= {*words}
    assert "--volume=/data:/data:ro" in words
    assert "--volume=/runs/it's:/runs/it's" in words


def test_devices_are_handed_on_where_nodes_have_them(tmp_path):
    with_devices = {"node": {"devices": 4}}
    assert "--gpus=all" in run_with("docker", tmp_path, **with_devices)
    assert "--nv" in run_with("apptainer", tmp_path, **with_devices)
    assert "--nv" not in run_with("apptainer", tmp_path)
