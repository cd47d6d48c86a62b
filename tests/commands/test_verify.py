"""`podium verify` and `podium compare --bits`: equal runs are told so, and where others begin to differ."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from podium.runs.folder import Run
from podium.training import validation
from tests.support.own import write_own
from tests.support.processes import assert_user_error, podium_here, run_files
from tests.support.recipes import TINY

#: records of updates 5, 8, 10, 15, 16, 20; checkpoints of 8, 16 and 20
RECIPE = [*TINY["mnist"], "batch.micro=4", "batch.replicas=4", "train.length=20up", "valid.every=10up",
          "checkpoint.every=8up", "checkpoint.keep=3", "checkpoint.best=false", "log.monitor=false"]  # fmt: skip
#: the update after which a bit of the weights flips, in a training of this process
FLIPPED_AFTER = 13


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in run_files(folder) if (folder / name).is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "run"
    assert podium_here("train", *RECIPE, "--out", path).returncode == 0
    return path


@pytest.fixture(scope="module")
def flipped(tmp_path_factory) -> Path:
    """A run whose memory failed."""
    path = tmp_path_factory.mktemp("verify") / "flipped"
    assert train_with_a_flipped_bit(path).returncode == 0
    return path


def train_with_a_flipped_bit(path: Path, *words: str, of_last: bool = False):
    """Train while a bit of a weight flips that has no influence, or of the last bias, which has one at once."""

    def after_update(training) -> None:
        if training.state.progress.update == FLIPPED_AFTER:
            weights = dict(training.state.model.named_parameters())
            names = [name for name in weights if of_last or (name.endswith("weight") and weights[name].dim() == 2)]
            name = names[-1] if of_last else names[0]
            weights[name].detach().view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 20)
        validation.take_average(training)

    with mock.patch("podium.train.take_average", after_update):
        return podium_here("train", *RECIPE, *words, "--out", path)


def copied(run: Path, into: Path) -> Path:
    shutil.copytree(run, into)
    return into


def edited(run: Path, update: int, **fields: object) -> None:
    records = Run(run).records(digests=True)
    lines = [json.dumps({**r, **(fields if r["update"] == update else {})}) + "\n" for r in records]
    (run / "metrics.jsonl").write_text("".join(lines))


def test_a_stretch_made_again_is_equal_and_the_run_stays_as_it_is(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    before = contents(run)
    done = podium_here("verify", run, "--updates", "9:17")
    assert done.returncode == 0, done.stderr
    # up to the next record, from the checkpoint before
    assert "4 records are equal, to update 20: weights, losses and metrics, to the bit" in done.stdout
    assert "making 12 updates again, from the checkpoint of update 8 to update 20" in done.stderr
    assert contents(run) == before


def test_without_a_checkpoint_early_enough_it_begins_at_the_beginning(trained):
    done = podium_here("verify", trained, "--updates", "3:8")
    assert done.returncode == 0, done.stderr
    assert "has no checkpoint of update 3 or before (there are: 8, 16, 20): starting from the beginning" in done.stderr
    assert "2 records are equal, to update 8" in done.stdout


def test_the_first_record_that_differs_is_named_and_the_tensors(flipped, tmp_path):
    kept = tmp_path / "again"
    done = podium_here("verify", flipped, "--updates", "8:20", "--keep", kept)
    assert done.returncode == 1, done.stderr
    assert "the record of update 15 is the first that differs, after equal ones up to update 10: weights/xxh3" in (
        done.stdout
    )
    assert "it began in update" not in done.stdout  # the bit is one that no loss depends on
    assert "different after update 16" in done.stdout
    assert Run(kept).summary()["updates"] == 20
    compared = podium_here("compare", "--bits", flipped, kept, "--json")
    assert compared.returncode == 1
    tree = json.loads(compared.stdout)
    assert tree["first_difference"]["update"] == 15
    assert tree["first_difference"]["equal_until"] == 10
    assert tree["first_difference"]["first_losses"] is None
    assert tree["checkpoint"] == 16
    assert any(each["name"].endswith("weight") and each["num"] for each in tree["tensors"])


def test_single_updates_are_named_by_their_losses_or_by_digests_of_each(tmp_path):
    assert train_with_a_flipped_bit(tmp_path / "run", of_last=True).returncode == 0
    done = podium_here("verify", tmp_path / "run", "--updates", "8:20")
    assert done.returncode == 1, done.stderr
    assert "it began after update 10 at the latest in update 14, whose losses are the first that differ" in done.stdout
    assert train_with_a_flipped_bit(tmp_path / "each", "log.digests=updates").returncode == 0
    done = podium_here("verify", tmp_path / "each", "--updates", "8:20")
    assert done.returncode == 1, done.stderr
    assert "it began in update 13: the weights after it are the first that differ\n" in done.stdout


@pytest.mark.parametrize("words", [["parallel.stages=2"], ["parallel.shard=parameters", "engine.reduction=fast"]])
def test_digests_of_each_update_want_all_weights(words, tmp_path):
    done = podium_here("train", *RECIPE, *words, "log.digests=updates", "--out", tmp_path / "run")
    assert_user_error(done, "log.digests = updates needs all weights on every instance", words[0].partition("=")[0])
    assert not (tmp_path / "run").exists()


def test_two_runs_that_are_equal_and_two_that_are_not(trained, flipped, tmp_path):
    same = copied(trained, tmp_path / "same")
    done = podium_here("compare", "--bits", trained, same)
    assert done.returncode == 0, done.stderr
    assert "6 records of the same updates are equal, the last of update 20" in done.stdout
    assert "of 3 checkpoints of both are equal to the bit" in done.stdout
    done = podium_here("compare", "--bits", trained, flipped)
    assert done.returncode == 1
    assert "the records of update 15 are the first that differ: weights/xxh3" in done.stdout
    assert "equal up to update 10" in done.stdout


def test_a_record_that_was_changed_is_found(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    edited(run, 10, **{"weights/xxh3": "0123456789abcdef"})
    done = podium_here("verify", run, "--updates", "8:16")
    assert done.returncode == 1
    assert "is broken between updates 8 and 10" in done.stderr
    assert "update 10 is the first that differs, after equal" not in done.stdout  # it is the first that is compared
    assert "weights/xxh3 0123456789abcdef and" in done.stdout


def test_a_loss_that_was_changed_is_found(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    edited(run, 15, **{"train/loss": 0.25})
    done = podium_here("verify", run, "--updates", "8:16")
    assert done.returncode == 1
    assert "the record of update 15 is the first that differs" in done.stdout
    assert "train/loss 0.25 and" in done.stdout
    assert "the checkpoints of update 16 are equal to the bit: records differ, but not the weights" in done.stdout


def test_a_checkpoint_that_contradicts_its_record_is_found_without_training(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    edited(run, 8, **{"weights/xxh3": "0123456789abcdef"})
    done = podium_here("verify", run, "--updates", "8:10")
    assert done.returncode == 1
    assert "the checkpoint of update 8 holds other weights than its record tells" in done.stdout
    assert "making" not in done.stderr


def test_runs_without_digests_are_compared_by_their_losses(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    lines = [json.dumps(record) + "\n" for record in Run(run).records()]
    (run / "metrics.jsonl").write_text("".join(lines))
    done = podium_here("verify", run, "--updates", "16:20")
    assert done.returncode == 0, done.stderr
    assert "has no digests of its weights: losses and metrics are compared" in done.stderr
    assert "1 record is equal, to update 20: losses and metrics, to the bit" in done.stdout


def test_an_edited_recipe_is_told_first_and_that_of_the_training_is_used(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    path = run / "recipe.yaml"
    text = path.read_text()
    assert "seed: 1" in text
    path.write_text(text.replace("seed: 1", "seed: 5"))
    done = podium_here("verify", run, "--updates", "16:20")
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert "recipe.yaml was edited since" in first
    assert "seed was 1, is 5" in first


def test_another_machine_is_told_before_and_after(flipped, tmp_path):
    run = copied(flipped, tmp_path / "run")
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "instruction_set": "VSX"}))
    done = podium_here("verify", run, "--updates", "8:16")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "instruction_set VSX" in line]
    assert said
    assert done.stderr.index(said[0]) < done.stderr.index("epoch ") if "epoch " in done.stderr else True
    assert "the bits may differ for this reason alone: instruction_set VSX" in done.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--updates", "12"], ["--updates 12: expected two updates"]),
        (["--updates", "12:8"], ["--updates 12:8: expected two updates"]),
        (["--updates", "20:30"], ["the last record of", "is that of update 20"]),
        (["--instances", "x"], ["--instances x: expected a number, a range such as 2..8, or auto"]),
    ],
)
def test_mistakes_are_one_sentence(trained, words, parts):
    assert_user_error(podium_here("verify", trained, *words), *parts)


def test_bits_of_two_runs_only(trained):
    assert_user_error(podium_here("compare", "--bits", trained), "--bits compares two runs, but 1 is given")


@pytest.mark.slow
def test_a_stretch_is_equal_on_any_number_of_instances(trained, podium):
    done = podium("verify", trained, "--updates", "8:16", "--instances", 3)
    assert done.returncode == 0, done.stderr
    assert "3 records are equal, to update 16: weights, losses and metrics, to the bit, made again on 3 instances" in (
        done.stdout
    )


def test_runs_with_records_of_other_updates_are_compared_where_both_have_one(trained, tmp_path):
    other = tmp_path / "other"
    assert podium_here("train", *RECIPE, "engine.updates_per_call=4", "--out", other).returncode == 0
    done = podium_here("compare", "--bits", trained, other)
    assert done.returncode == 0, done.stdout  # links, and means since the last record, are those of other updates
    assert done.stdout.startswith("4 records of the same updates are equal, the last of update 20")


def test_a_workload_of_ones_own_is_verified_and_its_observers_are_left_out(tmp_path):
    recipe = write_own(tmp_path)
    (tmp_path / "watch.py").write_text(
        "from pathlib import Path\n\n\nclass Watch:\n    def on_record(self, run, record):\n"
        f"        with Path({str(tmp_path / 'seen')!r}).open('a') as file:\n            file.write(f'{{run}}\\n')\n"
    )
    words = [f"log.observers=[{tmp_path / 'watch.py'}:Watch]", "train.length=8up"]
    assert podium_here("train", recipe, *words, "--out", tmp_path / "run").returncode == 0
    seen = (tmp_path / "seen").read_text()
    assert seen
    done = podium_here("verify", tmp_path / "run", "--updates", "4:8")
    assert done.returncode == 0, done.stderr
    assert "1 record is equal, to update 8" in done.stdout
    assert (tmp_path / "seen").read_text() == seen
