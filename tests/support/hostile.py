"""What attacks readers: damaged bytes, values of any kind, things that are no files; and the rule they are held to.

The rule: the right result, or a UserError whose text is one sentence. `Tally` counts what was tried and which sentences
were given. PODIUM_HOSTILE scales the number of inputs (`make soak`); PODIUM_HOSTILE_REPORT names a file for the counts.
"""

import collections
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from podium.errors import UserError
from podium.ui.visible import visible

SCALE = float(os.environ.get("PODIUM_HOSTILE", "1"))
#: longer than any of these takes on a busy machine, shorter than anybody would wait
_HANGS_S = 60


def attack(num_inputs: int) -> settings:
    """Settings for that many inputs, the same ones every time unless there are more (`make soak`)."""
    return settings(
        max_examples=max(1, int(num_inputs * SCALE)),
        deadline=None,
        derandomize=SCALE == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ------------------------------------------------------------------------------------------------------------ the rule


class Tally:
    """Inputs tried, and the sentences they gave by their kind: without names, numbers and values."""

    def __init__(self, reader: str) -> None:
        self.reader, self.inputs, self.right = reader, 0, 0
        self.kinds: collections.Counter[str] = collections.Counter()

    def refused(self, call: Callable[[], Any], *names: Path | str) -> bool:
        """Whether the call gives a sentence; anything else than that or a result fails the test."""
        self.inputs += 1
        with no_hang():
            try:
                call()
            except UserError as error:
                self.add(str(error), *names)
                return True
        self.right += 1
        return False

    def add(self, text: str, *names: Path | str) -> None:
        """Check that it is one sentence, and count it."""
        check_sentence(text)
        for name in names:
            text = text.replace(str(name), "FILE")
        text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "TEXT", text)
        self.kinds[re.sub(r"[-+.]?\d[\d,.e+-]*", "N", text)[:60]] += 1

    def report(self) -> None:
        if file := os.environ.get("PODIUM_HOSTILE_REPORT"):
            with Path(file).open("a") as out:
                out.write(f"{self.reader}: {self.inputs} inputs, {self.right} right, {len(self.kinds)} kinds\n")
                out.writelines(f"    {count:6} {kind}\n" for kind, count in self.kinds.most_common())


def check_sentence(text: str) -> None:
    """One line, not empty, without the end of a traceback in it."""
    assert text.strip(), "an empty sentence"
    text = visible(text)  # as it is shown
    assert len(text.splitlines()) == 1, text
    assert not text.endswith("."), text
    assert "Traceback" not in text, text
    assert not re.search(r"\b(KeyError|TypeError|ValueError|AttributeError|IndexError)\b", text), text


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail what takes longer than anybody would wait."""

    def hangs(number: int, frame: object) -> None:
        raise AssertionError(f"it hangs: no answer within {_HANGS_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, _HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --------------------------------------------------------------------------------------------------- bytes and values


@st.composite
def damaged(draw: st.DrawFn, originals: list[bytes], head: int | None = None) -> bytes:
    """One of the originals with one to three changes; most of them within its first `head` bytes, where given."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        limit = min(len(data), head) if head is not None and draw(st.integers(0, 3)) else len(data)
        at = draw(st.integers(0, max(0, limit - 1)))
        change = draw(st.sampled_from(["flip", "byte", "cut", "insert", "number", "repeat", "zero", "random"]))
        if not data or change == "random":
            data[at:at] = draw(st.binary(max_size=40))
        elif change == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "byte":
            data[at] = draw(st.sampled_from([0, 1, 0x1B, 0x20, 0x22, 0x2C, 0x5B, 0x7B, 0x7F, 0x80, 0xFE, 0xFF]))
        elif change == "cut":
            del data[at : at + draw(st.one_of(st.integers(1, 16), st.just(len(data))))]
        elif change == "insert":
            data[at:at] = draw(st.sampled_from([b"\0", b"[" * 200, b"9" * 50, b"\xff\xfe", b"\n", b"{}", b"\x1b[2J"]))
        elif change == "number":
            value = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
            width = draw(st.sampled_from([2, 4, 8]))
            order = draw(st.sampled_from(["little", "big"]))
            data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, order)
        elif change == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        else:
            length = min(draw(st.integers(1, 64)), len(data) - at)
            data[at : at + length] = bytes(length)
    return bytes(data)


#: anything that JSON can say
JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([10**400, -1, 0, 2**31, 2**63, 10**18]),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(["", "\x1b[31m", "‮abc", "done", "running", "2026-01-01T00:00:00", "../../x", "9" * 50]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def changed_tree(draw: st.DrawFn, tree: Any, depth: int = 0) -> Any:
    """The tree with one value somewhere in it replaced, removed or added."""
    if not isinstance(tree, dict | list) or not tree or (depth and not draw(st.integers(0, 2))):
        return draw(JSON_VALUES)
    copy: Any = tree.copy()
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = draw(st.sampled_from(keys))
    what = draw(st.integers(0, 7))
    if what == 0:
        del copy[key]
    elif what == 1 and isinstance(tree, dict):
        copy[draw(st.text(max_size=8))] = draw(JSON_VALUES)
    else:
        copy[key] = draw(changed_tree(tree[key], depth + 1))
    return copy


# ------------------------------------------------------------------------------------------------------------ no files


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


#: what may be in the place of a file, by what it is
NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (_pipe(path.with_name("pipe")), path.symlink_to(path.with_name("pipe")))[1],
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "four terabytes": _huge,
    "nothing": lambda path: path.touch(),
}


def replace_by(path: Path, kind: str) -> None:
    """Put one of NO_FILES in the place of a file."""
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
