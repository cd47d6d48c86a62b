"""Optimisers and schedules of a user: the promises that the shipped ones have, and one sentence for each mistake."""

import json

import pytest
import torch
from torch import nn

from podium.contract import ParamGroup
from podium.errors import UserError
from podium.optim.optimisers import Optimiser, build_optimiser, num_slots, step
from podium.optim.own_schedule import OwnShape
from podium.optim.state_tensors import load_state_tensors, state_tensors
from podium.recipe.sections.optim import OptimSection
from podium.runs import own_code
from podium.runs.folder import Run
from tests.support.outcomes import outcome
from tests.support.own_optimiser import LION, OPTIM, write_lion
from tests.support.processes import assert_user_error, podium_ended, podium_here, started

DEFINED: dict = {}
exec(LION, DEFINED)
Lion = DEFINED["Lion"]


def section(**keys) -> OptimSection:
    return OptimSection(name="lion.py:Lion", lr=0.01, **keys)


def built(cls=Lion, model=None, held=None, **keys) -> tuple[Optimiser, nn.Module]:
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [ParamGroup("all", [name for name, _ in model.named_parameters()])]
    return build_optimiser(section(**keys), model, groups, held, cls), model


def trained(optimiser: Optimiser, model: nn.Module, updates: range) -> None:
    for update in updates:
        for param in model.parameters():
            param.grad = torch.full_like(param, float(update + 1)).cumsum(0)
        step(optimiser, 2.0, 0.01)


# --- through the real command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The recipe with its run on one instance."""
    folder = tmp_path_factory.mktemp("made")
    done = podium_here("train", write_lion(folder), "--out", folder / "one")
    assert done.returncode == 0, done.stderr
    return folder


def test_rates_are_those_of_the_users_schedule_after_the_warm_up(made):
    rates = {record["update"]: record["train/lr"] for record in Run(made / "one").records()}
    assert rates[4] == pytest.approx(0.01 * 0.5 ** (4 * 3 / 16))
    assert Run(made / "one").recipe().schedule.name == f"{made / 'lion.py'}:halves"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "keys"),
    [(2, []), (4, []), (4, ["parallel.shard=optimiser"]), (2, ["parallel.stages=2"])],
    ids=["2", "4", "shared out", "stages"],
)
def test_the_weights_and_the_state_are_the_same_on_any_number_of_instances(made, tmp_path, count, keys):
    run = tmp_path / "run"
    done = podium_ended(tmp_path, "train", made / "mine.yaml", "--out", run, "--instances", count, *keys)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(run)) == outcome(Run(made / "one"))
    alone = ["parallel.stages=1"] if "parallel.stages=2" in keys else []
    done = podium_ended(tmp_path, "resume", run, "--checkpoint", 8, "--instances", 1, *alone)
    assert done.returncode == 0, done.stderr
    assert Run(run).summary()["weights_sha256"] == Run(made / "one").summary()["weights_sha256"]


@pytest.mark.slow
def test_the_weights_are_the_same_after_a_kill_and_a_resume_on_another_number_of_instances(made, tmp_path):
    run = tmp_path / "run"
    words = ("--instances", 2, "train.length=400up")
    with started("train", made / "mine.yaml", "--out", run, *words, cwd=tmp_path) as process:
        process.until(lambda: (run / "checkpoints" / "update-00000008").is_dir(), "a checkpoint")
        process.kill_all()
    done = podium_ended(tmp_path, "resume", run, "--checkpoint", 8, "--instances", 4, "parallel.shard=optimiser")
    assert done.returncode == 0, done.stderr
    whole = podium_ended(tmp_path, "train", made / "mine.yaml", "--out", tmp_path / "whole", "train.length=400up")
    assert whole.returncode == 0, whole.stderr
    assert Run(run).summary()["weights_sha256"] == Run(tmp_path / "whole").summary()["weights_sha256"]


@pytest.mark.slow
def test_a_changed_file_stops_a_resume_which_goes_on_with_the_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    assert podium_here("train", write_lion(tmp_path), "--out", tmp_path / "run").returncode == 0
    weights = Run(tmp_path / "run").summary()["weights_sha256"]
    assert (tmp_path / "run" / "code" / "lion.py").read_text() == LION
    (tmp_path / "lion.py").write_text(LION.replace("torch.sign", "torch.tanh"))
    resume = ("resume", tmp_path / "run", "--checkpoint", 4)
    assert_user_error(podium_here(*resume), f"{tmp_path / 'lion.py'} has changed since", "--code copy", "--code now")
    done = podium_here(*resume, "--code", "copy")
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights
    done = podium_here(*resume, "--code", "now")
    assert done.returncode == 0, done.stderr
    assert "lion.py" in done.stderr
    assert "bits may differ" in done.stderr.replace("\n", " ")
    assert Run(tmp_path / "run").summary()["weights_sha256"] != weights


@pytest.mark.slow
def test_an_optimiser_for_a_shipped_workload_has_copies_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    (tmp_path / "lion.py").write_text(LION)
    tiny = ["workload.data.source=generated", "workload.data.generated_train=64", "workload.data.generated_test=16"]
    words = [*tiny, "workload.model.hidden=8", "train.length=2up", "log.report=false", "log.tensorboard=false"]
    name = f"optim.name={tmp_path / 'lion.py'}:Lion"
    done = podium_here("train", "mnist", *words, name, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "code-optim" / "lion.py").read_text() == LION
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))  # as another user receives it
    assert_user_error(podium_here("validate", tmp_path / "run"), "would run code that was never run here", "--trust")


@pytest.mark.slow
def test_other_code_has_another_digest_of_the_recipe(made, tmp_path):
    from podium.recipe.loading import load_recipe

    (tmp_path / "other").mkdir()
    one = load_recipe(str(made / "mine.yaml")).sha256()
    write_lion(tmp_path)
    assert load_recipe(str(tmp_path / "mine.yaml")).sha256() == one
    other = write_lion(tmp_path / "other", LION + "\nCHANGED = True\n")
    assert load_recipe(str(other)).sha256() != one


@pytest.mark.slow
def test_what_the_optimiser_raises_is_shown_with_the_users_frames_only(tmp_path):
    code = LION.replace('state["count"] += 1', 'state["count"] += 1 if state["count"] < 20 else 1 // 0')
    recipe = write_lion(tmp_path, code)
    done = podium_here("train", recipe, "--out", tmp_path / "run", "train.length=30up")
    assert done.returncode == 3, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "lion.py" in done.stderr
    assert "site-packages" not in done.stderr
    assert "Traceback" not in done.stderr
    recipe = write_lion(tmp_path, LION.replace("return 0.5", "return {}[update] * 0.5"))
    done = podium_here("train", recipe, "--out", tmp_path / "never")
    assert done.returncode == 2, done.stderr
    assert "KeyError: 0" in done.stderr
    assert "in halves" in done.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ("{ name: gone.py:Lion, lr: 1 }", "gone.py, which optim.name leads to"),
        ("{ name: lion.py:Tiger, lr: 1 }", "lion.py has no Tiger"),
        ("{ name: lion.py, lr: 1 }", "optim.name"),
        ("{ name: no_such_module:Lion, lr: 1 }", "optim.name: there is no module no_such_module"),
        ("{ name: lion.py:halves, lr: 1 }", "expected a class derived from torch.optim.Optimizer"),
        ("{ name: lion.py:Lion, lr: 1, betas: [0, 0] }", "give it as optim.options.betas"),
        ("{ name: lion.py:Lion, lr: 1, options: { lr: 2 } }", "optim.options.lr is not an option: give optim.lr"),
        ("{ name: lion.py:Lion, lr: 1, options: { betaz: 2 } }", "cannot be built with optim.options"),
        ("{ name: torch.optim:LBFGS, lr: 1 }", "cannot step without closure"),
        ("{ name: adamw, lr: 1, options: { a: 2 } }", "optim.options does not apply to adamw"),
    ],
)
def test_mistakes_in_the_recipe_are_told_in_one_sentence(tmp_path, optim, said):
    recipe = write_lion(tmp_path, optim=f"optim: {optim}")
    assert_user_error(podium_here("train", recipe, "--out", tmp_path / "run"), said)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_shards_of_parameters_are_refused_before_the_training(tmp_path):
    words = ["parallel.shard=parameters", "engine.reduction=fast", "--instances", 2]
    done = podium_ended(tmp_path, "train", write_lion(tmp_path), "--out", tmp_path / "run", *words)
    assert_user_error(done, "cannot be combined with optim.name=", "which may need whole tensors")


# --- the class --------------------------------------------------------------------------------------------------------


def test_a_state_taken_and_given_back_continues_to_the_bit():
    optimiser, model = built(options={"betas": [0.8, 0.9]})
    trained(optimiser, model, range(4))
    saved = {key: tensor.clone() for key, tensor in state_tensors(optimiser).items()}
    assert {"mean/0.weight", "count:int/0.weight", "step:group-int/0.weight"} <= saved.keys()
    _, copied = built()
    copied.load_state_dict(model.state_dict())
    other, _ = built(model=copied, options={"betas": [0.8, 0.9]})
    load_state_tensors(other, saved)
    trained(optimiser, model, range(4, 7))
    trained(other, copied, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))


@pytest.mark.parametrize("cls", [torch.optim.RAdam, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor])
def test_optimisers_of_torch_can_be_named(cls):
    optimiser, model = built(cls)
    before = [param.detach().clone() for param in model.parameters()]
    trained(optimiser, model, range(2))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for param in model.parameters():
        param.grad = None


def test_the_memory_of_a_state_that_is_not_made_yet_is_foreseen():
    optimiser, model = built()
    num_bytes = 4 * sum(param.numel() for param in model.parameters())
    assert optimiser.own.unmade_bytes() == num_bytes
    assert num_slots(section(), Lion) == 1
    trained(optimiser, model, range(1))
    assert optimiser.own.unmade_bytes() == 0


class Base(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.one(group, param)

    def one(self, group, param):
        param.sub_(param.grad, alpha=group["lr"])


class Elsewhere(Base):
    def one(self, group, param):
        self.count += 1
        param.sub_(param.grad, alpha=group["lr"] * self.count)


class Random(Base):
    def one(self, group, param):
        param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class Deaf(Base):
    def one(self, group, param):
        param.sub_(param.grad, alpha=0.1)


class Hoarder(Base):
    def one(self, group, param):
        self.state[param]["history"] = [1.0]
        super().one(group, param)


class Outside(Base):
    def one(self, group, param):
        self.state["total"] = 1
        super().one(group, param)


class Evaluating(Base):
    def eval(self):
        pass


class Failing(Base):
    def one(self, group, param):
        raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Elsewhere, "does not continue to the bit"),
        (Random, "draws random numbers"),
        (Deaf, "does not use the lr of its groups"),
        (Hoarder, r"keeps a list in its state \(history\)"),
        (Outside, "outside of that of parameters"),
        (Evaluating, "other weights in evaluation"),
        (Failing, "its step fails: ValueError: no such thing\n.*test_own.py"),
        (nn.Linear, "derived from torch.optim.Optimizer"),
    ],
)
def test_a_class_that_breaks_a_promise_is_refused_before_the_training(cls, said):
    with pytest.raises(UserError, match=said):
        built(cls)


def test_trying_a_class_draws_none_of_the_trainings_random_numbers():
    model = nn.Linear(3, 4)
    before = torch.get_rng_state()
    with pytest.raises(UserError, match="random"):
        built(Random, model)
    assert torch.equal(torch.get_rng_state(), before)


class Together(Base):
    """All parameters share the norm of all gradients."""

    @torch.no_grad()
    def step(self):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


def test_a_class_whose_parameters_depend_on_each_other_is_refused_only_where_they_are_divided():
    model = nn.Linear(3, 4)
    built(Together, model)
    with pytest.raises(UserError, match=r"parallel\.shard=none"):
        built(Together, model, {"weight"})
    model.bias.requires_grad_(False)
    built(Together, model)


def test_weight_decay_is_refused_by_a_class_without_it_and_handed_to_others():
    with pytest.raises(UserError, match=r"leave optim\.weight_decay out"):
        built(Base, weight_decay=0.1)
    decayed, model = built(weight_decay=0.5)
    assert decayed.own is not None
    for param in model.parameters():
        nn.init.ones_(param)
        param.grad = torch.zeros_like(param)
    step(decayed, 1.0, 0.1)
    assert torch.allclose(model[0].weight, torch.tensor(0.95))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.pop("mean/1.weight"), "mean/1.weight is missing"),
        (lambda saved: saved.update({"mean/elsewhere": torch.ones(1)}), "mean/elsewhere is not part of it"),
        (lambda saved: saved.update({"mean/0.bias": torch.ones(9)}), r"mean/0.bias is torch.float32 \[9\]"),
        (lambda saved: saved["step:group-int/0.bias"].add_(1), "disagree on what they share"),
    ],
)
def test_the_state_of_another_optimiser_is_refused(change, said):
    optimiser, model = built()
    trained(optimiser, model, range(2))
    saved = {key: tensor.clone() for key, tensor in state_tensors(optimiser).items()}
    change(saved)
    other, _ = built()
    with pytest.raises(UserError, match=said):
        load_state_tensors(other, saved)
    assert state_tensors(other) == {}


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (3, "expected a function"),
        (lambda update: 1, "must take two arguments"),
        (lambda update, total: "fast", "returned 'fast' for update 0"),
        (lambda update, total: float("nan"), "expected a finite number"),
        (lambda update, total: -update, "returned '-5' for update 5"),
        (lambda update, total, calls=[]: calls.append(1) or len(calls), "another rate when asked again"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused(function, said):
    with pytest.raises(UserError, match=said):
        OwnShape(function, "mine.py:rate", 10)


def test_the_optimisers_options_are_in_the_recipe_of_the_run(made):
    tree = Run(made / "one").tree()
    assert tree["optim"]["options"] == {"betas": [0.9, 0.98]}
    assert OPTIM.count("0.98") == 1
    assert json.loads((made / "one" / "environment.json").read_text())["code"]["files"].keys() == {
        "blocks.py",
        "lion.py",
        "mine.py",
    }
