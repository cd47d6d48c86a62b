"""What a command loads before it shows or trains anything: modules, not seconds, which depend on the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recipes import TINY

#: the modules that are there when the first update has been made
_AFTER_FIRST_UPDATE = """
import os, sys
from podium.cli import main
from podium.engine.update import Engine

update = Engine.update

def first(engine, *args, **kwargs):
    result = update(engine, *args, **kwargs)
    print(" ".join(sys.modules), flush=True)
    os._exit(0)

Engine.update = first
main()
"""
_AFTER_HELP = """
import os, sys
end = os._exit

def told(code):
    print(" ".join(sys.modules), flush=True)
    end(code)

os._exit = told
from podium.cli import main
main()
"""


def _modules(code: str, *words: str, cwd: Path) -> set[str]:
    found = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, check=True)
    return set(found.stdout.splitlines()[-1].split())


def _packages(modules: set[str], *names: str) -> list[str]:
    return [name for name in names if any(module == name or module.startswith(f"{name}.") for module in modules)]


@pytest.mark.slow
def test_the_first_update_of_mnist_waits_for_nothing_that_it_does_not_need(tmp_path):
    name, *overrides = TINY["mnist"]
    modules = _modules(_AFTER_FIRST_UPDATE, "train", name, *overrides, cwd=tmp_path)
    assert {"torch", "podium.train", "podium.engine.update"} <= modules
    later = ("tensorboard", "google.protobuf", "PIL", "matplotlib", "jinja2")  # with records, reports
    other = ("h5py", "numba", "optuna", "pandas", "scipy", "tokenizers", "transformers", "wandb", "mlflow")
    other_ways = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "torch.distributed.fsdp")
    own = (
        "podium.study",
        "podium.report.prediction",
        "podium.report.page",
        "podium.plan",
        "podium.profiling",
        "podium.submit",
        "podium.tune.measure",
    )
    assert _packages(modules, *later, *other, *other_ways, *own) == []


def test_help_loads_neither_torch_nor_what_reads_recipes(tmp_path):
    modules = _modules(_AFTER_HELP, "--help", cwd=tmp_path)
    assert "typer" in modules
    unneeded = ("torch", "numpy", "pydantic", "ruamel", "h5py", "podium.recipe", "podium.commands", "markdown_it")
    assert _packages(modules, *unneeded, "pygments") == []


def test_help_looks_as_it_does_with_all_of_rich(tmp_path):
    run = [sys.executable, "-c"]
    env = os.environ | {"COLUMNS": "80", "FORCE_COLOR": "1"}
    shown = [
        subprocess.run([*run, f"{first}from podium.cli import main; main()", *words], env=env, capture_output=True)
        for words in (["--help"], ["--hepl"])
        for first in ("", "import rich.markdown, rich.traceback, typer.rich_utils; ")
    ]
    assert shown[0].stdout == shown[1].stdout
    assert b"\x1b[" in shown[0].stdout
    assert b"monitor" in shown[0].stdout
    assert (shown[2].returncode, shown[2].stderr) == (shown[3].returncode, shown[3].stderr)
    assert shown[2].returncode == 2
