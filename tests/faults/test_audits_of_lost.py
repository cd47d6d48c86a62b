"""Audits of a run that loses instances: no false alarm, also where one is lost in the middle of an audit, and what is
wrong afterwards is found."""

import pytest

from podium.chain import LINK
from podium.runs.folder import Run
from tests.support.processes import sentence, started
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

RECIPE = [*recipe_of("neuron"), "train.length=48up", "checkpoint.every=1000up", "valid.every=1000up"]

#: seat 1 ends itself in the second computation of an audit, seat 2 when its own gradient is to be compared;
#: from update 30 on, a bit of what seat 0 computes first is another one
FAULTS = """
import os, signal
from podium.engine.audit import Audits

SEAT = int(os.environ.get("RANK", -1))
number, again, check, row = -1, Audits._again, Audits.check, Audits._row

def deadly_again(audits, due, update, model, replicas):
    if SEAT == 1 and update >= 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return again(audits, due, update, model, replicas)

def deadly_check(audits, update, model, replicas):
    if SEAT == 2 and update >= 12 and audits._due.owner == audits._group.index != audits._due.auditor:
        os.kill(os.getpid(), signal.SIGKILL)
    if SEAT == 0 and update >= 30:
        audits._first = {place: "0" * 16 for place in audits._first}
    return check(audits, update, model, replicas)

Audits._again, Audits.check = deadly_again, deadly_check
"""


def test_an_instance_that_is_lost_in_an_audit_leaves_no_trace_and_later_ones_find_errors(
    tmp_path, monkeypatch, run_alone
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    import faults\n")
    (tmp_path / "site" / "faults.py").write_text(FAULTS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    args = [*RECIPE, "engine.audit=1", "launch.restarts=10", "log.monitor=false", "--instances", 3, "--out", "run"]
    with started("train", *args, cwd=tmp_path, under=[]) as launched:
        done = launched.ended()
    assert done.stderr.count("was killed by SIGKILL; the others go on without it") == 2, done.stderr
    assert "restarting" not in done.stderr, done.stderr
    assert done.returncode == 3, done.stderr
    told = sentence(done.stderr).partition("the audit of update ")[2]
    chain = [record[LINK] for record in Run(tmp_path / "run").records(digests=True)]
    assert int(told.split()[0]) > 30 >= 2 * len(chain) > 24, told
    assert chain == [record[LINK] for record in run_alone(RECIPE).records(digests=True)][: len(chain)]
