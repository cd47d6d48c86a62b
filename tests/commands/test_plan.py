"""`podium plan`: tables of times, plans of recipes that were measured, and trainings that grade them."""

import re

import pytest

from podium.plan import components, history
from podium.plan.components import Components, HostTimes
from podium.recipe.loading import load_recipe
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

TIMES = "devices,seconds_per_epoch\n1,20\n2,12\n4,7\n8,4\n16,2.4\n32,1.5\n"
PARTS = Components(
    measured="2026-01-01", num_cores=2, threads=1,
    times={
        1: HostTimes(0.010, 0.008, 0.01, 0.010, 0.008, 1.0, 0.0),
        2: HostTimes(0.012, 0.009, 0.01, 0.0115, 0.009, 1.0, 0.0),
    },
    crowded=None, jitter=0.05, gradient_bytes=8 << 20, memory_bytes=10**9, valid_s=1e-4, save_s=0.01,
    num_samples=100_000, num_valid_samples=64,
)  # fmt: skip


@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def times(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(TIMES)
    return path


def test_a_table_of_times_gives_further_counts_and_a_plot(state, times):
    done = podium_here("plan", "--from", times, "replicas=1..1024", "--plot", state / "plan.png")
    assert done.returncode == 0, done.stderr
    assert [int(n.replace(",", "")) for n in re.findall(r"^│ ([\d,]+) ", done.stdout, re.M)] == [
        2**i for i in range(11)
    ]
    assert "5.0 doublings beyond" in done.stdout
    assert (state / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_with_a_recipe_gives_device_hours(state, times):
    done = podium_here("plan", "mnist", "replicas=64", "train.length=10ep", "--from", times)
    assert done.returncode == 0, done.stderr
    assert "device-hours" in done.stdout
    assert done.stdout.count("│ 64 ") == 1


def test_nothing_is_planned_from_nothing(state, times):
    assert_user_error(podium_here("plan"), "a recipe is missing")
    assert_user_error(podium_here("plan", "mnist"), "nothing has been measured of mnist on this machine: add --measure")
    assert_user_error(podium_here("plan", "mnist", "replicas=4", "--instances", 4, "--hosts", 2), "--network ethernet")
    assert_user_error(podium_here("plan", "mnist", "replicas=8..4"), "expected a range such as replicas=1..1024")
    assert_user_error(
        podium_here("plan", "mnist", "replicas=4", "--instances", 5), "5 instances on 1 host cannot carry"
    )
    assert_user_error(podium_here("plan", "mnist", "parallel.stages=2"), "plans are for instances that hold the whole")
    assert_user_error(podium_here("plan", "--from", times, "--scaling", "both"), "expected weak or strong")
    assert_user_error(podium_here("plan", "--from", times, "replicas=x"), "expected a number of replicas")
    assert_user_error(podium_here("plan", "--from", times, "--plot", times), "already exists: choose another name")


def test_a_recipe_that_was_measured_is_planned_for_many_hosts(state):
    name, *words = TINY["mnist"]
    components.remember(load_recipe(name, words), PARTS)
    done = podium_here(
        "plan", name, *words, "replicas=256", "--instances", 256, "--hosts", 128, "--network", "ethernet-10g"
    )
    assert done.returncode == 0, done.stderr
    for text in ("samples/s", "communication and waiting", "memory per instance", "time to the end", "device-hours",
                 "256 replicas on 256 instances of 1 thread on 128 hosts", "IEEE 802.3ae", "what would help most",
                 "accumulation 2", "micro-batch 16"):  # fmt: skip
        assert text in " ".join(done.stdout.split()), text
    ranged = podium_here("plan", name, *words, "replicas=1..16", "--network", "20us,10Gb", "--plot", state / "p.png")
    assert ranged.returncode == 0, ranged.stderr
    assert [int(n) for n in re.findall(r"^│ (\d+) ", ranged.stdout, re.M)] == [1, 2, 4, 8, 16]
    assert (state / "p.png").exists()


def test_a_planned_training_prints_predicted_against_measured(state):
    assert "no planned training has ended yet" in podium_here("plan", "--history").stderr
    name, *words = TINY["mnist"]
    components.remember(load_recipe(name, words), PARTS)
    assert podium_here("plan", name, *words).returncode == 0
    done = podium_here("train", name, *words, "--out", state / "run")
    assert done.returncode == 0, done.stderr
    assert "this training was planned" in done.stdout
    (graded,) = history.history()
    assert {one.what for one in graded.grades} >= {"samples_per_second", "total_s"}
    shown = podium_here("plan", "--history")
    assert f"of {len(graded.grades)} measured values" in shown.stdout
    other = podium_here("train", name, *words, "seed=5", "--out", state / "other")
    assert "this training was planned" not in other.stdout


def test_parts_measured_at_one_rate_serve_another(state):
    name, *words = TINY["mnist"]
    components.remember(load_recipe(name, words), PARTS)
    rates = ["optim.lr=0.5", "optim.scale=linear", "optim.base_batch=8", "batch.replicas=4", "valid.every=2ep"]
    assert components.recall(load_recipe(name, [*words, *rates])) == PARTS
    assert components.recall(load_recipe(name, [*words, "optim.name=adamw", "optim.momentum=null"])) is None


@pytest.mark.slow
def test_parts_are_measured_by_real_instances_and_remembered(state):
    name, *words = TINY["mnist"]
    done = podium_here("plan", name, *words, "replicas=2", "--instances", 2, "--measure", "--seconds", 0.6)
    assert done.returncode == 0, done.stderr
    parts = components.recall(load_recipe(name, words))
    assert parts is not None
    assert parts.gradient_bytes > 0
    assert all(0 < times.pass_s <= 2 * times.first_s for times in parts.times.values())
    again = podium_here("plan", name, *words, "replicas=2", "--instances", 2)
    assert again.stdout == done.stdout
