"""Text from files and other people's machines, made safe to show: nothing in it can steer a terminal."""

import re
import unicodedata

#: characters that change how others are shown, beside those that Unicode calls control characters: directions of
#: writing, what joins or has no width, separators of lines
_STEERING = {
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    0x061C,
    0xFEFF,
    *range(0xFFF9, 0xFFFC),
}
#: where a line of `user_frames` begins
_FRAME = re.compile(r"\n(?=  [^\n]+:\d+, in )")


def visible(text: str) -> str:
    r"""Return the text on one line, with control and direction characters written out: `\x1b`, `\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_written_out(char) if _steers(char) else char for char in text)


def visible_lines(text: str) -> str:
    """Return the text in the same way, but with its lines as they are."""
    return "\n".join(map(visible, text.split("\n")))


def visible_sentence(text: str) -> str:
    """Return an error's sentence on one line, and the frames of a user's own files beneath it as they are."""
    return "\n".join(map(visible, _FRAME.split(text)))


def _steers(char: str) -> bool:
    # Cc: control characters, Cs: halves of characters, as undecodable names of files have, which cannot be printed
    return ord(char) in _STEERING or unicodedata.category(char) in ("Cc", "Cs") or 0xE0000 <= ord(char) < 0xE0080


def _written_out(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
