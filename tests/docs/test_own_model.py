"""The code in docs/own-model.md runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podium.runs.folder import Run

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs_as_it_stands(tmp_path):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = re.findall(r"```(python|yml|sh)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "sh", "sh", "python", "yml", "sh", "python", "sh", "python", "sh"]
    said = ""
    for kind, text in blocks:
        if kind == "sh":
            for line in text.splitlines():
                done = subprocess.run(
                    line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
                )
                assert done.returncode == 0, (line, done.stdout, done.stderr)
                said += done.stdout
        else:
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    weights = {name: Run(tmp_path / name).summary()["weights_sha256"] for name in ("mine", "again", "watched")}
    weights |= {name: Run(tmp_path / "inverter" / name).summary()["weights_sha256"] for name in ("one", "two")}
    assert weights["mine"] == weights["again"] == weights["watched"] != weights["one"]
    assert weights["one"] == weights["two"]
    assert said.count(weights["one"]) == 2
    assert "valid/loss" in said
    assert "every promise is kept" in said, "the check of the page's optimiser"
    assert Run(tmp_path / "lion").summary()["weights_sha256"] != weights["mine"]
    assert f"done {Path('watched/report.html')}" in said, "the observer of the page was called"
