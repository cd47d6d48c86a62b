"""`podium certify`: every question is asked, what is not kept is told, and the card holds its own checksum."""

import json
import subprocess
import sys

import pytest

from podium.certify import parts
from podium.certify.card import read_card, with_checksum, write_card
from podium.certify.recipes import WORKLOADS, tiny
from podium.check.trials import Trial, Trials
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.workloads.registry import WORKLOADS as SHIPPED
from tests.support import pretend
from tests.support.processes import assert_user_error, podium_here

FOUND = [
    {"workload": "mnist", "precision": "32.32", "question": "trains", "good": True, "text": "0" * 64},
    {"workload": "mnist", "precision": "32.32", "question": "the same <b>", "good": False, "text": "first in a.weight"},
]
CARD = {
    "podium": "1", "torch": "2", "written": "2026-01-01", "on_accelerator": False, "device": "some <processor>",
    "num_devices": 2, "accelerator": {}, "counts": [1, 2], "kept": False, "found": FOUND,
    "samples_per_second": {"mnist": {"one, exact": 12.5}},
}  # fmt: skip


def test_every_shipped_workload_is_tried_with_eight_replicas():
    assert set(WORKLOADS) == set(SHIPPED)
    for workload in WORKLOADS:
        for precision in parts.PRECISIONS:
            name, overrides = parts.overrides_of(workload, precision)
            recipe = load_recipe(name, overrides)
            assert recipe.workload.name == workload
            assert recipe.batch.num_replicas == 8
            assert tiny(workload)[0] == name


def test_a_card_is_known_by_its_checksum(tmp_path):
    page = write_card(tmp_path, CARD).read_text()
    assert read_card(tmp_path / "card.json") == with_checksum(CARD)
    assert "says nothing of one" in page
    assert "some &lt;processor&gt;" in page
    assert "the same &lt;b&gt;" in page
    assert with_checksum(CARD)["sha256"] in page
    changed = json.loads((tmp_path / "card.json").read_text())
    changed["kept"] = True
    (tmp_path / "card.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="its checksum is another one"):
        read_card(tmp_path / "card.json")
    with pytest.raises(UserError, match="does not exist"):
        read_card(tmp_path / "none.json")


def test_weights_that_differ_are_told(tmp_path, monkeypatch):
    weights = iter(["a", "a", "b", "a"])
    monkeypatch.setattr(Trials, "train", lambda self, count, *more: Trial(Run(tmp_path), next(weights)))
    monkeypatch.setattr(Trials, "train_killed", lambda self, *how: Trial(Run(tmp_path), problem="it failed"))
    found = parts.trainings("mnist", "32.32", [1, 2, 4], tmp_path / "trials")
    assert [(one.question, one.good, one.text) for one in found] == [
        ("trains", True, "a"),
        ("the same weights when trained again", True, ""),
        ("the same weights on 2 instances", False, "the weights differ"),
        ("the same weights on 4 instances", True, ""),
        ("the same weights after a kill, resumed on 4", False, "it failed"),
    ]


def test_what_cannot_be_tried_is_said_first(tmp_path):
    assert_user_error(podium_here("certify", "mnits", "--out", tmp_path / "a"), "there is no workload mnits")
    assert_user_error(podium_here("certify", "--precision", "8", "--out", tmp_path / "a"), "expected some of 32.32")
    assert_user_error(podium_here("certify", "--out", tmp_path), "it already exists")


@pytest.mark.slow
def test_a_processor_is_certified_as_one(podium, tmp_path):
    done = podium("certify", "mnist", "--precision", "32.32", "--seconds", "0.1", "--out", "card", timeout=400)
    assert done.returncode == 0, done.stderr
    assert "torch finds no accelerator here" in done.stderr
    card = read_card(tmp_path / "card" / "card.json")
    assert (card["on_accelerator"], card["kept"]) == (False, True)
    questions = [one["question"] for one in card["found"]]
    assert questions[:3] == ["every operator repeats its bits", "trains", "the same weights when trained again"]
    assert any(question.startswith("the same weights after a kill") for question in questions)
    assert card["samples_per_second"]["mnist"]["one, exact"] > 0


@pytest.mark.soak
@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
def test_two_pretended_devices_are_certified(tmp_path):
    words = ["certify", "mnist", "--precision", "32.32", "--seconds", "0.1", "--out", "card"]
    env = pretend.environment(2, GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [sys.executable, "-m", "podium", *words], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    card = read_card(tmp_path / "card" / "card.json")
    assert (card["on_accelerator"], card["num_devices"], card["counts"], card["kept"]) == (True, 2, [1, 2], True)
    assert card["accelerator"]["deterministic_algorithms"] == "strict"
    questions = [one["question"] for one in card["found"]]
    assert "the same weights on 2 instances" in questions
    assert questions[-1] == "the same weights after a kill, resumed on 2"
    assert set(card["samples_per_second"]["mnist"]) == {
        "one, exact", "one, fast", "2 instances, exact", "2 instances, fast"
    }  # fmt: skip
