"""A workload by file, module or announced name is trained as a shipped one is, and its mistakes are told."""

import json
import re
import subprocess
import sys

import pytest

from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.workloads import registry
from tests.support.own import RECIPE, WORKLOAD, write_own
from tests.support.processes import assert_user_error, podium_here, run_files, sentence


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a workload and its run in this process."""
    folder = tmp_path_factory.mktemp("own")
    recipe = write_own(folder)
    done = podium_here("train", recipe, "--out", folder / "one")
    assert done.returncode == 0, done.stderr
    return folder


def weights(run) -> str:
    return Run(run).summary()["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("instances", [2, 4])
def test_a_workload_by_file_gives_the_same_bits_on_any_number_of_instances(trained, podium, tmp_path, instances):
    done = podium("train", trained / "mine.yaml", "--out", "many", "--instances", instances)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "many") == weights(trained / "one")


@pytest.mark.slow
def test_a_workload_by_file_can_be_cut_into_stages_with_the_same_bits(trained, podium, tmp_path):
    done = podium("train", trained / "mine.yaml", "parallel.stages=2", "--out", "cut", "--instances", 2)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "cut") == weights(trained / "one")


def test_it_resumes_to_the_bit_validates_predicts_and_averages(trained, tmp_path):
    recipe, run = trained / "mine.yaml", tmp_path / "run"
    assert podium_here("train", recipe, "--out", run).returncode == 0
    assert podium_here("resume", run, "--checkpoint", 8).returncode == 0
    assert weights(run) == weights(trained / "one")
    validated = podium_here("validate", run)
    assert "valid/loss" in validated.stdout, validated.stderr
    predicted = podium_here("predict", run)
    assert "R²" in predicted.stdout, predicted.stderr
    assert (run / "pictures" / "predicted.png").stat().st_size > 1000
    assert podium_here("average", run, "--last", 2).returncode == 0


def test_every_command_that_takes_a_recipe_finds_the_file_from_any_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = trained / "mine.yaml"
    assert "replicas 2 to 3" in podium_here("topology", recipe, "--instances", 2).stdout
    assert "hidden: 8" in podium_here("show", recipe).stdout
    assert "bottleneck" in podium_here("profile", recipe, "--rates", "--seconds", 0.1).stdout


def test_module_and_class_may_be_named_and_defaults_of_its_sections_overridden(tmp_path):
    recipe = write_own(tmp_path)
    for name in ("mine.py:Squares", "mine:Squares"):
        recipe.write_text(RECIPE.replace("mine.py", name))
        loaded = load_recipe(str(recipe), ["workload.model.hidden=5"])
        assert loaded.workload.model.hidden == 5
        assert loaded.workload.name == f"{tmp_path / 'mine.py'}:Squares"


def test_the_recipe_of_a_training_is_identified_by_the_code_not_by_where_it_lies(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        write_own(folder, WORKLOAD if folder.name != "c" else WORKLOAD + "# another\n")
    a, b, c = (load_recipe(str(folder / "mine.yaml")).sha256() for folder in folders)
    assert a == b != c


@pytest.mark.slow
def test_files_of_the_same_name_in_two_folders_keep_their_own_modules(tmp_path):
    sizes = []
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        recipe = load_recipe(str(write_own(folder)))
        (folder / "blocks.py").write_text(f"SIZE = {number}\n")
        (folder / "mine.py").write_text(WORKLOAD.replace("import Block", "import SIZE"))
        recipe = load_recipe(str(folder / "mine.yaml"))
        workload = registry.workload_class(recipe.workload.name)(recipe.workload.model, recipe.workload.data)
        sizes.append(sys.modules[type(workload._own).__module__].SIZE)
    assert sizes == [0, 1]


def test_an_announced_workload_is_found_and_listed_with_its_package(tmp_path, monkeypatch):
    write_own(tmp_path, recipe=RECIPE.replace("mine.py", "squares"))
    (tmp_path / "mine.py").rename(tmp_path / "squares_package.py")
    info = tmp_path / "squares-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: squares\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[podium.workloads]\nsquares = squares_package:Squares\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "blocks", raising=False)  # that of another test's folder
    assert load_recipe(str(tmp_path / "mine.yaml")).workload.model.hidden == 8
    assert re.search(r"squares.*squares 1\.2.*squares_package:Squares", podium_here("workloads").stdout)
    assert "squares (squares)" in podium_here("recipes", "mnist").stdout


def test_reading_a_shipped_recipe_loads_no_torch_and_neither_does_import_podium():
    code = (
        "import sys, podium; from podium.recipe.loading import load_recipe; load_recipe('mnist');"
        "import podium.commands.new, podium.commands.workloads; assert 'torch' not in sys.modules; podium.Section"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_podium_train_is_the_function_although_there_is_a_module_of_that_name():
    code = "import podium.train, podium; assert podium.train.__module__ == 'podium.api.training'"
    subprocess.run([sys.executable, "-c", code], check=True)


BAD = {
    "does not import": ("import nonsense_module", ["mine.py cannot be imported", "nonsense_module", "mine.py:1"]),
    "is not Python": ("class A(:", ["mine.py line 1", "not valid Python"]),
    "has no workload": ("X = 1", ["mine.py has no workload", "build_model"]),
    "lacks a member": ("class A:\n    def build_model(self): ...\n    loss = 'mse'", ["A lacks source"]),
    "has several": (
        "class A:\n    def build_model(self): ...\nclass B(A):\n    pass",
        ["several workloads", "A, B", "mine.py:A"],
    ),
    "builds no model": (
        WORKLOAD.replace("return nn.Sequential", "return (nn.Linear, 1); nn.Sequential"),
        ["mine.py line 17", "build_model returned tuple"],
    ),
    "has a model for other shapes": (
        WORKLOAD.replace("nn.Linear(3,", "nn.Linear(4,"),
        ["mat1 and mat2", "input [2, 3] torch.float32"],
    ),
    "has targets of other shapes": (
        WORKLOAD.replace("nn.Linear(hidden, 1)", "nn.Linear(hidden, 2)"),
        ["the model returns the shape [2, 2]", "[2]"],
    ),
    "has arrays of different lengths": (
        WORKLOAD.replace("return x, ", "return x[:5], "),
        ["differ in their number of samples: input 5, target 128"],
    ),
    "has no samples": (WORKLOAD.replace("return x, (x**2).sum(axis=1)", "return None"), ["mine.py line 21", "'train'"]),
    "has an unknown loss": (WORKLOAD.replace('"mse"', '"mes"'), ["'mes'", "did you mean mse?"]),
    "has a loss that is no sum with a count": (
        WORKLOAD.replace(
            '    loss = "mse"', "    def loss(self, model, batch):\n        return model(batch['input']).mean()"
        ),
        ["mine.py line 15", "expected podium.Loss(sum, count)"],
    ),
    "has a loss whose sum is not one number": (
        WORKLOAD.replace(
            '    loss = "mse"',
            "    def loss(self, model, batch):\n        return podium.Loss(model(batch['input']), 2)",
        ),
        ["mine.py line 15", "add `.sum()`"],
    ),
    "has a count that is no number": (
        WORKLOAD.replace(
            '    loss = "mse"',
            "    def loss(self, model, batch):\n        return podium.Loss(model(batch['input']).sum(), 2.5)",
        ),
        ["the count of the loss is 2.5"],
    ),
    "has a section without defaults": (
        WORKLOAD.replace("hidden: int = 8", "hidden: int"),
        ["ModelSection.hidden has no default"],
    ),
    "has a section that is none": (
        WORKLOAD.replace("class ModelSection(podium.Section)", "class ModelSection"),
        ["ModelSection must be a class derived from podium.Section"],
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_file_that(tmp_path, mistake):
    source, parts = BAD[mistake]
    done = podium_here("train", write_own(tmp_path, source), "--out", tmp_path / "run")
    assert_user_error(done, *parts[:1])
    for part in parts:
        assert part in done.stderr, done.stderr
    assert run_files(tmp_path / "run") == []


def test_unknown_keys_of_a_users_sections_are_mistakes_with_a_suggestion(trained):
    done = podium_here("train", trained / "mine.yaml", "workload.model.hiden=3", "--out", trained / "not")
    assert_user_error(done, "unknown key workload.model.hiden", "did you mean workload.model.hidden?")


def test_a_missing_file_class_or_module_is_told(trained):
    recipe = trained / "mine.yaml"
    for name, part in (
        ("gone.py", "there is no file"),
        ("mine.py:Cubes", "has no class Cubes: it has Squares"),
        ("no_such_package.mine:Cubes", "there is no module no_such_package"),
        ("squares_of_nobody", "or a file of your own such as mine.py"),
    ):
        done = podium_here("train", recipe, f"workload.name={trained / name if '.py' in name else name}")
        assert_user_error(done, part)


RAISES = WORKLOAD.replace(
    "from blocks import Block",
    "from blocks import Block\n\n\nclass Late(nn.Module):\n    passes = 0\n\n    def forward(self, x):\n"
    "        Late.passes += self.training\n        if Late.passes > 40:\n            raise LookupError('too late')\n"
    "        return x",
).replace("nn.Dropout(0.1)", "Late()")


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_what_a_users_code_raises_in_training_shows_their_frames_and_ends_with_3(tmp_path, podium, instances):
    write_own(tmp_path, RAISES)
    done = podium("train", "mine.yaml", "train.length=20ep", "--out", "run", "--instances", instances)
    assert done.returncode == 3, done.stderr
    assert "mine.py:14, in forward: LookupError: too late" in sentence(done.stderr)
    assert "restarting" not in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "failed"
