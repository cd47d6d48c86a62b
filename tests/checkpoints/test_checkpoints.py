"""Checkpoints: whole or not there, every byte checked, nothing executed, earlier ones never harmed."""

import errno
import hashlib
import json
import os
import pickle

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from podium.checkpoints import reading, tensor_file, writing
from podium.contract import by_dimension
from podium.distributed.digest import weights_sha256
from podium.errors import TrainingFailed, UserError
from podium.kernels.conv import conv3d_weight_copy
from podium.optim.optimisers import build_optimiser, step
from podium.optim.state_tensors import state_tensors
from podium.recipe.sections.checkpoint import CheckpointSection
from podium.recipe.sections.optim import OptimSection


def trained(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimiser = build_optimiser(OptimSection(name="adamw", lr=1e-2), model, by_dimension(model))
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        step(optimiser, 5.0, 1e-2)
        model.zero_grad()
    return model, optimiser


def test_saved_and_restored_state_is_equal_to_the_bit(tmp_path):
    model, optimiser = trained(1)
    path = writing.save(tmp_path, 7, model, optimiser, {"progress": {"loss": 0.1}})
    other, other_optimiser = trained(2)
    assert weights_sha256(other) != weights_sha256(model)
    found = reading.load(path)
    found.restore(other, other_optimiser)
    assert (found.update, found.state["progress"]) == (7, {"loss": 0.1})
    assert weights_sha256(other) == weights_sha256(model)
    before, after = state_tensors(optimiser), state_tensors(other_optimiser)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_sha256_sees_every_bit_name_and_shape():
    model, _ = trained()
    first = weights_sha256(model)
    with torch.no_grad():
        model[1].running_mean[0] = torch.nextafter(model[1].running_mean[0], torch.tensor(9.0))
    assert weights_sha256(model) != first


@pytest.mark.parametrize("file", ["model.safetensors", "optimiser.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, file, harm):
    model, optimiser = trained()
    writing.save(tmp_path, 1, model, optimiser, {})
    path = writing.save(tmp_path, 2, model, optimiser, {}) / file
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 0x80
        path.write_bytes(data)
    elif harm == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    warnings: list[str] = []
    found = reading.load_latest(tmp_path, warnings.append)
    assert found is not None
    assert found.update == 1
    assert len(warnings) == 1
    assert "update-00000002" in warnings[0]


def test_no_good_checkpoint_at_all_is_an_error_and_none_is_none(tmp_path):
    assert reading.load_latest(tmp_path, print) is None
    model, optimiser = trained()
    (writing.save(tmp_path, 1, model, optimiser, {}) / "manifest.json").unlink()
    with pytest.raises(UserError, match="none of the 1 checkpoints"):
        reading.load_latest(tmp_path, lambda _: None)


def test_pickled_code_in_place_of_weights_is_never_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'sprung')!r}, 'w')",))

    model, optimiser = trained()
    path = writing.save(tmp_path, 1, model, optimiser, {})
    data = pickle.dumps(Trap())
    (path / "model.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="damaged"):
        reading.load(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_disk_full_at_any_write_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, monkeypatch, call):
    model, optimiser = trained()
    writing.save(tmp_path, 1, model, optimiser, {})
    real, calls = tensor_file.write_synced, []

    def full(path, parts):
        calls.append(path)
        if len(calls) == call:
            path.write_bytes(next(iter(parts))[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, parts)

    monkeypatch.setattr(writing, "write_synced", full)
    monkeypatch.setattr(tensor_file, "write_synced", full)
    with pytest.raises(UserError, match="the disk is full"):
        writing.save(tmp_path, 2, model, optimiser, {})
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert reading.load_latest(tmp_path, print).update == 1


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    model, optimiser = trained()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(TrainingFailed, match=r"0\.weight is not finite"):
        writing.save(tmp_path, 1, model, optimiser, {})
    assert list(tmp_path.iterdir()) == []


def test_weights_whose_sum_is_too_large_are_saved_all_the_same(tmp_path):
    model, optimiser = trained()
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    assert writing.save(tmp_path, 1, model, optimiser, {}).is_dir()


def test_left_overs_of_a_killed_save_are_not_checkpoints_and_go_away(tmp_path):
    model, optimiser = trained()
    (tmp_path / ".writing-update-00000009").mkdir()
    assert reading.checkpoint_paths(tmp_path) == []
    writing.save(tmp_path, 1, model, optimiser, {})
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path):
    model, optimiser = trained()
    path = writing.save(tmp_path, 1, model, optimiser, {})
    with pytest.raises(UserError, match="does not fit the model"):
        reading.load(path).restore(nn.Linear(2, 2))


def test_files_of_tensors_are_those_of_the_safetensors_library(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "long": torch.arange(7),
        "name with ünïcode / and spaces": torch.randn(3, 4),
        "big": torch.randn(3, 1 << 20),
    }
    checksum, size = tensor_file.write_tensors(tmp_path / "ours", tensors)
    data = (tmp_path / "ours").read_bytes()
    assert (xxhash.xxh3_128(data).hexdigest(), len(data)) == (checksum, size)
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    ours = tensor_file.tensors_in(tensor_file.read_checked(tmp_path / "theirs")[0])
    for found in (theirs, ours):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_file_systems_that_insist_on_their_cache_get_the_same_bytes(tmp_path, monkeypatch):
    tensors = {"big": torch.randn(3, 1 << 20), "odd": torch.randn(7)}
    expected = tensor_file.write_tensors(tmp_path / "expected", tensors)
    real_open, real_write = os.open, os.write

    def refusing(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        assert tensor_file.write_tensors(tmp_path / "at opening", tensors) == expected
    writes = []

    def once(file, data):  # the first block refused, then half of it taken
        writes.append(len(data))
        if len(writes) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(file, data[: len(data) // 2] if len(writes) == 2 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", once)
        assert tensor_file.write_tensors(tmp_path / "at writing", tensors) == expected
    for name in ("at opening", "at writing"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize(("o", "c"), [(128, 130), (200, 96)])
def test_kernels_of_volumes_are_copied_as_they_are(o, c, monkeypatch):
    """By a loop of ours where they lie in memory as their products need them."""
    copied = []
    copy_kernel = conv3d_weight_copy.copy_kernel
    monkeypatch.setattr(conv3d_weight_copy, "copy_kernel", lambda *args: (copied.append(args), copy_kernel(*args)))
    model = nn.Module()
    model.turned = nn.Parameter(torch.randn(4, 4, 4, c, o).permute(4, 3, 0, 1, 2))
    model.plain = nn.Parameter(model.turned.detach().contiguous())
    section = OptimSection(name="sgd", lr=0.1)
    snapshot = writing.Snapshot.take(1, model, build_optimiser(section, model, by_dimension(model)), {})
    assert len(copied) == 1
    for copy in snapshot.weights.values():
        assert copy.is_contiguous()
        assert torch.equal(copy, model.turned)


def test_checkpoints_of_the_first_format_are_read(tmp_path):
    model, optimiser = trained()
    path = writing.save(tmp_path, 1, model, optimiser, {})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = 1
    for name, entry in manifest["files"].items():
        del entry[tensor_file.CHECKSUM]
        entry["sha256"] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert reading.load(path).update == 1
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"model\.safetensors does not match its checksum"):
        reading.load(path)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_file_of_tensors_are_refused(data):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        tensor_file.tensors_in(torch.frombuffer(bytearray(data + b" "), dtype=torch.uint8))


def test_a_checkpoint_written_beside_training_is_of_the_moment_it_was_asked_for(tmp_path):
    model, optimiser = trained()
    with writing.Saver(tmp_path, CheckpointSection(keep=1)) as saver:
        for update in (1, 2, 3):
            before = weights_sha256(model)
            saver.save(update, model, optimiser, {}, best=2)
            with torch.no_grad():
                model[0].weight += 1.0  # training goes on
    assert [path.name for path in reading.checkpoint_paths(tmp_path)] == ["update-00000002", "update-00000003"]
    other, other_optimiser = trained(2)
    reading.load_latest(tmp_path, print).restore(other, other_optimiser)
    assert weights_sha256(other) == before


def test_what_went_wrong_beside_training_is_raised_by_the_next_save(tmp_path):
    model, optimiser = trained()
    (tmp_path / "file").write_text("in the way")
    with writing.Saver(tmp_path / "file", CheckpointSection()) as saver:
        saver.save(1, model, optimiser, {}, None)
        with pytest.raises(UserError, match="could not be written"):
            saver.save(2, model, optimiser, {}, None)


def test_what_went_wrong_beside_training_is_raised_at_the_end(tmp_path):
    model, optimiser = trained()
    (tmp_path / "file").write_text("in the way")
    saver = writing.Saver(tmp_path / "file", CheckpointSection())
    with pytest.raises(UserError, match="could not be written"), saver:
        saver.save(1, model, optimiser, {}, None)
