"""The documentation of recipes says what the schema says: no key is left out, none is made up."""

import re
import tomllib
from pathlib import Path

import pytest

from podium.commands.doctor import TESTED_TORCH
from podium.recipe.loading import load_recipe, schema_of
from podium.recipe.section import all_keys
from podium.recipe.shipped import shipped_recipes
from podium.workloads.registry import WORKLOADS

ROOT = Path(__file__).parents[2]
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_CELL = re.compile(r"^\| `([a-z0-9_.]+)` \|", re.MULTILINE)


def known_keys() -> set[str]:
    return {key for workload in WORKLOADS for key in all_keys(schema_of(workload))}


def test_every_key_of_the_schema_is_in_the_documentation():
    sections = {key for key in known_keys() if any(other.startswith(f"{key}.") for other in known_keys())}
    documented = set(FIRST_CELL.findall(RECIPES))
    assert known_keys() - sections - documented == set()
    assert all(f"`{section}`" in RECIPES for section in sections)


def test_every_key_in_the_documentation_is_in_the_schema():
    assert set(FIRST_CELL.findall(RECIPES)) - known_keys() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_overrides_and_recipes_in_examples_are_real(page):
    # lines with a prompt show what a mistake says
    text = re.sub(r"^\$ .*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = {key.partition(".")[0] for key in known_keys()}
    names = {name for name, _ in shipped_recipes()} | {name.partition("/")[0] for name, _ in shipped_recipes()}
    for dotted in re.findall(r"\b([a-z]+\.[a-z_.]+)=\S", text):
        if dotted.partition(".")[0] in sections:
            assert dotted in known_keys() or dotted.startswith("optim.options."), dotted
    for command in re.findall(r"podium (?:train|show) ([a-z0-9_/]+)(?=[\s`])", text):
        assert command in names, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_recipe_examples_in_the_documentation_can_be_read(tmp_path):
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            path = tmp_path / f"{page.stem}-{number}.yaml"
            path.write_text(block, encoding="utf-8")
            load_recipe(str(path))


def test_every_key_in_the_table_of_other_systems_exists():
    text = (ROOT / "docs" / "from_other_systems.md").read_text(encoding="utf-8")
    known = known_keys()
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| option")
    ]
    named = [key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", row[1]) if key != "podium"]
    assert len(rows) > 85
    assert len(named) > 60
    assert set(named) <= known, set(named) - known
    sections = {key.partition(".")[0] for key in known}
    recipes = {name for name, _ in shipped_recipes()}
    for remark in (row[-1] for row in rows):
        for word in re.findall(r"`([a-z0-9_./]+)(?:=\S+)?`", remark):
            if "/" in word:
                assert word in recipes, word
            elif word.partition(".")[0] in sections and "." in word:
                assert word in known, word


def test_doctor_knows_the_versions_of_torch_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, last = TESTED_TORCH
    assert f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" in project["dependencies"]


def test_every_option_of_the_published_cnn_training_is_in_the_table():
    options = [
        "--BN-span",
        "--available-memory-proportion",
        "--base-learning-rate-exponent",
        "--batch-norm",
        "--batch-size",
        "--batches-per-step",
        "--data-dir",
        "--dataset",
        "--distributed",
        "--eight-bit-io",
        "--epochs",
        "--fp-exceptions",
        "--generated-data",
        "--gradient-accumulation-count",
        "--group-norm",
        "--groups",
        "--help",
        "--iterations",
        "--label-smoothing",
        "--learning-rate-decay",
        "--learning-rate-schedule",
        "--loss-scaling",
        "--lr-schedule",
        "--model-size",
        "--model",
        "--momentum",
        "--no-dataset-cache",
        "--no-hostside-norm",
        "--no-stochastic-rounding",
        "--no-validation",
        "--optimiser",
        "--pipeline-schedule",
        "--pipeline-splits",
        "--pipeline",
        "--precision",
        "--replicas",
        "--restore-path",
        "--seed",
        "--select-ipus",
        "--sharding-exclude-filter",
        "--sharding-include-filter",
        "--shards",
        "--standard-imagenet",
        "--valid-batch-size",
        "--warmup-epochs",
        "--weight-decay",
        "--config",
        "--enable-recompute",
        "--wandb",
        "--cellName",
        "--initLR",
        "--design",
        "--outPath",
        "--yaml_config",
        "--num_epochs",
    ]
    text = (ROOT / "docs" / "from_other_systems.md").read_text(encoding="utf-8")
    assert [option for option in options if f"`{option}`" not in text] == []


#: options of the programs that their descriptions leave out, or name otherwise
OF_PROGRAMS = [
    "--enable-recomputation",
    "--select-ipu",
    "--hostside-norm",
    "--micro-batch-size",
    "--device-iterations",
    "--stochastic-rounding",
    "--abs-learning-rate",
    "--abs-end-learning-rate",
    "--poly-lr-decay-power",
    "--poly-lr-end-ratio",
    "--lr-decay-rate",
    "--lr-drops",
    "--lars-eeta",
    "--lars-epsilon",
    "--lars-weight-decay",
    "--lars-skip-list",
    "--rmsprop-decay",
    "--rmsprop-base-decay-exp",
    "--rmsprop-epsilon",
    "--BN-decay",
    "--group-dim",
    "--expand-ratio",
    "--stable-norm",
    "--weight-avg-N",
    "--weight-avg-exp",
    "--mixup-alpha",
    "--cutmix-lambda",
    "--cutmix-version",
    "--fused-preprocessing",
    "--ckpts-per-epoch",
    "--epochs-per-ckpt",
    "--normalise-input",
    "--synthetic-data",
    "--replication-factor",
    "--gradient-accumulation",
    "--layers-per-ipu",
    "--ipus-per-replica",
    "--packed-data",
    "--packing-factor",
    "--max-sequences-per-pack",
    "--lr-warmup",
    "--auto-loss-scaling",
    "--mask-tokens",
    "--sequence-length",
    "--layer-norm-eps",
    "--attention-probs-dropout-prob",
    "--replicated-tensor-sharding",
    "--recompute-checkpoint-every-layer",
    "--pretrained-checkpoint",
    "--checkpoint-steps",
    "--max-len",
    "--data-prefix",
    "--stride",
    "--save-per-steps",
    "--lr-decay-steps",
]


@pytest.mark.parametrize("option", OF_PROGRAMS)
def test_options_of_the_published_programs_have_a_key_or_a_reason(option):
    lines = (ROOT / "docs" / "from_other_systems.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if f"`{option}`" in line.split(" | ")[0]]
    assert rows, option
    for row in rows:
        _, key, remark = (cell.strip() for cell in row.strip("|").split("|", 2))
        assert key or len(remark) > 20, row
