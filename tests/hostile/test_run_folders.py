"""A run folder that anybody may have changed: every command gives one sentence or the right result, and never waits."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from podium.chain import LINK, LOSS_MARKS, WEIGHTS
from podium.checkpoints import huggingface, reading
from podium.checkpoints.tensor_file import tensors_in
from podium.commands.show import describe
from podium.distributed.digest import weights_sha256
from podium.engine.saved_state import check_saved
from podium.errors import UserError
from podium.launch.failures import Failure, read_failures, write_failure
from podium.report.prediction import write_run_report
from podium.runs.curves import draw_curves
from podium.runs.facts import read_records
from podium.runs.folder import Run
from podium.runs.trackers import kept_id
from podium.training.build import build_model
from podium.ui.run_summary import summary_table
from podium.workloads.registry import workload_class
from tests.support.hostile import (
    JSON_VALUES,
    NO_FILES,
    Tally,
    attack,
    changed_tree,
    check_sentence,
    damaged,
    no_hang,
    replace_by,
)
from tests.support.processes import podium_here, sentence
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow
FILES = ["summary.json", "environment.json", "metrics.jsonl", "recipe.yaml", ".lock", "log/instance-0.log"]
CHECKPOINT = "checkpoints/update-00000010"
PARTS = ["manifest.json", "state.json", "model.safetensors", "optimiser.safetensors"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that was interrupted after update 10 of 15, as `podium resume` finds it."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    done = podium_here(
        "train", *TINY["mnist"], "train.length=15up", "checkpoint.every=5up", "checkpoint.keep=5", "--out", folder
    )
    assert done.returncode == 0, done.stderr
    run = Run(folder)
    shutil.rmtree(run.checkpoints / "update-00000015")
    run.write_summary({**run.summary(), "state": "interrupted"})
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Run:
    shutil.copytree(trained, tmp_path / "run")
    return Run(tmp_path / "run")


def answer(*args: object) -> tuple[int, str]:
    """Exit code and sentence of a command, which must be 0 or 2."""
    with no_hang():
        done = podium_here(*args)
    assert done.returncode in (0, 2), (done.returncode, done.stderr[-3000:])
    if done.returncode == 0:
        assert "Traceback" not in done.stderr
        return 0, ""
    text = sentence(done.stderr).removeprefix("podium: ")
    check_sentence(text)
    return 2, text


# ------------------------------------------------------------------------------------------- things that are no files


@pytest.mark.parametrize("kind", NO_FILES)
def test_no_file_of_a_run_makes_a_command_wait_or_fail_without_a_sentence(trained, tmp_path, kind):
    tally = Tally(f"run folder with {kind}")
    for name in [*FILES, *(f"{CHECKPOINT}/{part}" for part in PARTS)]:
        commands = ["show"] if name == "environment.json" else ["show", "validate", "resume"]
        if name in ("metrics.jsonl", ".lock", "log/instance-0.log"):
            commands = ["show", "resume"]
        for command in commands:
            folder = tmp_path / "run"
            shutil.copytree(trained, folder)
            replace_by(folder / name, kind)
            code, text = answer(command, folder)
            tally.inputs += 1
            if code:
                tally.add(text, folder / name, folder)
            shutil.rmtree(folder)
    tally.report()
    assert tally.kinds


def test_what_is_told_names_the_file_and_what_to_do(run):
    run.summary_file.unlink()
    os.mkfifo(run.summary_file)
    _, text = answer("show", run.path)
    assert "summary.json cannot be read: it is a named pipe, not a file; move it away" in text
    run.summary_file.unlink()
    run.summary_file.write_bytes(b"\xff\xfe{}")
    assert "summary.json is damaged: it is not text in UTF-8; move it away" in answer("show", run.path)[1]
    run.summary_file.write_text("[" * 100_000)
    assert "nested more than 64 levels deep" in answer("show", run.path)[1]
    run.summary_file.write_text('{"updates": "many"}')
    assert "summary.json is damaged: updates does not hold what it should" in answer("show", run.path)[1]
    run.summary_file.unlink()
    run.metrics_file.write_text('{"update": 1, "epoch": 1}\nrubbish\n{"update": 2}\n')
    assert "metrics.jsonl is damaged: line 2 is no record of metrics; remove that line" in answer("resume", run.path)[1]


def test_checkpoint_folders_with_other_names_are_none(run):
    for name in ("update-abc", "update-1", "update-99999999999999999999", "update-²²²²²²²²", "update-00000099.bak"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "update-00000098").write_text("a file")
    assert [path.name for path in reading.checkpoint_paths(run.checkpoints)] == ["update-00000005", "update-00000010"]
    assert "there are: 5, 10" in answer("validate", run.path, "--checkpoint", 7)[1]
    assert answer("validate", run.path)[0] == 0


def test_a_checkpoint_copied_to_another_name_is_not_taken_for_that_update(run):
    shutil.copytree(run.checkpoints / "update-00000005", run.checkpoints / "update-00000020")
    with pytest.raises(UserError, match="it holds the state of update 5"):
        reading.load(run.checkpoints / "update-00000020")


def test_links_are_never_written_through(run, tmp_path):
    """What a link in the run folder leads to stays as it is."""
    precious = tmp_path / "thesis.tex"
    precious.write_text("years of work")
    for name in (".lock", ".summary.json.writing", ".metrics.jsonl.writing", ".report.html.writing"):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(precious)
    run.summary_file.unlink()
    answer("resume", run.path)
    assert precious.read_text() == "years of work"


# ------------------------------------------------------------------------------------------------ any content at all


def _everything_shown(run: Run) -> None:
    describe(run)
    summary = run.summary(whole=True)
    if summary:
        summary_table("run", summary)
    run.command()
    write_run_report(run)


def test_summaries_and_environments_with_any_content(run):
    tally = Tally("summary.json and environment.json")
    files = {path: path.read_bytes() for path in (run.summary_file, run.environment_file)}

    @attack(200)
    @given(st.data(), st.sampled_from(sorted(files)))
    def change(data, path):
        for each, content in files.items():
            each.write_bytes(content)
        original = files[path]
        texts = changed_tree(json.loads(original)) | JSON_VALUES
        path.write_bytes(data.draw(texts.map(json.dumps).map(str.encode) | damaged([original])))
        tally.refused(lambda: _everything_shown(run), path, run.path)

    change()
    tally.report()
    assert tally.right
    assert len(tally.kinds) > 5


def test_records_with_any_content(run):
    original, tally = run.metrics_file.read_bytes(), Tally("metrics.jsonl")
    good = read_records(run.metrics_file, digests=True)
    assert len(good) == original.count(b"\n") > 1
    assert all({WEIGHTS, LINK} <= record.keys() for record in good)

    lists = st.lists(JSON_VALUES).map(lambda rows: "".join(f"{json.dumps(row)}\n" for row in rows).encode())

    @attack(400)
    @given(damaged([original]) | lists)
    def change(data):
        run.metrics_file.write_bytes(data)

        def compare() -> None:
            # sorted: the digests are handed on behind the numbers, wherever they stand in a line
            records = [json.dumps(record, sort_keys=True) for record in read_records(run.metrics_file, digests=True)]
            lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
            assert records == [json.dumps(line, sort_keys=True) for line in lines]
            digests = (WEIGHTS, LINK, LOSS_MARKS)
            numbers = [{key: value for key, value in line.items() if key not in digests} for line in lines]
            assert [json.dumps(record) for record in read_records(run.metrics_file)] == list(map(json.dumps, numbers))

        tally.refused(compare, run.metrics_file)

    change()
    tally.report()
    assert tally.right
    assert tally.kinds


def test_curves_of_records_with_any_numbers(run):
    numbers = st.floats() | st.integers(-(2**900), 2**900) | st.just(1e308)

    rows = st.fixed_dictionaries({"epoch": numbers, "train/loss": numbers, "valid/loss": numbers})

    @attack(12)
    @given(st.lists(rows, max_size=4))
    def draw(rows):
        lines = [json.dumps({"update": number, **row}) for number, row in enumerate(rows)]
        run.metrics_file.write_text("".join(f"{line}\n" for line in lines))
        with no_hang():
            assert all(drawing.startswith("<") for drawing in draw_curves(run))

    draw()
    run.metrics_file.write_text('{"update": 1, "epoch": 6e-79, "train/loss": 1}\n{"update": 2, "train/loss": 1}\n')
    assert all(drawing.startswith("<") for drawing in draw_curves(run))


def test_endless_lines_do_not_fill_the_memory(run):
    with run.metrics_file.open("wb") as file:
        file.write(b'{"update": 1}\n')
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="line 2 is no record of metrics"):
        read_records(run.metrics_file)


def test_ids_and_notes_that_are_none(tmp_path):
    for content in (b"", b"\xff" * 10, b"../../x", b"x" * 1000):
        (tmp_path / "id").write_bytes(content)
        with pytest.raises(UserError, match="W&B begins a new run"):
            kept_id(tmp_path / "id", "W&B")
    write_failure(tmp_path, Failure(1, "here", 3, "the loss is not finite"))
    for number, content in enumerate(["", "[]", "{}", '{"instance": "x", "host": 1, "exit_code": 2, "message": 3}']):
        (tmp_path / f"failure-x{number}.json").write_text(content)
    os.mkfifo(tmp_path / "failure-y.json")
    with no_hang():
        assert [note.message for note in read_failures(tmp_path)] == ["the loss is not finite"]


# ---------------------------------------------------------------------------------------------------- checkpoints


def _signed(folder: Path, name: str, data: bytes) -> None:
    """Write a file and the checksum that it then needs, as an author who means harm would."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"xxh3_128": xxhash.xxh3_128(data).hexdigest(), "bytes": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_damaged_checkpoints_are_told_or_equal_to_the_bit(run):
    folder = run.path / CHECKPOINT
    right, tally = reading.load(folder), Tally("checkpoints")
    files = {name: (folder / name).read_bytes() for name in PARTS}

    @attack(300)
    @given(st.data(), st.sampled_from(PARTS))
    def damage(data, name):
        (folder / name).write_bytes(data.draw(damaged([files[name]], head=400)))

        def compare() -> None:
            found = reading.load(folder)
            assert found.state == right.state
            for ours, theirs in ((found.weights, right.weights), (found.optimiser, right.optimiser)):
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], theirs[key]) for key in ours)

        tally.refused(compare, folder, folder / name)
        (folder / name).write_bytes(files[name])

    damage()

    @attack(250)
    @given(changed_tree(json.loads(files["manifest.json"])))
    def change(manifest):
        (folder / "manifest.json").write_text(json.dumps(manifest))

        def compare() -> None:
            found = reading.load(folder)
            assert all(torch.equal(found.weights[key], right.weights[key]) for key in right.weights)

        tally.refused(compare, folder)

    change()
    tally.report()
    assert len(tally.kinds) > 5


def test_manifests_name_no_files_of_other_folders(run):
    folder = run.path / CHECKPOINT
    for name in (
        "../../recipe.yaml",
        "/etc/hostname",
        "model.safetensors/../model.safetensors",
        "extra.safetensors",
        "",
    ):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"sha256": "0" * 64}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="in a way that no checkpoint has"):
            reading.load(folder)


def test_states_with_any_content_and_a_right_checksum(run):
    folder = run.path / CHECKPOINT
    state, tally = json.loads((folder / "state.json").read_text()), Tally("state.json, signed")
    seen = []

    @attack(300)
    @given(changed_tree(state))
    def change(tree):
        def load() -> None:
            _signed(folder, "state.json", json.dumps(tree).encode())
            check_saved(reading.load(folder).state)
            seen.append(tree)

        tally.refused(load, folder)

    change()
    tally.report()
    assert tally.right
    assert tally.kinds
    # A few of those that are good enough to be tried: in the real command
    for tree in seen[:: max(1, len(seen) // 6)][:6]:
        _signed(folder, "state.json", json.dumps(tree).encode())
        shutil.copytree(run.path, run.path.with_name("copy"))
        answer("resume", run.path.with_name("copy"))
        shutil.rmtree(run.path.with_name("copy"))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("progress", "best_value", [1.0]),
        ("progress", "stop_value", "low"),
        ("progress", "num_missed", -1),
        ("progress", "stopped_early", "no"),
        ("recipe", None, [None]),
    ],
)
def test_a_value_of_another_kind_in_the_state_is_refused(run, section, key, value):
    folder = run.path / CHECKPOINT
    state = json.loads((folder / "state.json").read_text())
    if key is None:
        state[section] = value
    else:
        assert key in state[section]
        state[section][key] = value
    _signed(folder, "state.json", json.dumps(state).encode())
    told = section if key is None else f"{section}.{key}"
    assert f"is damaged: {told} does not hold what it should" in answer("resume", run.path)[1]


def test_the_state_of_another_schedule_is_refused(tmp_path):
    keys = ["schedule.name=plateau", "train.length=4up", "checkpoint.every=2up", "checkpoint.keep=2"]
    assert answer("train", *TINY["mnist"], *keys, "--out", tmp_path / "run") == (0, "")
    run = Run(tmp_path / "run")
    *_, folder, last = reading.checkpoint_paths(run.checkpoints)
    shutil.rmtree(last)
    run.write_summary({**run.summary(), "state": "interrupted"})
    state = json.loads((folder / "state.json").read_text())
    for damage in ({"best": 1.0}, {**state["schedule"], "num_bad": None}):
        _signed(folder, "state.json", json.dumps({**state, "schedule": damage}).encode())
        assert "schedule does not hold what it should" in answer("resume", run.path)[1]


def test_headers_of_tensors_with_any_content():
    tensors = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.tensor([True]), "c": torch.zeros(0, 4)}
    original = safetensors.torch.save(tensors)
    length = int.from_bytes(original[:8], "little")
    header, body, seen = json.loads(original[8 : 8 + length]), original[8 + length :], set()

    def whole(tree: object) -> bytes:
        text = json.dumps(tree).encode()
        return len(text).to_bytes(8, "little") + text + body

    @attack(800)
    @given(changed_tree(header).map(whole) | damaged([original], head=length + 8))
    def change(data):
        try:
            ours = tensors_in(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        except ValueError as error:
            check_sentence(str(error))
            seen.add("refused")
            return
        seen.add("read")
        try:
            theirs = safetensors.torch.load(data)
        except Exception:  # stricter on overlaps and gaps
            return
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key].nan_to_num(), theirs[key].nan_to_num()) for key in ours)

    change()
    assert seen == {"read", "refused"}


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [2**70, 2**70 + 4]},
        [],
    ],
)
def test_headers_of_tensors_that_lie(entry):
    text = json.dumps({"a": entry}).encode()
    data = np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(16), np.uint8).copy()
    with pytest.raises(ValueError, match=r"lies outside|does not describe"):
        tensors_in(torch.from_numpy(data))


def test_weights_with_other_names_and_shapes_are_one_sentence(run):
    folder = run.path / CHECKPOINT
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = next(iter(weights))
    for changed in (
        {key: value for key, value in weights.items() if key != name},
        weights | {"other": torch.zeros(2)},
        weights | {name: torch.zeros(3)},
        weights | {name: torch.zeros(())},
        {"\x1b[31m": torch.zeros(1)},
    ):
        _signed(folder, "model.safetensors", safetensors.torch.save(changed))
        for command in ("validate", "resume"):
            code, text = answer(command, run.path, *(["--checkpoint", 10] if command == "validate" else []))
            assert code == 2
            assert "does not fit the model" in text


# ------------------------------------------------------------------------------------------------ Hugging Face folders


def test_folders_of_hugging_face_with_any_content(tmp_path):
    from podium.recipe.loading import load_recipe

    recipe = load_recipe(*TINY["gpt2"][:1], TINY["gpt2"][1:])
    workload = workload_class("gpt2")(recipe.workload.model, recipe.workload.data)
    model, _ = build_model(recipe, workload, torch.device("cpu"))
    folder = tmp_path / "hf"
    huggingface.export(workload, model, "gpt2", folder)
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    right, tally = weights_sha256(model), Tally("Hugging Face folders")

    @attack(250)
    @given(st.data(), st.sampled_from(sorted(files)))
    def damage(data, name):
        original = files[name]
        changes = damaged([original], head=300)
        if name == "config.json":
            changes |= changed_tree(json.loads(original)).map(json.dumps).map(str.encode)
        (folder / name).write_bytes(data.draw(changes))

        def load() -> None:
            huggingface.start_from(workload.from_huggingface, model, folder)
            if name == "config.json":
                assert weights_sha256(model) == right

        tally.refused(load, folder / name, folder)
        (folder / name).write_bytes(original)

    damage()
    for kind in NO_FILES:
        for name in files:
            replace_by(folder / name, kind)
            assert tally.refused(lambda: huggingface.start_from(workload.from_huggingface, model, folder), folder)
            if (folder / name).is_dir():
                (folder / name).rmdir()
            (folder / name).unlink(missing_ok=True)
            (folder / "pipe").unlink(missing_ok=True)
            (folder / name).write_bytes(files[name])
    tally.report()
    assert tally.right
    assert len(tally.kinds) > 3
