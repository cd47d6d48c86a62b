"""A model and samples of a Python session are trained with every promise that a recipe has."""

import json
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import podium
from podium.errors import UserError
from podium.runs import own_code
from podium.workloads.own.blueprint import Unreachable, read_objects, write_objects
from podium.workloads.own.data import held_out
from podium.workloads.own.losses import LossFunction
from tests.support.processes import podium_here, run_files

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(160, 3))
Y = (X**2).sum(axis=1)
LABELS = (Y > 3).astype(np.int64)
QUICK = {
    "length": "2ep",
    "micro_batch": 8,
    "replicas": 2,
    "optim": {"name": "adamw", "lr": 1e-2},
    "engine": {"threads": 1, "updates_per_call": 4},
    "checkpoint": {"every": "4up", "keep": 20},
    "log": {"tensorboard": False, "report": False},
}


def small(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs))


class Doubled(nn.Module):
    """A model of the user's own, with more than submodules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.factor, self.register = small(), 2.0, {"a": (1, None)}
        self.register_buffer("shift", torch.ones(1), persistent=False)
        self.tied = self.layers[0].weight

    def forward(self, x):
        return self.factor * self.layers(x) + self.shift


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index].astype(np.float32) + 0.01 * np.random.randn(3).astype(np.float32), np.float32(
            self.y[index]
        )


def absolute(output, target):
    return (output.squeeze(1) - target).abs()


def whole(model, batch):
    error = model(batch["input"]).squeeze(1) - batch["target"]
    metrics = {} if model.training else {"bias": (error.sum(), len(error))}
    return podium.Loss(error.square().sum(), len(error), metrics)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, one_thread):
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    model = Doubled()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = podium.fit(model, train=(X, Y), loss="mse", out=folder / "run", **QUICK)
    return run, model, before


def test_the_run_has_summary_metrics_checkpoints_best_and_predictions(fitted):
    run, _, _ = fitted
    assert run.state == run.summary["state"] == "done"
    table = run.metrics()
    assert list(table["update"]) == [4, 8, 9, 12, 16, 18]
    assert table["train/loss"].iloc[-1] < table["train/loss"].iloc[0]
    assert [saved.update for saved in run.checkpoints] == [4, 8, 9, 12, 16, 18]
    best = run.best
    assert best.update == run.summary["valid"]["best"]["update"]
    assert best.metrics["valid/loss"] == run.summary["valid"]["best"]["loss"]
    with torch.no_grad():
        expected = best.model(torch.tensor(X[:70], dtype=torch.float32)).numpy()
    assert np.array_equal(run.predict(X[:70], micro_batch=70), expected)
    assert run.predict({"input": X[:5], "target": Y[:5]}).shape == (5, 1)
    assert run.predict(Pairs(X, Y)).shape == (160, 1)
    assert "valid/loss" in run._repr_html_()
    assert "<svg" in run._repr_html_()
    assert "done after 18 of 18 updates" in repr(run)


def test_the_model_that_was_given_stays_as_it_is_and_the_session_too(fitted):
    _, model, before = fitted
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.layers) is nn.Sequential
    assert model.training


def test_another_session_opens_the_run_and_builds_its_model(fitted, tmp_path):
    run, _, _ = fitted
    loaded = podium.load(run.path)
    assert loaded.model.register == {"a": (1, None)}
    assert loaded.model.tied is loaded.model.layers[0].weight
    again = podium.open_run(run.path)
    assert np.array_equal(again.predict(X), run.predict(X))
    assert np.array_equal(podium.load(again, checkpoint=8).predict(X), again.checkpoints[1].predict(X))
    done = podium_here("validate", run.path)
    assert done.returncode == 2
    assert "were given to podium.fit in memory" in done.stderr


def test_a_run_from_elsewhere_builds_nothing_before_it_is_trusted(fitted, tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    shutil.copytree(fitted[0].path, tmp_path / "run")
    objects = tmp_path / "run" / "fit" / "objects.json"
    text = objects.read_text().replace('"args": []', '"args": ["made up"]')
    objects.write_text(text)
    with pytest.raises(UserError, match=r"never run here.*--trust"):
        podium.open_run(tmp_path / "run").best.load()


@pytest.mark.slow
def test_instances_give_the_same_bits_and_the_run_is_complete_for_every_command(fitted, tmp_path):
    run, model, _ = fitted
    for replicas, counts in ((2, (2,)), (4, (3, 4))):
        many = {**QUICK, "replicas": replicas}
        one = podium.fit(model, train=(X, Y), loss=absolute, out=tmp_path / f"one-{replicas}", **many)
        for instances in counts:
            other = podium.fit(
                model, train=(X, Y), loss=absolute, out=tmp_path / f"many-{instances}", instances=instances, **many
            )
            assert other.summary["topology"]["instances"] == instances
            assert other.summary["weights_sha256"] == one.summary["weights_sha256"]
    assert "valid/loss" in podium_here("validate", tmp_path / "many-2").stdout
    assert podium_here("resume", tmp_path / "many-2", "--checkpoint", 8).returncode == 0
    assert other.path != run.path


def test_a_fit_that_was_stopped_continues_to_the_bit(fitted, tmp_path):
    run, model, _ = fitted
    shutil.copytree(run.path, tmp_path / "run")
    for update in (9, 12, 16, 18):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"update-{update:08d}")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"state": "interrupted"}))
    again = podium.fit(model, train=(X, Y), loss="mse", out=tmp_path / "run", resume=True, **QUICK)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    done = podium.fit(model, train=(X, Y), loss="mse", out=tmp_path / "run", resume=True, **QUICK)
    assert done.state == "done"
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"state": "interrupted"}))
    with pytest.raises(UserError, match="optim differs"):
        podium.fit(model, (X, Y), loss="mse", out=tmp_path / "run", resume=True, **{**QUICK, "optim": {"lr": 1e-5}})


def samples_of(kind, tmp_path):
    if kind == "hdf5":
        with h5py.File(tmp_path / "data.h5", "w") as file:
            file["x"], file["y"] = X.astype(np.float32), Y
        return tmp_path / "data.h5", "x", "y"
    if kind == "huggingface":
        from datasets import Dataset

        return Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    tensors = torch.tensor(X), torch.tensor(Y)
    return {
        "arrays": (X, Y),
        "tensors": tensors,
        "by name": {"x": X, "y": Y},
        "tensor dataset": torch.utils.data.TensorDataset(*tensors),
    }[kind]


@pytest.mark.parametrize("kind", ["tensors", "by name", "tensor dataset", "hdf5", "huggingface"])
def test_samples_may_have_any_form_and_give_the_same_bits_as_arrays(kind, tmp_path, weights_of_arrays):
    run = podium.fit(small(), train=samples_of(kind, tmp_path), loss="mse", out=tmp_path / "run", **QUICK)
    assert run.summary["weights_sha256"] == weights_of_arrays


@pytest.fixture(scope="module")
def weights_of_arrays(tmp_path_factory):
    run = podium.fit(small(), train=(X, Y), loss="mse", out=tmp_path_factory.mktemp("arrays") / "run", **QUICK)
    return run.summary["weights_sha256"]


def following(model, batch):
    logits, target = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:].long()
    return podium.Loss(nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="sum"), target.numel())


def test_a_folder_of_tokens_has_its_own_splits(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("one and two and three are four words and more.\n" * 200)
    out = tmp_path / "tokens"
    done = podium_here("data", "make", "text", f"input={tmp_path / 'books'}", "tokenizer=char", f"out={out}")
    assert done.returncode == 0, done.stderr
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    run = podium.fit(model, (out, 16), (out, 16), loss=following, out=tmp_path / "run", **QUICK)
    table = run.metrics()["valid/loss"].dropna()
    assert table.iloc[-1] < table.iloc[0]
    with pytest.raises(UserError, match="how many tokens the model reads at once"):
        podium.fit(model, out, loss=following, out=tmp_path / "not", **QUICK)


def test_a_fit_may_start_from_the_weights_of_another_run(fitted, tmp_path):
    run, model, _ = fitted
    again = podium.fit(
        model,
        (X, Y),
        loss="mse",
        init_from=run.path,
        out=tmp_path / "run",
        **{**QUICK, "length": "1up", "optim": {"lr": 1e-30}},
    )
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]


def test_a_dataset_that_draws_random_numbers_gives_the_same_bits_every_time(tmp_path):
    digests = set()
    for number in range(2):
        np.random.seed(number)
        run = podium.fit(small(), train=Pairs(X, Y), loss="mse", out=tmp_path / str(number), **QUICK)
        digests.add(run.summary["weights_sha256"])
    assert len(digests) == 1


def test_what_is_held_out_is_a_keyed_choice_that_divides_the_samples():
    train, valid = held_out(1000, 0.1, seed=3)
    assert len(valid) == 100
    assert sorted([*train, *valid]) == list(range(1000))
    assert np.array_equal(valid, held_out(1000, 0.1, seed=3)[1])
    assert not np.array_equal(valid, held_out(1000, 0.1, seed=4)[1])


@pytest.mark.parametrize(
    ("loss", "target", "expected"),
    [
        ("mse", Y, lambda out, y: ((out[:, 0] - y) ** 2).mean()),
        ("l1", Y, lambda out, y: (out[:, 0] - y).abs().mean()),
        ({"name": "huber", "delta": 0.5}, Y, lambda out, y: nn.functional.huber_loss(out[:, 0], y, delta=0.5)),
        ("bce", LABELS, lambda out, y: nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float())),
        (absolute, Y, lambda out, y: (out[:, 0] - y).abs().mean()),
        (nn.MSELoss(), Y[:, None], lambda out, y: ((out - y) ** 2).mean()),
        (whole, Y, lambda out, y: ((out[:, 0] - y) ** 2).mean()),
        ("cross_entropy", LABELS, lambda out, y: nn.functional.cross_entropy(out, y)),
        (
            {"name": "cross_entropy", "label_smoothing": 0.1},
            LABELS,
            lambda out, y: nn.functional.cross_entropy(out, y, label_smoothing=0.1),
        ),
        (
            {"name": "cross_entropy", "class_weights": (1.0, 3.0)},
            LABELS,
            lambda out, y: nn.functional.cross_entropy(out, y, torch.tensor([1.0, 3.0]), reduction="sum") / len(y),
        ),
        ("nll", LABELS, lambda out, y: nn.functional.nll_loss(out, y)),
    ],
)
def test_losses_by_name_and_function_are_torchs_as_sum_and_count(loss, target, expected):
    function = LossFunction(loss)
    model = small(2 if loss == "nll" or "cross_entropy" in str(loss) else 1).eval()
    batch = {"input": torch.tensor(X, dtype=torch.float32), "target": torch.tensor(target)}
    if batch["target"].dtype == torch.float64:
        batch["target"] = batch["target"].float()
    with torch.no_grad():
        found, output = function(model, batch), model(batch["input"])
    assert found.count == len(X)
    assert torch.allclose(found.sum / found.count, expected(output, batch["target"]).float(), rtol=1e-5)


def test_labels_that_are_left_out_are_not_counted():
    batch = {"input": torch.zeros(4, 3), "target": torch.tensor([0, 1, -100, 1])}
    model = small(2).eval()
    loss = LossFunction({"name": "cross_entropy", "ignore": -100})(model, batch)
    assert loss.count == 3
    assert loss.metrics["accuracy"][1] == 3
    with pytest.raises(IndexError, match="-100"):
        LossFunction("cross_entropy")(model, batch)


def test_a_target_is_never_stretched_against_the_output():
    batch = {"input": torch.zeros(4, 3), "target": torch.zeros(4, 2)}
    with pytest.raises(UserError, match=r"the model returns the shape \[4, 1\] and the target has \[4, 2\]"):
        LossFunction("mse")(small(), batch)


BAD = {
    "model": ({"model": 3}, "model = int: expected a torch.nn.Module"),
    "loss": ({"loss": "mae"}, "'mae': expected one of mse"),
    "loss option": ({"loss": {"name": "mse", "smoothing": 1}}, "unknown key smoothing"),
    "share": ({"valid": 1.5}, "valid = 1.5: expected samples, or the share"),
    "samples": ({"train": "data.csv"}, "train = 'data.csv': expected arrays"),
    "lengths": ({"train": (X, Y[:5])}, "differ in their number of samples: input 160, target 5"),
    "objects": ({"train": (X, np.array([None] * 160))}, "holds values of type object"),
    "section": ({"shedule": {"name": "cosine"}}, "unknown key shedule.*did you mean schedule"),
    "key": ({"optim": {"name": "adamw", "learning_rate": 1}}, "did you mean optim.lr"),
    "too few": ({"micro_batch": 512}, "not enough for one update"),
    "instances": ({"instances": 0}, "instances = 0: expected a whole number"),
    "lambda": ({"loss": lambda output, target: output - target, "instances": 2}, "a lambda cannot be given"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_told_and_leaves_nothing(tmp_path, mistake):
    change, said = BAD[mistake]
    with pytest.raises(UserError, match=said):
        podium.fit(**{"model": small(), "train": (X, Y), "loss": "mse", "out": tmp_path / "run", **QUICK, **change})
    assert run_files(tmp_path) == []


def test_objects_come_back_as_they_were(tmp_path):
    shared = torch.arange(3.0)
    given = {
        "model": Doubled(),
        "again": [shared, shared, (1, 2.5, None, True, "x", b"\0")],
        "types": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "numpy": np.float32(1.5), 3: {1, 2}},
        "half": torch.ones(2, dtype=torch.bfloat16),
        "function": absolute,
        "activation": torch.relu,
        "dataset": Pairs(X, Y),
    }
    path = write_objects(given, tmp_path)
    found = read_objects(path)
    assert found["again"][0] is found["again"][1]
    assert found["again"][2] == given["again"][2]
    assert found["types"] == given["types"]
    assert torch.equal(found["half"], given["half"])
    assert found["activation"] is torch.relu
    assert np.array_equal(found["dataset"].x, X)
    assert found["model"].tied is found["model"].layers[0].weight
    assert torch.equal(found["model"].shift, torch.ones(1))


def test_what_other_processes_cannot_build_is_refused_when_it_is_written(tmp_path):
    class Local(nn.Module):
        pass

    for thing, said in (
        (Local(), "inside of a function"),
        (lambda: 0, "lambda"),
        (iter([1]), "cannot be given|builtins"),
    ):
        with pytest.raises(Unreachable, match=said):
            write_objects({"thing": thing}, tmp_path / "objects")
    assert run_files(tmp_path) == []


SCRIPT = """
import sys
import numpy as np
import torch
from torch import nn
import podium

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    def forward(self, x):
        return self.layers(x)

x = np.random.normal(size=(96, 3))
model = Net()
instances = [int(number) for number in sys.argv[1].split(",")]
digests = set()
for number in instances:
    run = podium.fit(model, train=(x, (x**2).sum(axis=1)), loss="mse", length="1ep", micro_batch=4, replicas=2,
                     instances=number, out=f"run-{number}", log={"tensorboard": False, "report": False})
    digests.add(run.summary["weights_sha256"])
print("equal" if len(digests) == 1 else "differ")
"""


@pytest.mark.slow
def test_a_script_without_a_guard_trains_on_two_instances_whatever_it_draws(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", "1,2"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.slow
def test_from_the_command_line_of_python_plain_modules_train_and_own_classes_are_refused(tmp_path):
    plain = SCRIPT.replace("model = Net()", "model = Net().layers")
    done = subprocess.run(
        [sys.executable, "-c", plain, "1,2"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "4"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert "Net is defined in the notebook or on the command line" in done.stderr
