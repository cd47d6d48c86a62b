"""Where gpt2's tokens come from: a text of one's own, folders of token files, and the windows that validate."""

import json
import os
import pickle

import numpy as np
import pytest

from podium.data.source import empty_buffers
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.workloads.gpt2.section import Gpt2Data, Gpt2Model
from podium.workloads.gpt2.workload import Workload
from tests.support.processes import assert_user_error, podium_here

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"layers": 1, "hidden": 8, "heads": 1, "context": 10}
LINES = ["First Citizen:", "Before we proceed any further, hear me speak.", "", "All:", "Speak, speak.", ""]


def opened(folder, *, vocabulary=None, **data) -> Workload:
    return Workload(Gpt2Model(**SMALL, vocabulary=vocabulary), Gpt2Data(source="files", path=folder, **data))


def first_tokens(source) -> list[int]:
    out = empty_buffers(source.fields, len(source))
    source.gather(np.arange(len(source)), out)
    return out["tokens"][:, 0].tolist()


@pytest.fixture
def tokens(tmp_path):
    """A folder as nanoGPT's scripts write it: tokens are numbered by their place, up to 499."""
    np.arange(500, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(201, dtype="<u2").tofile(tmp_path / "val.bin")
    return tmp_path


# --- windows --------------------------------------------------------------------------------------------------------


def test_validation_takes_windows_over_the_whole_split_whatever_the_stride_of_training(tokens):
    workload = opened(tokens, stride=3)
    assert first_tokens(workload.source("train"))[:3] == [0, 3, 6]
    for split in ("valid", "test"):
        assert first_tokens(workload.source(split)) == list(range(0, 200, 10))


def test_validation_takes_a_stride_of_its_own(tokens):
    assert first_tokens(opened(tokens, valid_stride=25).source("valid")) == list(range(0, 200, 25))


def test_fewer_windows_for_validation_are_evenly_spread_and_for_training_the_first(tokens):
    workload = opened(tokens, max_samples=5)
    assert first_tokens(workload.source("train")) == [0, 10, 20, 30, 40]
    assert first_tokens(workload.source("valid")) == [0, 40, 80, 120, 160]
    assert len(opened(tokens, max_samples=1000).source("valid")) == 20


# --- vocabulary -----------------------------------------------------------------------------------------------------


def test_files_without_a_vocabulary_have_that_of_their_largest_token(tokens, capsys):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tokens / "executed"),))

    (tokens / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Trap()}))
    assert opened(tokens).vocabulary == 500
    said = " ".join(capsys.readouterr().err.split())
    assert "Vocabulary: 500 tokens, the largest token of train.bin and val.bin plus one" in said
    assert "meta.pkl is not read" in said
    assert not (tokens / "executed").exists()
    assert opened(tokens / "val.bin").vocabulary == 201


def test_a_vocabulary_that_is_told_is_taken(tokens):
    (tokens / "meta.json").write_text(json.dumps({"vocab_size": 512}))
    assert opened(tokens).vocabulary == 512
    assert opened(tokens, vocabulary=640).vocabulary == 640


@pytest.mark.parametrize("content", ["{}", "[]", "65", '{"vocab_size": "65"}', '{"vocab_size": 0}', "not", "[" * 5000])
def test_a_meta_file_that_says_nothing_is_told(content, tokens):
    (tokens / "meta.json").write_text(content)
    with pytest.raises(UserError, match=r"meta.json does not say how many tokens there are"):
        _ = opened(tokens).vocabulary


# --- a text of one's own --------------------------------------------------------------------------------------------


def test_a_text_of_ones_own_is_trained_on_in_one_command(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "input.txt").write_text("\n".join(LINES * 100))
    small = ["workload.model.layers=1", "workload.model.hidden=8", "workload.model.heads=1"]
    small += ["workload.model.context=16", "workload.data.sample.tokens=5"]
    small += ["train.length=6up", "engine.updates_per_call=2", "engine.threads=1", "log.tensorboard=false"]
    path = f"workload.data.path={tmp_path / 'input.txt'}"
    done = podium_here(
        "train", "gpt2/char", path, *small, "workload.data.sample.prompt=All:", "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert run.recipe().workload.data.sample.prompt == "All:"
    assert all(text.startswith("All:") for text in (run.pictures / "samples.txt").read_text().split("\n\n"))
    # shorter than an epoch: a person sees updates
    assert run.summary()["epochs"] < 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("update ")]
    assert lines[-1].startswith("update 6/6  train loss ")
    assert "epoch" not in done.stderr + done.stdout
    assert "6 of 6" in done.stdout
    html = run.report_file.read_text()
    assert ">of 6<" in html
    assert "epochs" not in html.partition("<script")[0]
    assert ">epoch<" not in html


def test_the_prompt_of_the_standard_library_is_not_asked_of_another_text(tmp_path):
    assert "import" in load_recipe("gpt2/char").workload.data.sample.prompt
    assert load_recipe("gpt2/char", [f"workload.data.path={tmp_path}"]).workload.data.sample.prompt == ""


def test_paths_that_are_no_text_are_told(tokens, tmp_path):
    recipe = ["train", "gpt2/char", "--out", tmp_path / "run"]
    assert_user_error(podium_here(*recipe, f"workload.data.path={tokens}"), "set workload.data.source=files")
    assert_user_error(podium_here(*recipe, "workload.data.path=nowhere"), "nowhere: there is no such file or folder")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    assert_user_error(
        podium_here(*recipe, f"workload.data.path={tmp_path / 'picture.png'}"), "none of the files is UTF-8"
    )
    assert not (tmp_path / "run").exists()
