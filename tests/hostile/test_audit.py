"""`make audit` never takes silence for an all-clear."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / "scripts" / "audit"
PROBLEM = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": ""}
PYTHON = "#!/bin/sh\nprintf 'one==1.0\\ntwo==1.0\\n'\n"


def entry(name: str, *problems: dict) -> dict:
    return {"name": name, "version": "1.0", "vulns": list(problems)}


@pytest.mark.parametrize(
    ("answer", "code", "part"),
    [
        ([entry("one"), entry("two")], 0, "2 of 2 packages compared, 0 with known problems"),
        ([entry("one", PROBLEM), entry("two")], 1, "one 1.0: PYSEC-1, fixed in 2.0"),
        ([entry("one"), {"name": "two", "skip_reason": "not found"}], 2, "not audited, as the database cannot be rea"),
        ([], 2, "0 of 2 packages compared"),
        (None, 2, "not audited: the database of vulnerabilities cannot be reached or read"),
    ],
)
def test_the_end_says_what_was_compared(tmp_path, answer, code, part):
    text = "" if answer is None else json.dumps({"dependencies": answer, "fixes": []})
    (tmp_path / "answer.json").write_text(text)
    for name, content in (("python", PYTHON), ("pip-audit", f"#!/bin/sh\ncat {tmp_path}/answer.json\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, AUDIT, tmp_path / "python", tmp_path / "pip-audit"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert part in done.stdout
