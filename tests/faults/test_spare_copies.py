"""Shares of the optimiser's state that live on two instances: one that is lost, at whatever point of an update, takes
nothing with it."""

import random

import pytest

from podium.runs.folder import Run
from tests.support.outcomes import outcome
from tests.support.processes import num_records, started
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

#: an optimiser with state, an average, an audit now and then; a checkpoint at the end only
RECIPE = [*recipe_of("mnist"), "batch.replicas=8", "optim.name=adamw", "optim.momentum=null", "optim.lr=0.001",
          "average.method=exponential", "average.every=3up", "train.length=128up", "checkpoint.every=1000up",
          "valid.every=1000up"]  # fmt: skip
SPARE = ["parallel.shard=optimiser", "launch.restarts=1000", "log.monitor=false"]

#: of each of these points of an update, the seat that ends itself there, and the update
DEADLY = """
import os, signal
from podium.distributed.shared_memory import SharedMemory
from podium.distributed.sharding.optimiser_state import Shares
from podium.engine.parallelism import ShardedOptimiser
from podium.engine.update import Engine

SEAT = int(os.environ.get("RANK", -1))
POINTS = {1: ("before the barrier", 8), 2: ("in the barrier", 14), 3: ("after the step", 20),
          4: ("in the exchange", 26)}
POINT, UPDATE = POINTS.get(SEAT, ("", -1))
now = -1

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def halfway(shared, lane=0, others=None):
    if others is None:
        for place in shared.others[:1]:
            shared._segments[place].post(lane, shared.own)
        end()
    barrier(shared, lane, others)

update, before_step, exchange = Engine.update, ShardedOptimiser.before_step, Shares.broadcast
barrier = SharedMemory.barrier

def noting_update(engine, number, *args, **keys):
    global now
    now = number
    return update(engine, number, *args, **keys)

def deadly_before_step(form):
    if now == UPDATE and POINT == "before the barrier":
        end()
    if now == UPDATE and POINT == "in the barrier":
        SharedMemory.barrier = halfway
    before_step(form)

def deadly_exchange(shares, waited):
    if now == UPDATE and POINT == "after the step":
        end()
    if now == UPDATE and POINT == "in the exchange":
        SharedMemory.barrier = halfway
    exchange(shares, waited)

Engine.update = noting_update
ShardedOptimiser.before_step, Shares.broadcast = deadly_before_step, deadly_exchange
"""


def test_an_instance_that_ends_at_any_point_of_an_update_takes_nothing_with_it(tmp_path, monkeypatch, outcome_alone):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    import deadly\n", encoding="utf-8"
    )
    (tmp_path / "site" / "deadly.py").write_text(DEADLY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    args = [*RECIPE, *SPARE, "launch.spare_copies=1", "--instances", 5, "--out", "run"]
    with started("train", *args, cwd=tmp_path, under=[]) as launched:
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was killed by SIGKILL; the others go on without it") == 4
    assert "restarting" not in done.stderr, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(RECIPE)


@pytest.mark.parametrize(("count", "num_spares"), [(2, 1), (3, 1), (4, 2)])
def test_kills_of_instances_with_spare_copies_leave_no_trace(count, num_spares, tmp_path, outcome_alone):
    draw, run = random.Random(count), tmp_path / "run"
    args = [*RECIPE, *SPARE, f"launch.spare_copies={num_spares}", "--instances", count, "--out", "run"]
    with started("train", *args, cwd=tmp_path) as launched:
        for kills in range(1, min(count, 3)):  # one at least stays
            launched.until_records(run, num_records(Run(run)) + draw.randint(1, 3))
            seats = sorted(launched.instances)
            launched.instances[seats[0] if kills == 1 else draw.choice(seats)].kill()
            launched.until(lambda n=kills: launched.stderr.count("was killed by SIGKILL") == n, "the notice")
            launched.until(lambda n=kills: launched.stderr.count("from update") >= n, "those that are left")
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert "restarting" not in done.stderr, done.stderr
    assert outcome(Run(run)) == outcome_alone(RECIPE)


def test_a_share_that_is_lost_with_its_copy_is_read_from_the_checkpoint(tmp_path, weights_alone):
    recipe = [*RECIPE, "checkpoint.every=10up"]
    args = [*recipe, *SPARE, "launch.spare_copies=1", "--instances", 4, "--out", "run"]
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 8)
        lost = [launched.instances[1], launched.instances[2]]
        for one in lost:
            one.suspend()
        for one in lost:
            one.kill()
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarting from the last checkpoint (3 of 1000)") == 1
    assert "a share of the optimiser's state and its spare copies are lost; restarting" in done.stderr, done.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(RECIPE)
