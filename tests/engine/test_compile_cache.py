"""Folders of compiled models: whole or made anew, whatever happened to them. torch's part is played by a function."""

from pathlib import Path

import pytest
import torch
from torch import nn

from podium.distributed.instances import Instances
from podium.engine import compile_cache
from podium.engine.compile import deterministic_algorithms, kept_as_they_are
from podium.machine.cache_folder import cache_folder


class Compiler:
    """Writes a file where there is none; one that is not as it wrote it cannot be loaded."""

    def __init__(self) -> None:
        self.num_compiled = self.num_loaded = 0

    def passes(self, folder: Path) -> bool:
        file = folder / "ab" / "code.so"
        if file.exists():
            if file.read_text() != "machine code":
                raise OSError("file too short")
            self.num_loaded += 1
            return True
        file.parent.mkdir(parents=True)
        file.write_text("machine code")
        self.num_compiled += 1
        return False


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache, "user_folder", lambda: "")
    compiler = Compiler()
    monkeypatch.setattr(compile_cache, "run_with_cache", lambda folder, first_passes: compiler.passes(folder))
    return compiler


def made() -> compile_cache.Executable:
    return compile_cache.make("model-1", Instances.alone(), lambda: None)


def test_compiled_once_then_loaded(compiler):
    first, second = made(), made()
    assert (first.state, second.state) == ("compiled", "loaded")
    assert (first.cache, second.cache) == ("model-1", "model-1")
    assert first.sentence().startswith("compiled in ")
    assert first.sentence().endswith(" s, kept for later runs")
    assert second.sentence().startswith("loaded in ")
    assert (compiler.num_compiled, compiler.num_loaded) == (1, 1)


def cut_short(folder: Path) -> None:
    (folder / "ab" / "code.so").write_text("machine")


def never_finished(folder: Path) -> None:
    (folder / "kept.json").unlink()


def unreadable_list(folder: Path) -> None:
    (folder / "kept.json").write_text("[1, 2")


def gone(folder: Path) -> None:
    (folder / "ab" / "code.so").unlink()


@pytest.mark.parametrize("damage", [cut_short, never_finished, unreadable_list, gone])
def test_what_is_damaged_is_never_loaded_but_made_anew(compiler, damage):
    made()
    damage(cache_folder("compiled", "model-1"))
    assert made().state == "compiled"
    assert (compiler.num_compiled, compiler.num_loaded) == (2, 0)
    assert made().state == "loaded"


def test_what_cannot_be_loaded_is_made_anew(compiler, monkeypatch, capsys):
    """Whole, but of no use: another C library, for instance."""
    made()
    cut_short(cache_folder("compiled", "model-1"))
    monkeypatch.setattr(compile_cache, "is_whole", lambda folder: True)
    assert made().state == "compiled"
    assert compiler.num_compiled == 2
    assert "file too short" in capsys.readouterr().err


def test_a_model_that_cannot_be_compiled_is_no_damage(compiler, monkeypatch):
    def fails(folder: Path, first_passes: object) -> bool:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(compile_cache, "run_with_cache", fails)
    with pytest.raises(NotImplementedError, match="no such operator"):
        made()


def test_the_users_own_folder_is_used_and_left_alone(compiler, monkeypatch, tmp_path, capsys):
    own = tmp_path / "own"
    monkeypatch.setattr(compile_cache, "user_folder", lambda: str(own))
    assert made().state == "compiled"
    assert made().cache == str(own)
    assert [path.name for path in own.iterdir()] == ["ab"]
    cut_short(own)
    assert made().state == "compiled"  # in a folder of ours
    assert "TORCHINDUCTOR_CACHE_DIR" in capsys.readouterr().err
    assert (own / "ab" / "code.so").read_text() == "machine"


def test_models_and_micro_batches_have_folders_of_their_own():
    samples, other = {"input": torch.zeros(4, 3)}, {"input": torch.zeros(2, 3)}
    models = [nn.Linear(3, 5), nn.Linear(3, 5, bias=False), nn.Linear(3, 6)]
    names = {compile_cache.folder_name(model, samples) for model in models}
    assert len(names | {compile_cache.folder_name(models[0], other)}) == 4
    assert compile_cache.folder_name(nn.Linear(3, 5), samples) in names  # other weights, the same code


def test_a_trial_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(torch.randn(5, 3)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    values = [None if grad is None else grad.clone() for grad in grads]
    buffers = [buffer.clone() for buffer in model.buffers()]
    with kept_as_they_are(list(model.parameters()), list(model.buffers())), deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        model(torch.randn(5, 3)).sum().backward()
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True))
    assert all(torch.equal(buffer, before) for buffer, before in zip(model.buffers(), buffers, strict=True))
