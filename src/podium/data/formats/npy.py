"""Reads `.npy` files of numbers, which may come from anywhere: a header that promises more than the file has, pickled
objects and archives of arrays are refused before anything is allocated."""

import tokenize
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from podium.machine.bounded_files import open_regular

#: of the text of a header
_TEXT_DAMAGE = (tokenize.TokenError, UnicodeError, AttributeError, KeyError)
#: what numpy raises about files that hold no array of numbers
DAMAGE = (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, EOFError, MemoryError, *_TEXT_DAMAGE)


def read_npy(path: Path) -> NDArray:
    """Read an array; raise OSError if the file cannot be read, and ValueError if it is no array of numbers."""
    open_regular(path).close()
    try:
        # Mapped first: numpy would allocate what the header promises.
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except DAMAGE as error:
        raise ValueError("it does not hold an array of numbers") from error
