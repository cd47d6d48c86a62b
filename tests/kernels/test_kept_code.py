"""Machine code on disk: loaded by later processes, and by nobody where others could have changed it."""

import pytest
import torch

from podium.kernels.jit import kept_code, routine
from podium.kernels.jit.kept_code import Kept
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, number
from podium.machine.cache_folder import cache_folder

CODE = Kept(b"object code", 12)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))


def _doubles(written: list[int]):
    """A function that writes the same routine whenever it is called: out = 2 · x."""

    def write(num: int) -> Code:
        written.append(num)
        code = Code(num_arguments=2)
        code.num_scratch = 7
        source, out = (code.pointer(address, FLOAT) for address in code.arguments)
        with code.every_piece(), code.loop(number(0), number(num), WIDTH) as at:
            value = code.vector(source, at, WIDTH)
            code.store_vector(code.ir.fadd(value, value), out, at)
        return code

    return routine.machine_code(write)


def test_a_routine_is_written_once_and_loaded_by_later_processes():
    written: list[int] = []
    x = torch.randn(32)
    for _ in range(2):  # each with nothing in memory, as a new process
        doubles, out = _doubles(written)(32), torch.empty(32)
        doubles(1, x, out)
        assert torch.equal(out, x + x)
        assert doubles.num_scratch == 7
    assert written == [32]
    _doubles(written)(16)
    assert written == [32, 16], "other arguments are another routine"


def test_a_damaged_file_is_compiled_again():
    written: list[int] = []
    _doubles(written)(32)
    (file,) = cache_folder("kernels").glob("*/*")
    content = bytearray(file.read_bytes())
    for damaged in (content[: len(content) // 2], b"", bytes([*content[:100], content[100] ^ 1, *content[101:]])):
        file.write_bytes(damaged)
        _doubles(written)(32)
        assert file.read_bytes() == content
    assert len(written) == 4


def test_what_others_may_write_to_is_not_run(tmp_path):
    def kept() -> bool:
        kept_code.keep("version", "name", CODE)
        return kept_code.load("version", "name") == CODE

    assert kept()
    folder = cache_folder("kernels", "version")
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in (folder / "name", folder, folder.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert kept_code.load("version", "name") is None, path
        path.chmod(mode)
    assert kept_code.load("version", "name") == CODE
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert kept_code.load("version", "name") is None


def test_where_nothing_can_be_kept_every_process_compiles(monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", "/proc/nowhere")
    written: list[int] = []
    for _ in range(2):
        _doubles(written)(32)
    assert written == [32, 32]


def test_code_of_other_versions_is_forgotten_some_time():
    for version in range(12):
        kept_code.keep(f"version-{version}", "name", CODE)
    assert kept_code.load("version-11", "name") == CODE
    assert len([*cache_folder("kernels").iterdir()]) == 8
