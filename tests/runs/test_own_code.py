"""The code of a run is recorded and copied, compared when it continues, and run from elsewhere only when trusted."""

import hashlib
import json
import shutil

import pytest

from podium.runs import own_code
from podium.runs.folder import Run
from tests.support.own import WORKLOAD, write_own
from tests.support.processes import assert_user_error, podium_here


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    recipe = write_own(folder)
    assert podium_here("train", recipe, "--out", folder / "run").returncode == 0
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of the workload and its run, as if it had been made there; what was said about code is forgotten after."""
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    folder = tmp_path / "project"
    folder.mkdir()
    recipe = write_own(folder)
    assert podium_here("train", recipe, "--out", folder / "run").returncode == 0
    return folder


@pytest.fixture
def elsewhere(made, tmp_path, monkeypatch):
    """The run as another user receives it: no file of the workload, nothing in their state folder."""
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    run = tmp_path / "received"
    shutil.copytree(made / "run", run)
    environment = json.loads((run / "environment.json").read_text())
    environment["code"]["root"] = "/nowhere"
    (run / "environment.json").write_text(json.dumps(environment))
    text = (run / "recipe.yaml").read_text().replace(str(made), "/nowhere")
    (run / "recipe.yaml").write_text(text)
    return run


def test_the_run_has_copies_and_checksums_of_the_file_and_of_what_it_imports(made):
    recorded = Run(made / "run").environment()["code"]["files"]
    assert recorded.keys() == {"mine.py", "blocks.py"}
    for name, digest in recorded.items():
        assert (made / "run" / "code" / name).read_bytes() == (made / name).read_bytes()
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("changed", ["mine.py", "blocks.py"])
@pytest.mark.slow
def test_a_changed_file_stops_a_resume_which_goes_on_with_the_copy_or_the_new_file(project, changed):
    weights = Run(project / "run").summary()["weights_sha256"]
    file = project / changed
    file.write_text(file.read_text() + "\nCHANGED = True\n")
    resume = ("resume", project / "run", "--checkpoint", 4)
    done = podium_here(*resume)
    assert_user_error(done, f"{file} has changed since", "--code copy", "--code now")
    assert podium_here(*resume, "--code", "copy").returncode == 0
    assert Run(project / "run").summary()["weights_sha256"] == weights
    done = podium_here(*resume, "--code", "now")
    assert done.returncode == 0, done.stderr
    assert "bits may differ" in done.stderr
    assert changed in done.stderr
    assert_user_error(podium_here(*resume, "--code", "both"), "expected copy or now")


@pytest.mark.slow
def test_other_commands_use_the_copy_of_a_file_that_has_changed_and_say_so(project):
    (project / "mine.py").write_text(WORKLOAD.replace("hidden: int = 8", "hidden: int = 9"))
    done = podium_here("validate", project / "run")
    assert done.returncode == 0, done.stderr
    assert "using the run's own copy" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("command", ["validate", "predict", "resume", "average"])
def test_a_run_from_elsewhere_asks_before_its_code_is_run(elsewhere, command):
    (elsewhere / "code" / "mine.py").write_text("raise SystemExit('it was run')\n")
    done = podium_here(command, elsewhere)
    assert_user_error(done, "would run code that was never run here", "--trust")
    assert "name: /nowhere/mine.py" in podium_here("show", elsewhere).stdout


def test_a_trusted_run_is_used_and_not_asked_about_again(elsewhere, monkeypatch):
    done = podium_here("validate", elsewhere, "--trust")
    assert "valid/loss" in done.stdout, done.stderr
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    assert podium_here("validate", elsewhere).returncode == 0


def test_code_beside_a_known_file_is_not_run_unknown_whatever_the_record_says(elsewhere, made, monkeypatch):
    assert podium_here("validate", elsewhere, "--trust").returncode == 0  # mine.py and blocks.py are known now
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    (elsewhere / "code" / "blocks.py").write_text("raise SystemExit('it was run')\n")
    environment = json.loads((elsewhere / "environment.json").read_text())
    del environment["code"]["files"]["blocks.py"]
    (elsewhere / "environment.json").write_text(json.dumps(environment))
    assert_user_error(podium_here("validate", elsewhere), "--trust")
    (elsewhere / "code" / "blocks.py").write_bytes((made / "blocks.py").read_bytes())
    (elsewhere / "code" / "__pycache__").mkdir(exist_ok=True)
    (elsewhere / "code" / "__pycache__" / "blocks.cpython-311.pyc").write_bytes(b"made up")
    assert_user_error(podium_here("validate", elsewhere), "holds more than copies")


def test_a_run_that_names_a_module_asks_too(elsewhere):
    text = (elsewhere / "recipe.yaml").read_text().replace("/nowhere/mine.py", "this:Zen")
    (elsewhere / "recipe.yaml").write_text(text)
    assert_user_error(podium_here("validate", elsewhere), "the module of this:Zen", "--trust")


@pytest.mark.parametrize(
    "record", [[], {"files": {"../x.py": "0"}, "root": "/"}, {"files": {}}, {"files": 3, "root": "/"}]
)
def test_a_damaged_record_is_told(elsewhere, record):
    environment = json.loads((elsewhere / "environment.json").read_text()) | {"code": record}
    (elsewhere / "environment.json").write_text(json.dumps(environment))
    assert_user_error(podium_here("validate", elsewhere), "environment.json is damaged")
