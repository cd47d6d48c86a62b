"""Which settings of torch a training on an accelerator has, and where they are recorded."""

import json
from pathlib import Path

import pytest
import torch

from podium.machine.determinism import set_determinism, settings
from podium.recipe.loading import load_recipe
from tests.support import pretend
from tests.support.recipes import TINY


@pytest.fixture
def put_back(monkeypatch):
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


def test_exact_reduction_on_an_accelerator_asks_for_the_same_bits_every_time(put_back):
    device = torch.device("cuda:0")
    torch.backends.cudnn.benchmark = True
    set_determinism(device, exact=True, tf32=False)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # with warnings only, attention would vary
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cuda.matmul.allow_tf32
    assert settings(device) == {
        "deterministic_algorithms": "strict", "cudnn_benchmark": "off", "tf32": "off", "cublas_workspace": ":4096:8",
    }  # fmt: skip
    set_determinism(device, exact=False, tf32=True)
    assert torch.backends.cuda.matmul.allow_tf32
    assert settings(device) == {"deterministic_algorithms": "off", "cudnn_benchmark": "on", "tf32": "on"}


def test_a_cpu_needs_none_of_it(put_back):
    set_determinism(torch.device("cpu"), exact=True, tf32=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert settings(torch.device("cpu")) == {}


def test_compiled_code_does_not_ask_for_less(put_back):
    from podium.engine.compile import deterministic_algorithms

    set_determinism(torch.device("cuda:0"), exact=True, tf32=False)
    with deterministic_algorithms():
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_rounded_factors_are_a_key_of_the_recipe():
    assert load_recipe(TINY["mnist"][0], []).precision.tf32 is False
    assert load_recipe(TINY["mnist"][0], ["precision.tf32=true"]).precision.tf32 is True


@pytest.mark.slow
@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
def test_a_run_records_them(tmp_path):
    recipe = [*TINY["mnist"], "train.length=1up", *pretend.SAME_BITS]
    answers = pretend.trained(tmp_path, {"exact": recipe, "fast": [*recipe, "engine.reduction=fast"]}, 1)
    found = {
        name: json.loads(Path(answers[name]["run"], "environment.json").read_text())["accelerator"] for name in answers
    }
    assert (found["exact"]["deterministic_algorithms"], found["exact"]["tf32"]) == ("strict", "off")
    assert found["fast"]["deterministic_algorithms"] == "off"
    assert found["exact"]["name"].startswith("pretend ")
